"""Commands of `hunch bench` that print the tables of README and docs, one command a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hunch.cli import measuring as m
from hunch.cli import options as o
from hunch.errors import ConfigError

Targets = Annotated[
    str,
    typer.Option(help="small (the model itself), 7b (enlarged to a 7B model's cost), or both."),
]


def readme(
    threads: o.Threads = None,
    repeats: m.Repeats = 5,
    html: m.Html = None,
    csv: m.Csv = None,
    markdown: m.Markdown = None,
    as_json: o.Json = False,
) -> None:
    """README's table for a CPU: the default model, one request at a time, greedy."""
    from hunch.bench.session import Asked, expand

    asked = Asked(
        model=o.DEFAULT_MODEL,
        methods=expand(["ngram", "suffix", "auto"]),
        workload="demo",
        limit=4,
        max_tokens=96,
        rounds=repeats,
        engine=m.engine(threads, "auto", "cpu", None, None, None),
    )
    outputs = m.Outputs(html, csv, markdown, as_json, None)
    outputs.finish(m.measure("bench", asked, outputs))


def gpu(
    prompts: Annotated[str, typer.Option(help="Prompts, [FORM:]PATH or a workload.")] = "mixed",
    targets: Targets = "small,7b",
    speculate: m.Methods = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once.")] = "1,8,64,256",
    max_tokens: o.MaxTokens = 128,
    limit: m.Limit = None,
    repeats: m.Repeats = 3,
    kv_gib: m.KvGib = None,
    device: o.Device = "cuda",
    out: Annotated[
        Path, typer.Option(help="Reports go to OUT-TARGET.json; a stopped run goes on from them.")
    ] = Path("gpu"),
    as_json: o.Json = False,
) -> None:
    """The tables for a GPU: methods by number of requests, end of text ignored, bfloat16."""
    from hunch.bench.session import Asked, expand

    sizes = {"small": None, "7b": "7b"}
    for target in m.words(targets):
        if target not in sizes:
            raise ConfigError(f"--targets {target!r} is not one of {', '.join(sizes)}")
        rows = m.numbers("concurrency", concurrency, int)
        asked = Asked(
            model=o.DEFAULT_MODEL,
            methods=expand(m.words(speculate or "ngram,suffix,auto")),
            workload=prompts,
            limit=limit,
            concurrency=rows,
            max_tokens=max_tokens,
            ignore_eos=True,
            rounds=repeats,
            engine={
                **m.engine(None, "bfloat16" if device == "cuda" else "auto", device, 2048,
                           max(rows), kv_gib or (24 if target == "7b" else 8)),
                "enable_prefix_caching": False,
            },
            enlarge=sizes[target],
        )  # fmt: skip
        outputs = m.Outputs(None, None, None, as_json, None)
        save = out.with_name(f"{out.name}-{target}.json")
        outputs.finish(m.measure("sweep", asked, outputs, save=save))


def peers(
    model: o.Model = o.DEFAULT_MODEL,
    workload: m.Workload = "mixed",
    prompts: o.Prompts = None,
    limit: m.Limit = None,
    quick: Annotated[bool, typer.Option(help="2 prompts, 16 tokens, one round: a look.")] = False,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 1,
    max_tokens: o.MaxTokens = 96,
    repeats: m.Repeats = 3,
    threads: Annotated[int, typer.Option(help="Of every engine.", min=1)] = 2,
    skip: Annotated[
        str, typer.Option(help="Leave out: hunch, llama.cpp, transformers; commas between.")
    ] = "",
    server: Annotated[
        list[str] | None,
        typer.Option(help="NAME=COMMAND: a further llama-server, say ik_llama.cpp's own."),
    ] = None,
    html: m.Html = None,
    csv: m.Csv = None,
    markdown: m.Markdown = None,
    as_json: o.Json = False,
) -> None:
    """Other engines beside hunch on one GGUF file: each a server, all measured the same way."""
    from hunch.bench.peers import peers as find_peers
    from hunch.bench.peers import running
    from hunch.bench.session import Asked
    from hunch.drafters import shipped
    from hunch.hub import resolve

    outputs = m.Outputs(html, csv, markdown, as_json, None)
    files = resolve(model)
    if files.path.suffix != ".gguf":
        raise ConfigError(f"--model {model!r}: the engines share a .gguf file, and this is none")
    unknown = set(m.words(skip)) - {"hunch", "llama.cpp", "transformers"}
    if unknown:
        raise ConfigError(f"--skip {skip!r}: not one of hunch, llama.cpp, transformers")
    found = find_peers(
        files.path, threads=threads, parallel=concurrency, skip=m.words(skip),
        binaries=server or (), draft=shipped("draft", files.name, files.path),
    )  # fmt: skip
    typer.echo(f"starting {', '.join(peer.name for peer in found)}", err=True)
    with running(found) as urls:
        asked = Asked(
            model=str(model),
            methods=(),
            workload=str(prompts) if prompts is not None else workload,
            limit=limit or (2 if quick else None),
            urls=tuple(urls),
            concurrency=(concurrency,),
            max_tokens=16 if quick else max_tokens,
            ignore_eos=True,
            rounds=1 if quick else repeats,
        )
        report = m.measure("bench", asked, outputs)
    outputs.finish(report)


def add_to(app: typer.Typer) -> None:
    for command in (readme, gpu, peers):
        app.command()(command)
