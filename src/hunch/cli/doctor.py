"""hunch doctor: what this machine has, whether the model works on it, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hunch.advice import advice_for
from hunch.cli import options as o
from hunch.config import SpecConfig
from hunch.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from hunch import LLM


@dataclass(kw_only=True)
class Options(o.EngineOptions):
    name: o.ModelName = None
    model: o.Model = o.DEFAULT_MODEL
    speculate: o.Speculate = "auto"
    always_draft: o.AlwaysDraft = False
    skip_model: bool = o.option(False, "Look at the machine alone.", "--skip-model")
    drafter: Path | None = o.option(None, "A drafter's directory: say why it is bad.")
    target: str | None = o.option(None, "The model it drafts for; default: --model.")
    prompts: o.Prompts = None
    as_json: o.Json = False


@o.takes(Options)
def doctor(ctx: typer.Context, given: Options) -> None:
    """Check machine, kernels and model.

    Exit code 1 if the model's text differs with speculation.

    With --speculate NAME:PATH, or --drafter, or --speculate NAME where a drafter of that name comes
    with the model: find what is wrong with the drafter by trying
    (feature layers, token map, rope layout, chat template, rounding); exit code 1 if something is.
    """
    from hunch.bench.workloads import PROMPTS

    model, drafter = o.one_model(ctx, given.name, given.model), given.drafter
    spec = SpecConfig.parse(given.speculate)
    if drafter is None and not (given.always_draft or given.skip_model):
        spec = _with_own_files(spec, model)
    if drafter is None and spec.path is not None and Path(spec.path).is_dir():
        o.refuse(ctx, ("always_draft", "skip_model", "target"), f"goes without {given.speculate}")
        _examine(Path(spec.path), model, given, spec)
        return
    others = ("speculate", "always_draft", "skip_model") if drafter is not None else ("target",)
    if unused := o.given_options(ctx, others):
        raise ConfigError(f"{unused} goes {'without' if drafter is not None else 'with'} --drafter")
    if drafter is not None:
        _examine(drafter, given.target or model, given)
        return
    if given.skip_model and given.prompts is not None:
        raise ConfigError("--prompts are for the model, which --skip-model leaves out")
    findings: dict[str, Any] = {"machine": _machine()}
    if not given.as_json:
        _show("machine", findings["machine"])
    if not given.skip_model:
        records = o.read_prompts(given.prompts, 16) if given.prompts else PROMPTS[:4]
        findings["model"] = _model(model, given, records)
        findings["advice"] = _advice(findings["model"], findings["machine"])
        if not given.as_json:
            _show("model", findings["model"])
            for line in findings["advice"]:
                typer.echo(f"- {line}")
    if given.as_json:
        print(json.dumps(findings))
    if not findings.get("model", {}).get("identical", True):
        raise typer.Exit(1)


def _with_own_files(spec: SpecConfig, model: str) -> SpecConfig:
    """A method without a path: with the drafter that comes with the model, if one does."""
    from hunch.drafters import shipped
    from hunch.hub import resolve

    if spec.path is not None or spec.method == "auto":
        return spec
    files = resolve(model)
    path = shipped(spec.method, files.name, files.path)
    return spec if path is None else replace(spec, path=str(path))


def _examine(drafter: Path, target: str, given: Options, spec: SpecConfig | None = None) -> None:
    from hunch.bench.workloads import PROMPTS
    from hunch.train.diagnose import Doctor

    records = o.read_prompts(given.prompts, 16) if given.prompts else PROMPTS[:8]
    texts = [record["turns"][0] if "turns" in record else record["prompt"] for record in records]
    own = {} if spec is None else spec.options
    options = "".join(f":{key}={value}" for key, value in own.items())
    engine = {**given.engine(), "max_num_seqs": 8}
    patient = Doctor(target, drafter, texts, engine, options=options, say=_say(given))
    if spec is not None and spec.method != "auto":
        patient.method = spec.method
    report = patient.run()
    if given.as_json:
        print(json.dumps(report.to_json()))
    else:
        typer.echo(f"{report.method}: tokens per pass, and acceptance by position, as tried")
        for trial in report.trials:
            positions = " ".join(f"{share:.2f}" for share in trial.per_position)
            typer.echo(f"  {trial.tokens_per_pass:.2f}  {positions or '-'}  {trial.name}")
        for finding in report.findings:
            typer.echo(f"- {finding.fault}: {finding.words}")
        if not report.findings:
            typer.echo("- all is well")
    if report.findings:
        raise typer.Exit(1)


def _say(given: Options) -> Callable[[str], None]:
    """For whoever waits, what is done now."""
    return (lambda words: None) if given.as_json else partial(typer.echo, err=True)


def _machine() -> dict[str, Any]:
    import torch

    import hunch
    from hunch.bench.environment import cpu_name, memory_bytes
    from hunch.hub import cache_directory
    from hunch.kernels.build import find_compiler, num_cores, vector_unit

    num_bytes = memory_bytes()
    return {
        "hunch": hunch.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": num_cores(),
        "memory": f"{num_bytes / 2**30:.1f} GiB" if num_bytes else "unknown",
        "compiler": find_compiler(),
        "cpu_kernels": vector_unit(),
        "cache": str(cache_directory()),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _model(model: str, given: Options, records: list[dict[str, Any]]) -> dict[str, Any]:
    from hunch.bench.device import fidelity

    say = _say(given)
    params, speculate = o.sampling(max_tokens=48, temperature=0), given.speculate
    found: dict[str, Any] = {"model": model, "speculate": speculate}
    texts: list[Any] = []
    rounded: list[Tensor] = []
    engine = given.engine()
    with o.open_llm(model, "off", quiet=given.as_json, max_num_seqs=4, **engine) as plain:
        found["kernels"] = plain.engine.capacity.kernels
        found["exact"] = plain.engine.capacity.exact
        if bits := plain.engine.capacity.activation_bits:
            found["activation_bits"] = bits
        room = plain.engine.capacity.max_len - 48
        prompts = [o.prompt_ids(plain, record)[-room:] for record in records]
        page = plain.tokenizer.encode(fidelity.PAGE)[: min(256, plain.engine.capacity.max_len)]
        if found["kernels"] == "triton" and given.dtype in ("int8", "int4", "fp8"):
            # Kept by the host: the GPU is full, and the model in 16 bits comes once this is gone.
            target = plain.engine.runner.target  # type: ignore[attr-defined]
            rounded = [part_MV.cpu() for part_MV in fidelity.scores(target, page)]
        with plain.sibling(speculate, always_draft=given.always_draft) as drafting:
            for name, llm in {"off": plain, speculate: drafting}.items():
                say(f"answering {len(prompts)} prompts with --speculate {name}")
                outputs = llm.generate(prompts, params, use_tqdm=False)
                texts.append([output.outputs[0].token_ids for output in outputs])
                stats = llm.stats()
                found[f"tok/s {name}"] = round(stats["tokens_per_second"], 1)
        if found["kernels"] == "native":
            found |= _fidelity(plain, model, page, given.threads, say)
    found["identical"] = texts[0] == texts[-1]
    keys = (
        "tokens_per_pass", "max_tokens_per_pass", "level_acceptance", "acceptance_rate", "drafted",
        "accepted", "memory_bound_speedup", "memory_bound_speedup_by_size", "drafter_bytes",
    )  # fmt: skip
    found["prompt_tokens"] = sum(map(len, prompts)) / len(prompts)
    if rounded:  # when they were loaded
        say("comparing with bfloat16")
        near = fidelity.measure_rounded(model, page, iter(rounded))
        found |= {"KL to bfloat16": near.kl, "top-1 as bfloat16": near.top1}
    return found | {key: stats[key] for key in keys}


def _fidelity(
    llm: LLM, model: str, page: list[int], threads: int | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """How near the kernels come to float32 on a page of text."""
    from hunch.bench.device.fidelity import float32_bytes, measure
    from hunch.bench.environment import memory_bytes

    held = llm.engine.runner.target  # type: ignore[attr-defined]
    if not held.is_quantised:
        return {}
    needed = float32_bytes(model)
    if needed > (memory_bytes() or 0) // 2:
        return {"KL to float32": f"not measured: it would take {needed / 2**30:.0f} GiB"}
    say(f"comparing with float32 on {len(page)} tokens, {needed / 2**30:.1f} GiB to fill first")
    found = measure(model, page, held, threads)
    return {"KL to float32": found.kl, "top-1 as float32": found.top1}


def _advice(found: dict[str, Any], machine: dict[str, Any]) -> list[str]:
    advice: list[str] = []
    if machine["cpu_kernels"] == "none" and machine["cuda"] is None:
        from hunch.kernels.build import HOW_TO_GET_A_COMPILER

        advice.append(
            "no CPU kernels, so torch alone computes, several times slower: no C++ compiler was "
            f"found, or it failed; {HOW_TO_GET_A_COMPILER}"
        )
    if not found["identical"]:
        advice.append("speculative text differs: run `hunch verify --json` and report its margin")
    if found["drafted"]:
        method = found["speculate"].partition(":")[0]
        words = advice_for(method, found["level_acceptance"], found["prompt_tokens"])
        advice += [words] if words else []
    elif found["speculate"] != "off":
        advice.append(
            f"{found['speculate']} checked no guess: none promised to pay on these prompts, or "
            "there was nothing to guess from; --always-draft checks them all the same"
        )
    return advice or ["all is well"]


def _show(title: str, findings: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in findings.items():
        table.add_row(key, _shown(value))
    Console().print(table)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
