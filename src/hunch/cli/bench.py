"""hunch bench: methods side by side on the same prompts, and whether their texts are identical."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from hunch.cli import options as o

if TYPE_CHECKING:
    from hunch import RequestOutput


def bench(
    model: o.Model = o.DEFAULT_MODEL,
    speculate: Annotated[
        str, typer.Option(help="Methods, commas between; 'off' is always measured first.")
    ] = "ngram,suffix,auto",
    prompts: o.Prompts = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts.", min=1)] = None,
    max_tokens: o.MaxTokens = 96,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: o.Seed = 0,
    repeats: Annotated[int, typer.Option(help="Timed rounds; the median counts.", min=1)] = 3,
    show: Annotated[bool, typer.Option(help="Print every answer, side by side.")] = False,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    as_json: o.Json = False,
) -> None:
    """Measure methods against plain decoding, a request at a time. Exit code 1 if texts differ."""
    from rich.console import Console

    from hunch.bench.measure import measure
    from hunch.bench.report import as_json as report_json
    from hunch.bench.report import as_table
    from hunch.bench.workloads import PROMPTS

    records = o.read_prompts(prompts, limit) if prompts else PROMPTS[:limit]
    params = o.sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    names = ["off", *(name for name in speculate.split(",") if name not in ("", "off"))]
    llms = {
        name: o.open_llm(
            model,
            name,
            quiet=as_json,
            threads=threads,
            dtype=dtype,
            device=device,
            max_num_seqs=1,
        )
        for name in names
    }
    token_ids = [o.prompt_ids(llms["off"], record) for record in records]
    console = Console()
    answers: dict[int, dict[str, RequestOutput]] = {}

    def on_answer(index: int, name: str, output: RequestOutput) -> None:
        answers.setdefault(index, {})[name] = output
        if show and len(answers[index]) == len(names):
            _show(console, records[index]["id"], answers[index])

    measured = measure(llms, token_ids, params, repeats, on_answer)
    if as_json:
        print(json.dumps(report_json(measured)))
    else:
        console.print(as_table(measured))
    if not all(one.is_equal for one in measured.values()):
        raise typer.Exit(1)


def _show(console: object, title: str, answers: dict[str, RequestOutput]) -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console)
    plain, *_ = answers
    best = min(answers, key=lambda name: answers[name].outputs[0].stats["steps"])
    grid = Table.grid(expand=True, padding=(0, 1))
    panels = []
    for name in (plain, best):
        answer = answers[name].outputs[0]
        passes = f"{name}: {len(answer.token_ids)} tokens in {answer.stats['steps']} passes"
        panels.append(Panel(Text(answer.text.strip()), title=f"{title}, {passes}"))
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    console.print(grid)
