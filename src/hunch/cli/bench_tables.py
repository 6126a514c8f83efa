"""Commands of `hunch bench` that print the tables of README and docs, one command a table."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from hunch.cli import measuring as m
from hunch.cli import options as o
from hunch.errors import ConfigError

Targets = Annotated[
    str, typer.Option(help="small (the model itself), 7b (enlarged to a 7B model's cost), or both.")
]


@dataclass(kw_only=True)
class ReadmeOptions(m.OutputOptions):
    threads: o.Threads = None
    activation_bits: o.ActivationBits = "auto"
    repeats: m.Repeats = 5


@o.takes(ReadmeOptions)
def readme(context: typer.Context, given: ReadmeOptions) -> None:
    """Print the CPU table of README.

    The default model, one request at a time, greedy.
    """
    from hunch.bench.session import Asked, expand

    asked = Asked(
        model=o.DEFAULT_MODEL,
        methods=expand(["ngram", "suffix", "auto"]),
        workload="demo",
        limit=4,
        max_tokens=96,
        rounds=given.repeats,
        engine=m.engine(
            threads=given.threads, dtype="auto", device="cpu", activation_bits=given.activation_bits
        ),
    )
    given.finish(m.measure("bench", asked, given))


def gpu(
    prompts: Annotated[
        str, typer.Option(help="Prompts, [FORM:]PATH or workloads.")
    ] = "chat,code,summary,math,retrieval",
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
    """Print the tables for a GPU: methods by number of requests.

    In bfloat16, with the end of text ignored; of conversations the first turns.
    """
    from hunch.bench.session import Asked, expand

    sizes = {"small": None, "7b": "7b"}
    for target in o.words(targets):
        if target not in sizes:
            raise ConfigError(f"--targets {target!r} is not one of {', '.join(sizes)}")
        rows = o.numbers("concurrency", concurrency, int)
        asked = Asked(
            model=o.DEFAULT_MODEL,
            methods=expand(o.words(speculate or "ngram,suffix,auto")),
            workload=prompts,
            limit=limit,
            first_turns=True,
            concurrency=rows,
            max_tokens=max_tokens,
            ignore_eos=True,
            rounds=repeats,
            engine={
                **m.engine(
                    dtype="bfloat16" if device == "cuda" else "auto", device=device,
                    max_model_len=2048, max_num_seqs=max(rows),
                    kv_gib=kv_gib or (24 if target == "7b" else 8),
                ),
                "enable_prefix_caching": False,
            },
            enlarge=sizes[target],
        )  # fmt: skip
        outputs = m.OutputOptions(as_json=as_json)
        save = out.with_name(f"{out.name}-{target}.json")
        outputs.finish(m.measure("sweep", asked, outputs, save=save))


@dataclass(kw_only=True)
class PeersOptions(m.OutputOptions):
    model: o.Model = o.DEFAULT_MODEL
    workload: m.Workload = "mixed"
    prompts: o.Prompts = None
    limit: m.Limit = None
    quick: bool = o.option(False, "2 prompts, 16 tokens, one round: a look.", "--quick")
    concurrency: int = o.option(1, "Requests at once.", min=1)
    max_tokens: o.MaxTokens = 96
    repeats: m.Repeats = 3
    threads: int = o.option(2, "Of every engine.", min=1)
    skip: str = o.option("", "Leave out: hunch, llama.cpp, ik_llama.cpp, transformers.")
    server: list[str] | None = o.option(
        None, "NAME=COMMAND: a further llama-server, say ik_llama.cpp's own."
    )


@o.takes(PeersOptions)
def peers(context: typer.Context, given: PeersOptions) -> None:
    """Compare other engines with hunch on one GGUF file.

    Each runs as a server, and all are measured the same way.
    """
    from hunch.bench.peers import KNOWN, running
    from hunch.bench.peers import peers as find_peers
    from hunch.bench.session import Asked
    from hunch.drafters import shipped
    from hunch.hub import resolve

    model, quick, skip = given.model, given.quick, o.words(given.skip)
    if quick:
        o.refuse(context, ("max_tokens", "repeats"), "--quick has its own; leave one of them out")
    m.refuse_two_workloads(context)
    given.check()
    files = resolve(model)
    if files.path.suffix != ".gguf":
        raise ConfigError(f"--model {model!r}: the engines share a .gguf file, and this is none")
    if set(skip) - set(KNOWN):
        raise ConfigError(f"--skip {given.skip!r}: not one of {', '.join(KNOWN)}")
    found = find_peers(
        files.path, threads=given.threads, parallel=given.concurrency, skip=skip,
        binaries=given.server or (), draft=shipped("draft", files.name, files.path),
    )  # fmt: skip
    typer.echo(f"starting {len(found)} servers, each with the model of its own", err=True)
    typer.echo("hunch has activations of 8 bits, as llama.cpp has them", err=True)
    with running(found, lambda line: typer.echo(line, err=True)) as places:
        asked = Asked(
            model=str(model),
            methods=(),
            workload=m.workload_of(given.prompts, given.workload),
            limit=given.limit or (2 if quick else None),
            urls=tuple(f"{place.name}={place.url}" for place in places),
            concurrency=(given.concurrency,),
            max_tokens=16 if quick else given.max_tokens,
            ignore_eos=True,
            rounds=1 if quick else given.repeats,
        )
        pids = {place.name: place.pid for place in places}
        report = m.measure("bench", asked, given, pids=pids)
    given.finish(report)


def served(
    model: o.Model = o.DEFAULT_MODEL,
    speculate: o.Speculate = "off",
    streams: Annotated[str, typer.Option(help="Requests at once.")] = "1,16",
    max_tokens: o.MaxTokens = 128,
    repeats: m.Repeats = 7,
    threads: o.Threads = None,
    as_json: o.Json = False,
) -> None:
    """Measure what serving costs beside the engine alone.

    The same requests go to an engine in this process and to `hunch serve`, in turn.
    """
    from hunch.bench.peers import Peer, running
    from hunch.bench.served import cost

    rows = o.numbers("streams", streams, int)
    words = ["-m", "hunch.entrypoints.openai.api_server", "--port", "{port}", "--model", model]
    words += ["--speculate", speculate, "--max-model-len", str(max_tokens + 128)]
    words += ["--log-level", "warning", "--max-num-seqs", str(max(rows))]
    words += [] if threads is None else ["--threads", str(threads)]
    with running([Peer("hunch serve", (sys.executable, *words))]) as (place,):
        found = cost(model, speculate, place.url, rows, max_tokens, repeats, threads)
    if as_json:
        print(json.dumps(found))
        return
    for line in found:
        typer.echo(
            f"{line['streams']} at once: {line['offline']:.1f} tok/s offline, "
            f"{line['served']:.1f} over HTTP; serving costs {line['cost']:.1%} (median of the "
            f"rounds; {line['low']:.1%} to {line['high']:.1%})"
        )


def soak(
    url: Annotated[str, typer.Argument(help="A hunch server, say http://127.0.0.1:8000.")],
    model: o.Model = o.DEFAULT_MODEL,
    seconds: Annotated[float, typer.Option(help="How long.", min=1)] = 60.0,
    warm_up: Annotated[float, typer.Option(help="Seconds before that.", min=0)] = 30.0,
    streams: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 200,
    requests: Annotated[int, typer.Option(help="Different requests.", min=1)] = 24,
    max_tokens: o.MaxTokens = 48,
    pid: Annotated[
        int | None, typer.Option(help="The server's process: watch its memory and threads.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="HUNCH_API_KEY", help="Its key.")] = None,
) -> None:
    """Stress a server with many clients, some slow, some broken.

    Exit code 1 if an answer was lost or changed, or if memory or a request was left behind.
    """
    try:
        from hunch.bench.soak import Soak
        from hunch.bench.soak import soak as run_soak
    except ModuleNotFoundError as error:
        raise ConfigError(f"soak needs {error.name}: pip install {error.name}") from None
    asked = Soak(
        url.rstrip("/"), model, seconds, warm_up, streams, requests, max_tokens, api_key, pid
    )
    found = asyncio.run(run_soak(asked))
    print(json.dumps(found, indent=2))
    if not found["is_clean"]:
        raise typer.Exit(1)


def verifiers(
    context: typer.Context,
    model: o.Model = o.DEFAULT_MODEL,
    speculate: o.Speculate = "draft:num_nodes=5",
    workload: m.Workload = "mixed",
    prompts: o.Prompts = None,
    limit: m.Limit = None,
    samples: Annotated[int, typer.Option(help="Answers per prompt.", min=1)] = 2,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 1.0,
    batch: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 8,
    threads: o.Threads = None,
    as_json: o.Json = False,
) -> None:
    """Measure how much of a draft each verifier keeps."""
    from hunch.bench.readers import read_workloads
    from hunch.bench.verifiers import SETTINGS, measure_setting

    m.refuse_two_workloads(context)
    asked = read_workloads(m.workload_of(prompts, workload), limit)
    params = o.sampling(max_tokens=max_tokens, temperature=temperature, n=samples, seed=1)
    report = {}
    for setting in SETTINGS:
        tokens, accepted = measure_setting(
            setting, model, speculate, asked, params, max_num_seqs=batch, max_model_len=2048,
            threads=threads,
        )  # fmt: skip
        report[setting] = {"tokens_per_pass": asdict(tokens), "accepted_per_pass": asdict(accepted)}
        if not as_json:
            typer.echo(f"{setting:13} tokens per pass {tokens}   accepted per pass {accepted}")
    if as_json:
        print(json.dumps(report))


def part(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which; without one, all are named.")] = None,
) -> None:
    """Measure one part alone, as a table of the docs does."""
    from hunch.bench.parts import PARTS, main_of

    if name is not None and name not in ("-h", "--help"):
        main_of(name)(context.args)
        return
    typer.echo("hunch bench part NAME [OPTIONS]; NAME --help says which\n")
    for one, (needs, prints) in PARTS.items():
        typer.echo(f"  {one:10} {needs:4} {prints}")


def add_to(app: typer.Typer) -> None:
    for command in (readme, gpu, peers, served, soak, verifiers):
        app.command(cls=o.Command)(command)
    others = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(cls=o.Command, context_settings=others)(part)
