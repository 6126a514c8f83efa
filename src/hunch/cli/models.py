"""hunch models and pull: names, sizes, what lies on this machine, and getting what does not."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hunch.cli import options as o
from hunch.errors import ConfigError


def models(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(help="list, or rm to delete one.")] = "list",
    name: Annotated[str | None, typer.Argument(help="The model to delete.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
    as_json: o.Json = False,
) -> None:
    """List models, known and downloaded; rm NAME deletes one."""
    from hunch.hub.catalogue import entries, find_here, remove

    if action == "rm":
        if name is None:
            raise ConfigError("models rm needs a name; `hunch models` lists them")
        gone = find_here(name)
        size = size_of(gone.num_bytes)
        if not (yes or as_json):
            typer.confirm(f"Delete {gone.name} ({size}) from this machine?", abort=True, err=True)
        remove(gone)
        print(json.dumps({"removed": gone.name}) if as_json else f"deleted {gone.name} ({size})")
        return
    if action != "list":
        raise ConfigError(f"models {action!r}: give list, or rm NAME")
    if name is not None or o.given_options(ctx, ("yes",)):
        raise ConfigError("models list takes no name and no --yes; `models rm NAME` deletes one")
    found = entries()
    if as_json:
        rows = [
            {"name": one.name, "source": one.source, "bytes": one.num_bytes, "path": one.path}
            for one in found
        ]
        print(json.dumps(rows, default=str))
        return
    from rich.console import Console
    from rich.table import Column, Table

    names = (Column("name", overflow="fold"), "here", Column("from", overflow="fold"))
    table = Table(*names, box=None, pad_edge=False)
    for one in found:
        table.add_row(one.name, size_of(one.num_bytes), one.source)
    Console().print(table)
    typer.echo("Others: a Hugging Face id (org/name, org/name:Q4_K_M), a directory, a .gguf file")


def pull(
    model: Annotated[str, typer.Argument(help="A known name or a hub id.")] = o.DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    as_json: o.Json = False,
) -> None:
    """Download a model now and print where it is."""
    from hunch.hub import resolve

    files = resolve(model, revision=revision, progress=not as_json)
    print(json.dumps({"model": model, "path": str(files.path)}) if as_json else files.path)


def size_of(num_bytes: int | None) -> str:
    """A size for people; '-' where there is nothing."""
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
