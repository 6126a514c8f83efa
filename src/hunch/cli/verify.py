"""hunch verify: the same prompts plain and speculative, compared token for token."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hunch.cli import options as o
from hunch.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hunch.bench.equality import MethodReport


def verify(
    model: o.Model = o.DEFAULT_MODEL,
    speculate: Annotated[
        str, typer.Option(help="Methods to check, commas between.")
    ] = "ngram,suffix",
    prompts: o.Prompts = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less repetition.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="From -2 to 2.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="From -2 to 2.")] = 0.0,
    logit_bias: Annotated[list[str] | None, typer.Option(help="TOKEN_ID=BIAS, repeatable.")] = None,
    stop: o.Stop = None,
    seed: o.Seed = 0,
    n: Annotated[int, typer.Option(help="Samples per prompt.", min=1)] = 1,
    batch: Annotated[int, typer.Option(help="Requests that run at once.", min=1)] = 8,
    verifier: o.Verifier = "exact",
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    as_json: o.Json = False,
) -> None:
    """Check that speculation changes no token. Exit code 1 where it does.

    Guesses are made whether they pay or not: this looks for differences, not for speed.
    """
    from hunch.bench.workloads import PROMPTS

    records = o.read_prompts(prompts, limit) if prompts else PROMPTS[:limit]
    params = o.sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_read_bias(logit_bias),
        stop=stop,
        seed=seed,
        n=n,
    )
    arguments = {
        "threads": threads,
        "dtype": dtype,
        "device": device,
        "max_num_seqs": batch,
        "verifier": verifier,
        "quiet": as_json,
    }
    reports = _check(model, _methods(speculate), records, params, arguments)
    is_equal = all(report.is_equal for report in reports.values())
    if as_json:
        print(json.dumps({"equal": is_equal, "methods": _as_json(reports)}))
    else:
        _show(reports)
    if not is_equal:
        raise typer.Exit(1)


def _check(
    model: str,
    methods: list[str],
    records: list[dict[str, Any]],
    params: Any,
    arguments: dict[str, Any],
) -> dict[str, MethodReport]:
    from hunch.bench.equality import compare

    plain_llm = o.open_llm(model, "off", **{**arguments, "verifier": "exact"})
    ids = [str(record["id"]) for record in records]
    prompts = [o.prompt_ids(plain_llm, record) for record in records]
    plain = plain_llm.generate(prompts, params)
    reports: dict[str, MethodReport] = {}
    for method in methods:
        with o.open_llm(model, method, always_draft=True, **arguments) as llm:
            speculative = llm.generate(prompts, params)
        reports[method] = compare(ids, prompts, plain, speculative, plain_llm, params)
    return reports


def _methods(text: str) -> list[str]:
    methods = [method.strip() for method in text.split(",") if method.strip()]
    if not methods:
        raise ConfigError("--speculate names no method")
    return methods


def _read_bias(pairs: list[str] | None) -> dict[int, float] | None:
    if not pairs:
        return None
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise RequestError(f"--logit-bias {pair!r} must be TOKEN_ID=BIAS") from None
    return bias


def _as_json(reports: dict[str, MethodReport]) -> dict[str, Any]:
    return {
        name: {
            "equal": report.is_equal,
            "num_prompts": report.num_prompts,
            "drafted": report.drafted,
            "accepted": report.accepted,
            "first_difference": asdict(report.first_difference)
            if report.first_difference
            else None,
        }
        for name, report in reports.items()
    }


def _show(reports: dict[str, MethodReport]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "prompts", "passes", "drafted", "accepted", "identical")
    for name, report in reports.items():
        verdict = "yes" if report.is_equal else f"NO ({report.num_different} differ)"
        table.add_row(
            name,
            str(report.num_prompts),
            str(report.steps),
            str(report.drafted),
            str(report.accepted),
            verdict,
        )
    console = Console()
    console.print(table)
    for name, report in reports.items():
        if report.first_difference is not None:
            console.print(f"{name}: first difference {asdict(report.first_difference)}")
