"""Options and outputs that the commands of `hunch bench` share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hunch.cli import options as o
from hunch.config import SpecConfig
from hunch.errors import ConfigError

if TYPE_CHECKING:
    from hunch import RequestOutput
    from hunch.bench.records import Report
    from hunch.bench.session import Asked

load_option = partial(o.option, rich_help_panel="Load")
result_option = partial(o.option, rich_help_panel="Results")

Methods = Annotated[
    str | None,
    typer.Option(
        metavar="METHODS",
        help="Separated by commas; plain decoding (off) is always measured first. With --url they "
        "are asked of a hunch server. Default: ngram,suffix,auto.",
    ),
]
Workload = Annotated[
    str,
    typer.Option(
        "--workload",
        "-w",
        metavar="NAMES",
        help="Prompts to ask, separated by commas: mixed, chat, code, summary, math, retrieval, "
        "rewrite, json, random, multi-turn, long:2k to long:32k; or files, [FORM:]PATH, with FORM "
        "spec-bench, speed-bench, mt-bench, sharegpt, humaneval, gsm8k, cnn-dm, vllm or hunch.",
    ),
]
Limit = Annotated[int | None, typer.Option(help="N prompts of each workload or file.", min=1)]
Repeats = Annotated[
    int,
    typer.Option(
        "--repeats",
        "--rounds",
        help="Timed rounds; the median is shown.",
        min=1,
        rich_help_panel="Load",
    ),
]
KvGib = Annotated[
    float | None,
    typer.Option(
        help="GiB of KV cache for each method; default on a GPU: 8.",
        min=0.01,
        rich_help_panel=o.ENGINE,
    ),
]


@dataclass(kw_only=True)
class OutputOptions:
    """Where a report goes."""

    html: Path | None = result_option(None, "Write a page with plots, in one file.")
    csv: Path | None = result_option(None, "Write every figure as CSV.")
    markdown: Path | None = result_option(None, "Write the table as Markdown.")
    as_json: o.Json = False

    @property
    def limits(self) -> dict[str, float]:
        """What an answer may take, where somebody asks how many keep to it."""
        from hunch.bench.metrics import read_limits

        return read_limits(getattr(self, "goodput", None))

    def check(self) -> None:
        """Raises before minutes of work where their result could not be written."""
        if self.html is not None:
            from hunch.bench.plots import check_installed

            check_installed()
        for path in (self.html, self.csv, self.markdown):
            check_output(path)

    def finish(self, report: Report) -> None:
        """Write the files, print the table, and leave with 1 if a text changed or none came."""
        from rich.console import Console

        from hunch.bench import report as reports
        from hunch.bench.analysis import is_all_equal

        limits = self.limits
        if self.html is not None:
            from hunch.bench.html import as_html

            self.html.write_text(as_html(report, limits), encoding="utf-8")
        if self.csv is not None:
            self.csv.write_text(reports.as_csv(report, limits), encoding="utf-8")
        if self.markdown is not None:
            self.markdown.write_text(reports.as_markdown(report, limits), encoding="utf-8")
        if self.as_json:
            print(json.dumps(reports.as_json(report, limits)))
        else:
            console = Console()
            console.print(reports.as_table(report, limits, console.width))
            for line in reports.findings(report):
                console.print(line, highlight=False)
        is_ours = not report.settings["urls"]
        is_mute = any(run.errors() and not run.answers() for run in report.runs)
        if is_mute or (is_ours and not is_all_equal(report)):
            raise typer.Exit(1)


@dataclass(kw_only=True)
class GoodputOptions(OutputOptions):
    goodput: str | None = result_option(
        None, "Count the requests within these limits in ms: ttft:200,tpot:30,e2e:4000."
    )


@dataclass(kw_only=True)
class MeasuredOptions(GoodputOptions, o.EngineOptions):
    """What `hunch bench` and `hunch bench sweep` share."""

    model: o.Model = o.DEFAULT_MODEL
    speculate: Methods = None
    workload: Workload = "mixed"
    prompts: o.Prompts = None
    limit: Limit = None
    url: list[str] | None = o.option(
        None,
        "Measure a server that speaks OpenAI's API instead; repeat it to compare several. The key "
        "comes from OPENAI_API_KEY.",
        metavar="[NAME=]URL",
    )
    served_model: str | None = o.option(None, "Name of the server's model; default: its first.")
    first_turns: bool = load_option(
        False,
        "Of conversations (Spec-Bench, SPEED-Bench, MT-bench) ask the first turn alone. Otherwise "
        "each further turn is asked after the model's own answer.",
        "--first-turns",
    )
    burstiness: float = load_option(
        1.0, "Of requests per second: 1 is Poisson arrivals, less comes in bursts.", min=0.01
    )
    seconds: float = load_option(
        10.0, "How long requests arrive in a round, where they come by rate.", min=0.1
    )
    warmup: int = load_option(0, "Leave the first N requests out of a round's figures.", min=0)
    ignore_eos: bool = load_option(False, "Always generate all of --max-tokens.", "--ignore-eos")
    repeats: Repeats = 3
    max_tokens: o.MaxTokens = 96
    top_p: o.TopP = 1.0
    seed: o.Seed = 0
    enlarge: str | None = o.engine_option(
        None,
        "Pad the model to a larger one's cost, with the same text: 7b, 70b, or 1b on a CPU; 2b "
        "also has room for Qwen2.5-0.5B.",
    )
    max_model_len: int | None = o.engine_option(None, "Longest prompt and answer together.", min=16)
    max_num_seqs: int | None = o.engine_option(
        None, "Requests that run at once.", "--max-num-seqs", min=1
    )
    kv_gib: KvGib = None

    def engine(self) -> dict[str, Any]:
        sizes = ("max_model_len", "max_num_seqs", "kv_gib")
        return engine(**super().engine(), **{name: getattr(self, name) for name in sizes})

    def asked(
        self, *, lengths: Sequence[int] = (), trees: Sequence[str] = (), **axes: Any
    ) -> Asked:
        """What is measured; `axes` are the fields of Asked that a command varies."""
        from hunch.bench.session import Asked, expand

        methods = o.words(self.speculate or ("" if self.url else "ngram,suffix,auto"))
        for method in () if self.url else methods:
            SpecConfig.parse(method)  # a wrong name is said before a model is loaded
        same = {one.name for one in fields(Asked)} & {one.name for one in fields(MeasuredOptions)}
        return Asked(
            **{name: getattr(self, name) for name in same - {"workload"}},
            methods=expand(methods, lengths, trees) if methods else (),
            workload=workload_of(self.prompts, self.workload),
            urls=tuple(self.url or ()),
            num_warmup=self.warmup,
            rounds=self.repeats,
            engine=self.engine(),
            **axes,
        )


def check_output(path: Path | None) -> None:
    """Raise where no file can be written."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path}: is a directory; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}")


def workload_of(prompts: Path | None, workload: str) -> str:
    return workload if prompts is None else str(prompts)


# Options that mean something only together with others.
_OPEN_LOAD = ("burstiness", "seconds", "min_requests")
_ENGINE = (
    "model", "enlarge", "max_model_len", "max_num_seqs", "kv_gib",
    *(one.name for one in fields(o.EngineOptions)),
)  # fmt: skip


def refuse_unused(
    context: typer.Context, given: MeasuredOptions, *, is_open: bool, has_contexts: bool = False
) -> None:
    """An error for options that the others leave without an effect."""
    if not is_open:
        o.refuse(context, _OPEN_LOAD, "goes with requests per second (--rate, --rates)")
    if given.url:
        reason = "a server has its own; leave this out, or --url (--served-model names its model)"
        o.refuse(context, _ENGINE, reason)
    else:
        o.refuse(context, ("served_model",), "goes with --url")
    if given.as_json:
        o.refuse(context, ("show",), "prints answers, and --json one JSON object; give one of them")
    if has_contexts:
        o.refuse(
            context, ("workload", "prompts", "first_turns"), "--contexts brings prompts of its own"
        )
    refuse_two_workloads(context)


def refuse_two_workloads(context: typer.Context) -> None:
    if o.given_options(context, ("prompts",)):
        o.refuse(context, ("workload",), "--prompts are asked in its place; give one of them")


def check_deciding(speculate: str | None, url: Sequence[str] | None, repeats: int) -> None:
    """Raises where there is nothing that --until-decided could decide."""
    from hunch.bench.envelope import MIN_ROUNDS, is_auto

    if not any(map(is_auto, o.words(speculate or ("" if url else "auto")))):
        raise ConfigError("--until-decided is about auto: name it in --speculate")
    if repeats <= MIN_ROUNDS:
        raise ConfigError(f"--until-decided needs more than {MIN_ROUNDS} --repeats, say 12")


def measure(
    command: str,
    asked: Asked,
    outputs: OutputOptions,
    *,
    show: bool = False,
    save: Path | None = None,
    pids: Mapping[str, int] | None = None,
) -> Report:
    from rich.console import Console

    from hunch.bench.analysis import describe_point, label, varied_axes
    from hunch.bench.loads import nobody
    from hunch.bench.session import Session, progress

    console = Console()
    status = Console(stderr=True)
    outputs.check()
    if "longest_gap" in outputs.limits and not asked.urls:
        raise ConfigError("--goodput itl: only a server's clients see gaps; give --url, or tpot")
    if save is not None:
        from hunch.bench.measure import open_report
        from hunch.bench.records import Report

        check_output(save)
        open_report(save, Report(command, asked.settings(), {}))  # a wrong file is said at once
    with status.status(f"loading {asked.model}" if not asked.urls else "asking the server"):
        session = Session(asked, lambda text: status.print(text, highlight=False), pids)
    answers: dict[str, dict[str, RequestOutput]] = {}
    names = [subject.name for subject in session.subjects]

    def on_answer(method: str, prompt_id: str, output: RequestOutput) -> None:
        answers.setdefault(prompt_id, {})[method] = output
        if show and len(answers[prompt_id]) == len(names):
            _show(console, prompt_id, {name: answers[prompt_id][name] for name in names})

    try:
        with progress(session.num_turns, outputs.as_json) as advance:

            def on_turn(method: str, point: dict[str, Any], number: int, is_old: bool) -> None:
                axes = varied_axes(cell.point for cell in session.cells)
                where = f", {describe_point(point, axes)}" if axes else ""
                advance(f"{label(method)}{where}, round {number}", is_old)

            listen = on_answer if show else nobody
            return session.run(command, save=save, on_turn=on_turn, on_answer=listen)
    except KeyboardInterrupt:
        if save is not None and save.is_file():  # there is none before the first points
            status.print(f"stopped; what was measured is in {save}: the same command goes on")
        raise typer.Exit(130) from None
    finally:
        session.close()


def engine(
    *,
    kv_gib: float | None = None,
    activation_bits: str = "auto",
    kv_cache_dtype: str = "auto",
    **given: Any,
) -> dict[str, Any]:
    """Arguments of an LLM, without those that nobody gave: a report holds and compares them."""
    given["kv_bytes"] = None if kv_gib is None else int(kv_gib * 2**30)
    given["activation_bits"] = None if activation_bits == "auto" else activation_bits
    given["kv_cache_dtype"] = None if kv_cache_dtype == "auto" else kv_cache_dtype
    return {name: value for name, value in given.items() if value is not None}


def _show(console: Any, title: str, answers: dict[str, RequestOutput]) -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    plain, *_ = answers
    best = min(answers, key=lambda name: answers[name].outputs[0].stats["steps"])
    grid = Table.grid(expand=True, padding=(0, 1))
    panels = []
    for name in (plain, best):
        answer = answers[name].outputs[0]
        passes = f"{name}: {len(answer.token_ids)} tokens in {answer.stats['steps']} passes"
        panels.append(Panel(Text(answer.text.strip()), title=passes))
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    console.print(title, grid)
