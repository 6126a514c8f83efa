"""hunch plan: when speculation pays and what it saves, from sizes alone; no machine is needed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hunch.cli import options as o
from hunch.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from hunch.bench.gpus import Gpu
    from hunch.bench.plan import Planner
    from hunch.bench.records import Report
    from hunch.bench.roofline import Machine


@dataclass(kw_only=True)
class Options:
    target: str | None = o.option(
        None,
        "The target's parameters, say 70B, or a model, whose config is read; default: 8B, or the "
        "model of --from.",
        "--target",
        "-t",
    )
    draft: str | None = o.option(
        None, "The draft model's, likewise; default: lookups, which cost nothing."
    )
    gpu: str | None = o.option(
        None, "A GPU's name; --list-gpus shows them. Default: H100, or that of --from."
    )
    tp: int = o.option(1, "GPUs that share every pass.", min=1)
    pp: int = o.option(1, "Stages of layers; with --link.", min=1)
    dtype: str = o.option("bf16", "Type of the weights: bf16, fp8, int8, int4.")
    acceptance: float | None = o.option(
        None, "Chance that a guess is right; default: 0.7, without a draft 0.45."
    )
    prompt: int = o.option(512, "Tokens of a prompt.", min=1)
    answer: int = o.option(256, "Tokens of an answer.", min=1)
    rps: float | None = o.option(None, "Requests per second to serve.", min=0.001)
    seconds: float | None = o.option(None, "How long they come; default: for ever.", min=0.01)
    price: float | None = o.option(None, "Price of a GPU hour; adds the cost.")
    bandwidth: float | None = o.option(
        None, "Memory bandwidth in GB/s, as advertised; in place of --gpu's."
    )
    tflops: float | None = o.option(None, "Dense 16-bit TFLOP/s; in place of --gpu's.")
    memory: float | None = o.option(None, "GB of memory; in place of --gpu's.")
    layers: int | None = o.option(None, "Layers of the target; default: by its size.")
    kv_bytes: float | None = o.option(None, "Bytes of KV per token; default: by its size.")
    from_report: Path | None = o.option(None, "Calibrate by a report of hunch bench.", "--from")
    link: str | None = o.option(
        None, "Print what --tp ranks exchange over it (nvlink4, pcie5, ndr) and leave."
    )
    list_gpus: bool = o.option(False, "Print the table of GPUs and leave.", "--list-gpus")
    as_json: o.Json = False


ABOVE_ZERO = ("rps", "seconds", "price", "bandwidth", "tflops", "memory", "layers", "kv_bytes")


@o.takes(Options)
def plan(ctx: typer.Context, given: Options) -> None:
    """Estimate speed-up and cost on a GPU, from sizes alone.

    It prints the expected speed-up by load, the load from which drafting costs time, GPU hours and
    their price. It is a roofline with constants measured on an H200 (docs/benchmarks.md says how
    near it comes); --from calibrates it by your own report.
    """
    used = {"as_json"}
    if given.list_gpus:
        o.refuse(
            ctx, [*ctx.params.keys() - used - {"list_gpus"}], "--list-gpus prints a table alone"
        )
        _list(given.as_json)
        return
    if given.link is not None:
        used |= {"link", "gpu", "tp", "pp"}
        o.refuse(ctx, [*ctx.params.keys() - used], "--link says what ranks exchange, no more")
        _show_exchange(given, given.link)
        return
    o.refuse(ctx, ("pp",), "goes with --link, which says what stages exchange")
    if given.rps is None:
        o.refuse(ctx, ("price", "seconds"), "goes with --rps, the load that it is about")
    for name in ABOVE_ZERO:
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} must be a number above 0")
    report = None if given.from_report is None else _read(given.from_report, given.target)
    found = _figures(_planner(given, report), given)
    if given.as_json:
        print(json.dumps(found))
    else:
        _show(found, given)


def _read(path: Path, target: str | None) -> Report:
    """The report to calibrate by; one whose model is of unknown size needs the target's."""
    from hunch.bench.plan import size_of
    from hunch.bench.records import load_report

    report = load_report(path)
    if size_of(report) is None and target is None:
        raise ConfigError(f"{path} does not say how large its model is: give --target")
    if not report.environment.get("gpu") and not any(
        run.counts().get("drafted") for run in report.runs
    ):
        typer.echo(
            "the report is a CPU's, where checking a guess costs more than on a GPU, and checks "
            "none that would tell how much: expect less of drafts, above all at several requests "
            "at once, or measure a method too (hunch bench --speculate suffix --json)",
            err=True,
        )
    return report


def _planner(given: Options, report: Report | None) -> Planner:
    from hunch.bench.calibration import calibrate
    from hunch.bench.device.named import size_from
    from hunch.bench.plan import ACCEPTANCE, LOOKUP_ACCEPTANCE, Planner, Workload, size_of

    machine = _machine(given, report)
    size = known = None if report is None else size_of(report)
    if size is None or given.target is not None:
        size = size_from(given.target or "8B", given.dtype)
    layers, kv_bytes = given.layers or size.num_layers, given.kv_bytes or size.kv_bytes
    size = replace(size, num_layers=layers, kv_bytes=kv_bytes)
    drafter = None if given.draft is None else size_from(given.draft, given.dtype)
    chance = None
    if report is not None:
        has_draft = drafter is not None
        machine, chance = calibrate(report, machine, known or size, has_draft=has_draft)
    chance = chance or (LOOKUP_ACCEPTANCE if drafter is None else ACCEPTANCE)
    chance = chance if given.acceptance is None else given.acceptance
    work = Workload(given.prompt, given.answer, given.rps, given.seconds)
    return Planner(machine, size, drafter, chance, work)


def _figures(planner: Planner, given: Options) -> dict[str, Any]:
    from hunch.bench.plan import table

    return {
        "machine": planner.machine.name,
        "target": planner.target.name,
        "draft": given.draft,
        "acceptance": planner.acceptance,
        "scale": planner.machine.scale,
        "token_cost": planner.machine.token_cost,
        "most_requests_at_once": planner.most_rows,
        "by_load": table(planner),
        "costs_from": {length: planner.inversion(length) for length in (3, 5, 7)},
        "at_rate": _at_rate(planner, given.price) if given.rps else None,
    }


def _machine(given: Options, report: Report | None) -> Machine:
    from hunch.bench.gpus import Gpu, find
    from hunch.bench.roofline import Machine

    bandwidth, tflops, memory = given.bandwidth, given.tflops, given.memory
    if given.gpu is not None or not (bandwidth or tflops or memory):
        card = find(given.gpu or "H100") if report is None or given.gpu else _measured_on(report)
        card = replace(
            card,
            bandwidth_gbs=bandwidth or card.bandwidth_gbs,
            bf16_tflops=tflops or card.bf16_tflops,
            memory_gb=memory or card.memory_gb,
        )
    elif bandwidth is None or tflops is None or memory is None:
        raise ConfigError("without --gpu all of --bandwidth, --tflops and --memory are needed")
    else:
        card = Gpu("this machine", memory, bandwidth, tflops, None, "given")
    return Machine.of(card, given.tp, given.dtype)


def _measured_on(report: Report) -> Gpu:
    """The report's GPU; of a machine that is not in the table an H100's figures, to be scaled."""
    from hunch.bench.gpus import find, of_device

    where = report.environment
    known = of_device(where["gpu"]) if where.get("gpu") else None
    if known is not None:
        return known
    card = replace(find("H100"), name=where.get("gpu") or where.get("cpu") or "H100")
    if not where.get("gpu") and where.get("memory_bytes"):
        card = replace(card, memory_gb=where["memory_bytes"] / 1e9)
    return card


def _at_rate(planner: Planner, price: float | None) -> dict[str, Any]:
    answer = planner.work.answer
    found: dict[str, Any] = {}
    for name, is_plain in (("plain", True), ("speculative", False)):
        load, full = planner.at_rate(is_plain), planner.least_gpu_hours(is_plain)
        found[name] = {
            "machines": load.machines,
            "requests_under_way": load.rows,
            "seconds_per_answer": load.seconds,
            "ms_per_token": 1e3 * load.seconds / answer,
            "draft_length": load.choice.length,
            "busy": load.busy,
            "capacity_rps": planner.capacity(is_plain),
            "gpu_hours_per_million_tokens": load.gpu_hours,
            "gpu_hours_per_million_tokens_when_full": full,
        }
        if price is not None:
            found[name]["cost_per_million_tokens"] = load.gpu_hours * price
            found[name]["cost_per_million_tokens_when_full"] = full * price
    return found


def _show(found: dict[str, Any], given: Options) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    draft = f"a draft of {found['draft']}" if found["draft"] else "lookups"
    scale = "" if found["scale"] == 1 else f", calibrated: {found['scale']:.2f} times the roofline"
    console.print(
        f"{found['target']} on {found['machine']} with {draft}, a guess right with chance "
        f"{found['acceptance']:.2f}{scale}"
    )
    table = _table(
        "requests at once", "plain tok/s", "ms per token", "drafts tok/s", "ms per token",
        "speed-up", "draft length",
    )  # fmt: skip
    for row in found["by_load"]:
        table.add_row(
            str(row["requests_at_once"]),
            f"{row['plain_tokens_per_second']:,.0f}",
            f"{row['plain_ms_per_token']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ms_per_token']:.2f}",
            f"{row['speedup']:.2f}x",
            str(row["draft_length"] or "none"),
        )
    console.print(table)
    for length, rows in found["costs_from"].items():
        where = f"from {rows} requests at once on" if rows else "at no load that fits the memory"
        where = "at every load" if rows == 1 else where
        console.print(f"A fixed length of {length} costs time {where}.")
    if found["at_rate"]:
        _show_rate(console, found["at_rate"], given)


def _show_rate(console: Any, found: dict[str, Any], given: Options) -> None:
    table = _table(f"at {given.rps:g} requests per second", "plain", "speculative")
    lines = {
        "machines": ("machines", "{:.0f}"),
        "requests under way on each": ("requests_under_way", "{:.1f}"),
        "seconds per answer": ("seconds_per_answer", "{:.2f}"),
        "ms per token": ("ms_per_token", "{:.2f}"),
        "load, of what it can serve": ("busy", "{:.0%}"),
        "GPU hours per million tokens": ("gpu_hours_per_million_tokens", "{:.3f}"),
        "the same with machines full": ("gpu_hours_per_million_tokens_when_full", "{:.3f}"),
        "cost per million tokens": ("cost_per_million_tokens", "{:.3f}"),
        "the same with machines full ": ("cost_per_million_tokens_when_full", "{:.3f}"),
    }
    for label, (key, form) in lines.items():
        if key in found["plain"]:
            cells = [form.format(found[name][key]) for name in ("plain", "speculative")]
            table.add_row(label, *cells)
    console.print(table)
    if given.price is None:
        console.print("--price PER_HOUR adds what a million tokens cost.")


def _table(*columns: str, **how: Any) -> Table:
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD, **how)


def _show_exchange(given: Options, name: str) -> None:
    from rich.console import Console

    from hunch.bench.collectives import LINKS, rows_of
    from hunch.bench.gpus import find

    if name not in LINKS:
        raise ConfigError(f"--link {name!r} must be one of {', '.join(LINKS)}")
    gpu, pp = given.gpu or "H100", given.pp
    found = rows_of(LINKS[name], find(gpu).bandwidth_gbs * 1e9, given.tp, num_stages=pp)
    if given.as_json:
        print(json.dumps(found))
        return
    columns = {
        "model": ("network", ""), "rows": ("rows", ""), "messages": ("messages", ""),
        "MB": ("megabytes", ".1f"), "exchange\nms": ("exchange_ms", ".2f"),
        "weights\nms": ("weights_ms", ".2f"), "share of\nthe pass": ("share", ".0%"),
    }  # fmt: skip
    if pp > 1:  # what is the same without stages makes room
        columns = {name: one for name, one in columns.items() if name not in ("messages", "MB")}
        columns |= {
            "hop\nms": ("hop_ms", ".2f"), "pass\nms": ("pass_ms", ".2f"),
            "all rows\nms": ("period_ms", ".2f"), "stages\nidle": ("idle", ".0%"),
        }  # fmt: skip
    table = _table(*columns, pad_edge=False, collapse_padding=True)
    for row in found:
        table.add_row(*(format(row[key], form) for key, form in columns.values()))
    console = Console(highlight=False)
    stages = f" in each of {pp} stages" if pp > 1 else ""
    console.print(
        f"{given.tp} ranks{stages} over {LINKS[name].name}, weights read at the speed of {gpu}"
    )
    console.print(table)


def _list(as_json: bool) -> None:
    from rich.console import Console

    from hunch.bench.gpus import GPUS

    if as_json:
        print(json.dumps([asdict(gpu) for gpu in GPUS.values()]))
        return
    table = _table("GPU", "GB", "GB/s", "bf16 TFLOP/s", "fp8", "source")
    for gpu in GPUS.values():
        table.add_row(
            gpu.name, f"{gpu.memory_gb:g}", f"{gpu.bandwidth_gbs:,g}", f"{gpu.bf16_tflops:,g}",
            "-" if gpu.fp8_tflops is None else f"{gpu.fp8_tflops:,g}", gpu.source,
        )  # fmt: skip
    Console().print(table)
