"""hunch bench: does it pay on my workload? Methods, servers and loads, measured side by side."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from hunch.cli import bench_tables
from hunch.cli import measuring as m
from hunch.cli import options as o
from hunch.errors import ConfigError


class BenchCommands(o.Group):
    """Says how a model is named where one stands in place of a command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if self.get_command(ctx, word) is None and any(sign in word for sign in "/.-:"):
            raise ConfigError(f"bench takes the model by an option: hunch bench --model {word}")
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=BenchCommands, no_args_is_help=False)


@dataclass(kw_only=True)
class BenchOptions(m.MeasuredOptions):
    concurrency: int = m.load_option(1, "Requests at once.", min=1)
    rate: float | None = m.load_option(
        None, "Requests per second, in place of --concurrency.", min=0.001
    )
    temperature: o.Temperature = 0.0
    show: bool = m.result_option(False, "Print every answer, side by side.", "--show")


@app.callback(invoke_without_command=True)
@o.takes(BenchOptions)
def bench(context: typer.Context, given: BenchOptions) -> None:
    """Measure methods and servers against plain decoding.

    Methods share one copy of the weights and take turns prompt by prompt, so that a busy moment
    hits all alike. Exit code 1 if a method changes the text, or a server answers no request.
    `hunch bench sweep` varies load, lengths and temperatures.
    """
    if context.invoked_subcommand is not None:
        o.refuse(context, list(context.params), f"write it after {context.invoked_subcommand}")
        return
    if given.rate is not None:
        o.refuse(context, ("concurrency",), "--rate is in its place; give one of them")
    m.refuse_unused(context, given, is_open=given.rate is not None)
    asked = given.asked(
        temperatures=(given.temperature,),
        concurrency=(given.concurrency,),
        rates=() if given.rate is None else (given.rate,),
    )
    given.finish(m.measure("bench", asked, given, show=given.show))


@dataclass(kw_only=True)
class SweepOptions(m.MeasuredOptions):
    draft_lengths: str | None = o.option(None, "Fixed draft lengths of each method: 3,7.")
    trees: str | None = o.option(None, "Tree shapes of each method: chain,dynamic.")
    temperatures: str = o.option("0", "Temperatures, 0 for the likeliest token: 0,0.7,1,1.5.")
    contexts: str | None = o.option(None, "Context lengths, in place of a workload: 2k,8k.")
    concurrency: str | None = m.load_option(None, "Requests at once: 1,2,4,8 (the default).")
    rates: str | None = m.load_option(
        None, "Requests per second, in place of --concurrency: 1,4,16."
    )
    min_requests: int = m.load_option(8, "With --rates: at least N requests in a round.", min=1)
    repeats: m.Repeats = 1
    until_decided: bool = m.load_option(
        False,
        "From the fifth round on, measure only points and methods of which it is not known yet "
        "whether auto is within 2% of them; --repeats are the most.",
        "--until-decided",
    )
    out: Path = m.result_option(Path("sweep.json"), "The report; a stopped sweep goes on from it.")


@app.command(cls=o.Command)
@o.takes(SweepOptions)
def sweep(context: typer.Context, given: SweepOptions) -> None:
    """Vary methods, lengths, temperatures and load in one run.

    It says from which load on a method costs time, and whether `auto` is within 2% of the fastest
    at each. Run the same command again to go on after a stop, or with more --repeats.
    """
    if given.rates and given.concurrency:
        raise ConfigError("give --rates or --concurrency, not both")
    if given.until_decided:
        m.check_deciding(given.speculate, given.url, given.repeats)
    m.refuse_unused(context, given, is_open=bool(given.rates), has_contexts=bool(given.contexts))
    asked = given.asked(
        lengths=o.numbers("draft-lengths", given.draft_lengths, int),
        trees=o.words(given.trees),
        temperatures=o.numbers("temperatures", given.temperatures, float, with_zero=True),
        contexts=o.words(given.contexts),
        rates=o.numbers("rates", given.rates, float),
        concurrency=o.numbers("concurrency", given.concurrency or "1,2,4,8", int),
        min_requests=given.min_requests,
        until_decided=given.until_decided,
    )
    given.finish(m.measure("sweep", asked, given, save=given.out))


@app.command(cls=o.Command)
def compare(
    before: Annotated[Path, typer.Argument(help="A report of hunch bench --json or sweep --out.")],
    after: Annotated[Path, typer.Argument(help="A later one.")],
    as_json: o.Json = False,
) -> None:
    """Say what changed between two reports beyond noise.

    Exit code 1 if something got slower.
    """
    from rich.console import Console

    from hunch.bench import compare as comparing
    from hunch.bench.records import load_report

    reports = load_report(before), load_report(after)
    for line in comparing.other_subjects(*reports):
        typer.echo(line, err=True)
    changes = comparing.compare(*reports)
    if as_json:
        print(json.dumps([change.to_json() for change in changes]))
    else:
        Console().print(comparing.as_table(changes))
        for line in comparing.findings(changes):
            typer.echo(line)
    if any(change.verdict == "slower" for change in changes):
        raise typer.Exit(1)


@dataclass(kw_only=True)
class ShowOptions(m.GoodputOptions):
    report: Annotated[Path, typer.Argument(help="A report of hunch bench --json or sweep --out.")]
    plots: Path | None = o.option(None, "A folder for the plots, as SVG and PNG, light and dark.")


@app.command(cls=o.Command)
@o.takes(ShowOptions)
def show(context: typer.Context, given: ShowOptions) -> None:
    """Print a report again, or write its page and plots."""
    from hunch.bench.records import load_report

    given.check()
    found, stem, plots = load_report(given.report), given.report.stem, given.plots
    if plots is not None:
        from hunch.bench.plots import charts, check_installed

        check_installed()
        plots.mkdir(parents=True, exist_ok=True)
        for number, chart in enumerate(charts(found, given.limits), 1):
            for theme, form in product(("light", "dark"), ("svg", "png")):
                name = f"{stem}-{number}-{theme}.{form}"
                (plots / name).write_bytes(chart.render(theme, form))
            typer.echo(f"{stem}-{number}: {chart.question}", err=True)
    given.finish(found)


bench_tables.add_to(app)
