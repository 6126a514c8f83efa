"""hunch drafters: what was trained on this machine, and for which target `auto` will take it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from hunch.cli import options as o
from hunch.errors import ConfigError


def drafters(
    action: Annotated[str, typer.Argument(help="list, or rm to take one off the list.")] = "list",
    path: Annotated[str | None, typer.Argument(help="The directory to take off.")] = None,
    as_json: o.Json = False,
) -> None:
    """List the drafters that `auto` finds by itself.

    rm DIR takes one off the list; its files stay.
    """
    from hunch.hub.drafters import drop_trained, trained_drafters

    if action == "rm":
        if path is None:
            raise ConfigError("drafters rm needs a directory; `hunch drafters` lists them")
        if drop_trained(path) is None:
            known = ", ".join(one.path for one in trained_drafters()) or "none"
            raise ConfigError(f"drafters rm {path}: not on the list; on it: {known}")
        print(json.dumps({"removed": path}) if as_json else f"auto no longer takes {path}")
        return
    if action != "list":
        raise ConfigError(f"drafters {action!r}: give list, or rm DIR")
    if path is not None:
        raise ConfigError(f"drafters list {path}: takes no directory; rm DIR takes one off")
    found = trained_drafters()
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    if not found:
        typer.echo("none yet; `hunch train --target MODEL --out DIR` makes one")
        return
    from rich.console import Console
    from rich.table import Column, Table

    folder = Column("directory", overflow="fold")  # whole: `rm` asks for it
    table = Table("target", "method", "on", "tokens per pass", "speed", folder, box=None)
    for one in found:
        speed, per_pass = f"{one.speedup:.2f}x", f"{one.tokens_per_pass:.2f}"
        table.add_row(one.target, one.method, one.device, per_pass, speed, one.path)
    Console().print(table)
