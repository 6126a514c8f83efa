"""hunch bench: does it pay on my workload? Methods, servers and loads, measured side by side."""

from __future__ import annotations

import json
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


app = typer.Typer(
    cls=BenchCommands,
    no_args_is_help=False,
)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: o.Model = o.DEFAULT_MODEL,
    speculate: m.Methods = None,
    workload: m.Workload = "mixed",
    prompts: o.Prompts = None,
    limit: m.Limit = None,
    first_turns: m.FirstTurns = False,
    url: m.Url = None,
    served_model: m.ServedModel = None,
    concurrency: Annotated[int, m.load_option(help="Requests at once.", min=1)] = 1,
    rate: Annotated[
        float | None,
        m.load_option(help="Requests per second, in place of --concurrency.", min=0.001),
    ] = None,
    burstiness: m.Burstiness = 1.0,
    seconds: m.Seconds = 10.0,
    warmup: m.Warmup = 0,
    max_tokens: o.MaxTokens = 96,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: o.Seed = 0,
    ignore_eos: m.IgnoreEos = False,
    repeats: m.Repeats = 3,
    goodput: m.Goodput = None,
    show: Annotated[
        bool, m.result_option("--show", help="Print every answer, side by side.")
    ] = False,
    enlarge: m.Enlarge = None,
    max_model_len: m.MaxLen = None,
    max_num_seqs: m.Rows = None,
    kv_gib: m.KvGib = None,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.KvDtype = "auto",
    device: o.Device = "auto",
    activation_bits: o.ActivationBits = "auto",
    html: m.Html = None,
    csv: m.Csv = None,
    markdown: m.Markdown = None,
    as_json: o.Json = False,
) -> None:
    """Measure methods and servers against plain decoding.

    Methods share one copy of the weights and take turns prompt by prompt, so that a busy moment
    hits all alike. Exit code 1 if a method changes the text. `hunch bench sweep` varies load,
    lengths and temperatures.
    """
    if context.invoked_subcommand is not None:
        o.refuse(context, list(context.params), f"write it after {context.invoked_subcommand}")
        return
    if rate is not None:
        o.refuse(context, ("concurrency",), "--rate is in its place; give one of them")
    m.refuse_unused(
        context, is_open=rate is not None, is_remote=bool(url), is_quiet=as_json, has_contexts=False
    )
    asked = m.asked_for(
        model=model, speculate=speculate, workload=workload, prompts=prompts, limit=limit, url=url,
        first_turns=first_turns, served_model=served_model, temperatures=(temperature,),
        concurrency=(concurrency,),
        rates=() if rate is None else (rate,), burstiness=burstiness, seconds=seconds,
        num_warmup=warmup, max_tokens=max_tokens, top_p=top_p, seed=seed, ignore_eos=ignore_eos,
        rounds=repeats, enlarge=enlarge,
        engine=m.engine(
            threads, dtype, device, max_model_len, max_num_seqs, kv_gib, activation_bits,
            kv_cache_dtype,
        ),
    )  # fmt: skip
    outputs = m.Outputs(html, csv, markdown, as_json, goodput)
    outputs.finish(m.measure("bench", asked, outputs, show=show))


@app.command(cls=o.Command)
def sweep(
    context: typer.Context,
    model: o.Model = o.DEFAULT_MODEL,
    speculate: m.Methods = None,
    draft_lengths: m.DraftLengths = None,
    trees: m.Trees = None,
    temperatures: m.Temperatures = "0",
    concurrency: m.Concurrencies = None,
    rates: m.Rates = None,
    contexts: m.Contexts = None,
    burstiness: m.Burstiness = 1.0,
    seconds: m.Seconds = 10.0,
    min_requests: m.MinRequests = 8,
    warmup: m.Warmup = 0,
    workload: m.Workload = "mixed",
    prompts: o.Prompts = None,
    limit: m.Limit = None,
    first_turns: m.FirstTurns = False,
    url: m.Url = None,
    served_model: m.ServedModel = None,
    max_tokens: o.MaxTokens = 96,
    top_p: o.TopP = 1.0,
    seed: o.Seed = 0,
    ignore_eos: m.IgnoreEos = False,
    repeats: m.Repeats = 1,
    until_decided: m.UntilDecided = False,
    goodput: m.Goodput = None,
    out: m.Saved = Path("sweep.json"),
    enlarge: m.Enlarge = None,
    max_model_len: m.MaxLen = None,
    max_num_seqs: m.Rows = None,
    kv_gib: m.KvGib = None,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.KvDtype = "auto",
    device: o.Device = "auto",
    activation_bits: o.ActivationBits = "auto",
    html: m.Html = None,
    csv: m.Csv = None,
    markdown: m.Markdown = None,
    as_json: o.Json = False,
) -> None:
    """Vary methods, lengths, temperatures and load in one run.

    It says from which load on a method costs time, and whether `auto` is within 2% of the fastest
    at each. Run the same command again to go on after a stop, or with more --repeats.
    """
    if rates and concurrency:
        raise ConfigError("give --rates or --concurrency, not both")
    if until_decided:
        m.check_deciding(speculate, url, repeats)
    m.refuse_unused(
        context, is_open=bool(rates), is_remote=bool(url), is_quiet=as_json,
        has_contexts=bool(contexts),
    )  # fmt: skip
    asked = m.asked_for(
        model=model, speculate=speculate, trees=o.words(trees), workload=workload, prompts=prompts,
        lengths=o.numbers("draft-lengths", draft_lengths, int), limit=limit, url=url,
        first_turns=first_turns, served_model=served_model,
        temperatures=o.numbers("temperatures", temperatures, float, with_zero=True),
        contexts=o.words(contexts), rates=o.numbers("rates", rates, float), burstiness=burstiness,
        concurrency=o.numbers("concurrency", concurrency or "1,2,4,8", int), seconds=seconds,
        min_requests=min_requests, num_warmup=warmup, max_tokens=max_tokens, top_p=top_p, seed=seed,
        ignore_eos=ignore_eos, rounds=repeats, until_decided=until_decided, enlarge=enlarge,
        engine=m.engine(
            threads, dtype, device, max_model_len, max_num_seqs, kv_gib, activation_bits,
            kv_cache_dtype,
        ),
    )  # fmt: skip
    outputs = m.Outputs(html, csv, markdown, as_json, goodput)
    outputs.finish(m.measure("sweep", asked, outputs, save=out))


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


@app.command(cls=o.Command)
def show(
    report: Annotated[Path, typer.Argument(help="A report of hunch bench --json or sweep --out.")],
    goodput: m.Goodput = None,
    html: m.Html = None,
    csv: m.Csv = None,
    markdown: m.Markdown = None,
    plots: Annotated[
        Path | None, typer.Option(help="A folder for the plots, as SVG and PNG, light and dark.")
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Print a report again, or write its page and plots."""
    from hunch.bench.records import load_report

    outputs = m.Outputs(html, csv, markdown, as_json, goodput)
    found = load_report(report)
    if plots is not None:
        from hunch.bench.plots import charts, check_installed

        check_installed()
        plots.mkdir(parents=True, exist_ok=True)
        for number, chart in enumerate(charts(found, outputs.limits), 1):
            for theme, form in product(("light", "dark"), ("svg", "png")):
                name = f"{report.stem}-{number}-{theme}.{form}"
                (plots / name).write_bytes(chart.render(theme, form))
            typer.echo(f"{report.stem}-{number}: {chart.question}", err=True)
    outputs.finish(found)


bench_tables.add_to(app)
