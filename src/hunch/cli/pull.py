"""hunch pull: get a model's files, so that later starts need no network."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hunch.cli import options as o


def pull(
    model: Annotated[str, typer.Argument(help="A known name or a hub id.")] = o.DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    as_json: o.Json = False,
) -> None:
    """Fetch a model and print where it lies."""
    from hunch.hub import resolve

    files = resolve(model, revision=revision, progress=not as_json)
    print(json.dumps({"model": model, "path": str(files.path)}) if as_json else files.path)
