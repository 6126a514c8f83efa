"""The `hunch` command: one file per subcommand, no stack trace for a user's mistake."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import NoReturn, TextIO

import typer

from hunch.cli.bench import app as bench_app
from hunch.cli.chat import chat
from hunch.cli.doctor import doctor
from hunch.cli.drafters import drafters
from hunch.cli.generate import generate
from hunch.cli.models import models, pull
from hunch.cli.options import Command, Group
from hunch.cli.plan import plan
from hunch.cli.serve import CONTEXT as SERVE_CONTEXT
from hunch.cli.serve import serve
from hunch.cli.train import train
from hunch.cli.verify import verify
from hunch.compat import dashed, from_llama_cli
from hunch.errors import ConfigError, HunchError

app = typer.Typer(
    name="hunch",
    cls=Group,
    help="Language models generate faster, and not one token of their text changes.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes leave a sentence 20 columns in a terminal of 80
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, verify, plan, doctor, models, drafters, pull, train):
    app.command(cls=Command)(command)
app.command(cls=Command, context_settings=SERVE_CONTEXT)(serve)
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if version:
        from hunch import __version__

        typer.echo(f"hunch {__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every flag is taken with '-' and with '_'."""
    words = [dashed(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    for name in ("stdout", "stderr"):  # None where the shell closed it (>&-)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    _forgive(sys.stdin, "surrogateescape")  # the tokenizer says which byte is no text
    _forgive(sys.stdout, "replace")  # a terminal of another locale shows ? for what it lacks
    try:
        logging.basicConfig(format="hunch: %(message)s", level=_log_level())
        try:
            app(from_llama_cli(words))
        finally:
            sys.stdout.flush()  # here, where what cannot be written is still told
    except HunchError as error:
        _leave(error)
    except BrokenPipeError:  # the reader (head, less) closed early: not a fault
        _drop_output()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _drop_output()
            _leave(f"no room left on the disk for {error.filename or 'the output'}")
        if error.filename is None:
            raise
        _leave(f"{error.filename}: {error.strerror}")


def _forgive(stream: TextIO | None, errors: str) -> None:
    """Go on past characters that the locale's encoding does not have."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors=errors)


def _leave(reason: object) -> NoReturn:
    typer.secho(f"error: {reason}", fg="red", err=True)
    raise SystemExit(2) from None


def _drop_output() -> None:
    """What is still in the buffer goes nowhere, else leaving would try to write it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _log_level() -> str:
    level = os.environ.get("HUNCH_LOG", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(f"HUNCH_LOG={level!r} must be one of debug, info, warning, error")
    return level
