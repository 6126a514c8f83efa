"""hunch train: a drafter for any model, from its own answers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hunch.cli import options as o
from hunch.errors import ConfigError

if TYPE_CHECKING:
    from hunch.train.job import Job
    from hunch.train.plan import Asked

DOES_NOT_PAY = 3  # the exit code
_NEEDS_OUT = "train needs --out DIR (where the drafter goes), or --resume DIR"


@dataclass(kw_only=True)
class Options:
    method: Annotated[
        str | None,
        typer.Argument(
            metavar="METHOD",
            help="draft, block, eagle3, medusa, mlp or phrases; without one, what is fastest for "
            "the target on this device.",
        ),
    ] = None
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Its options, say layers=4, draft_vocab=8192 or loss=blend."
        ),
    ] = None
    target: str | None = o.option(
        None,
        "The model to draft for: a name, a directory, a .gguf file or a hub id. "
        f"[default: {o.DEFAULT_MODEL}]",
        "--target",
        "--model",
        "-t",
        "-m",
        metavar="MODEL",
    )
    prompts: Path | None = o.option(
        None,
        "JSON lines or CSV with `turns` (chat template on the first) or `prompt` (raw), or a .txt "
        "file with a question in every line, also as .gz or .xz, or in parquet; default: questions "
        "that come with hunch. Your own kind of prompts makes a better drafter.",
    )
    minutes: float | None = o.option(
        None,
        "How long it may take in all [default: 10]; with a method named, its training alone.",
        min=0.01,
    )
    out: Path | None = o.option(None, "Where the drafter goes; required.", metavar="DIR")
    resume: Path | None = o.option(
        None,
        "Go on with a method's job; with --prompts, fine-tune its drafter on new ones.",
        metavar="DIR",
    )
    max_model_len: int | None = o.option(None, "Longest prompt and answer together.")
    force: bool = o.option(False, "Train even where no drafter is expected to pay.", "--force")
    register: bool = o.option(
        True, "Let auto use the drafter for this target from now on, if it pays."
    )
    device: o.Device = "auto"
    as_json: o.Json = False

    @property
    def engine(self) -> dict[str, object]:
        length = {} if self.max_model_len is None else {"max_model_len": self.max_model_len}
        return {"device": self.device, **length}

    @property
    def prompt_words(self) -> str:
        from hunch.train.prompts import BUILTIN

        return BUILTIN if self.prompts is None else str(self.prompts)


@o.takes(Options)
def train(ctx: typer.Context, given: Options) -> None:
    """Train a drafter for a model, from the model's own answers.

    Without a METHOD it measures, chooses one, trains, and says whether the drafter pays: exit code
    0 if it does, 3 if not. After a stop the same command goes on.
    """
    method, options = given.method, given.options or []
    if method is not None and "=" in method:  # KEY=VALUE without a method
        options, method = [method, *options], None
    if method is not None and any(sign in method for sign in "/.:"):
        raise ConfigError(f"train takes the model by an option: hunch train --target {method}")
    if given.out is not None:
        _check_out(given.out, given.target)
    read = _read(options)
    if method is not None:
        o.refuse(ctx, ("force", "register"), "goes without a method, where hunch chooses one")
        if given.minutes is not None:
            read["minutes"] = str(given.minutes)
        _train_method(*_job(method, given, read), given)
        return
    if given.resume is not None:
        raise ConfigError("--resume DIR needs its method: hunch train METHOD --resume DIR")
    if given.out is None:
        raise ConfigError(_NEEDS_OUT)
    from hunch.train.plan import Asked

    asked = Asked(
        target=given.target or o.DEFAULT_MODEL,
        out=given.out,
        prompts=given.prompt_words,
        minutes=10.0 if given.minutes is None else given.minutes,
        engine=given.engine,
        options=read,
        is_forced=given.force,
        is_listed=given.register,
    )
    _train_best(asked, given.as_json)


def _train_method(job: Job, before: Path | None, given: Options) -> None:
    """The method that was named, and how to use what it made."""
    from hunch.train.job import drafts_as, run_job
    from hunch.train.progress import Progress

    if given.minutes is not None and job.method != "phrases" and not given.as_json:
        typer.echo(
            f"--minutes {given.minutes:g} is for the training alone; the target answers the "
            "prompts first. Without a METHOD it is for all",
            err=True,
        )
    try:
        measured = run_job(job, Progress(given.as_json, _peak(given.device)), before)
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; go on with: hunch train {job.method} --resume {job.out}", err=True)
        raise typer.Exit(130) from None
    if given.as_json:
        print(json.dumps({"out": str(job.out), **measured.to_json()}))
        return
    use = f"{drafts_as(job.method)}:{job.out}"
    if job.method == "phrases":
        use = f"suffix:phrases={job.out}"
    positions = " ".join(f"{share:.2f}" for share in measured.per_position)
    typer.echo(
        f"{job.out}: {measured.tokens_per_pass:.2f} tokens per pass on held-out prompts "
        f"(by position {positions}). Use it with --speculate {use}"
    )


def _train_best(asked: Asked, as_json: bool) -> None:
    """The drafter that is fastest for the target here; leaves with 3 where none pays."""
    from hunch.train.auto import train_best
    from hunch.train.clock import account_text
    from hunch.train.progress import Progress

    def say(line: str) -> None:
        typer.echo(line, err=as_json)

    try:
        outcome = train_best(asked, Progress(as_json, _peak(str(asked.engine["device"]))), say)
    except KeyboardInterrupt:
        typer.echo("\nstopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({"out": str(asked.out), **outcome.to_json()}))
    else:
        print(outcome.text)
        if outcome.speeds is not None:
            print(account_text(outcome.seconds))
    if not outcome.pays:
        raise typer.Exit(DOES_NOT_PAY)


def _peak(device: str) -> float | None:
    """The GPU's bfloat16 peak by its data sheet; None on a CPU, or for a card nobody listed."""
    import torch

    from hunch.bench.gpus import of_device

    if device == "cpu" or not torch.cuda.is_available():
        return None
    found = of_device(torch.cuda.get_device_name())
    return None if found is None else 1e12 * found.bf16_tflops


def _job(method: str, given: Options, read: dict[str, str]) -> tuple[Job, Path | None]:
    """The job asked for, and the drafter it starts from where it goes on with a finished one."""
    from hunch.train.files import read_json
    from hunch.train.job import JOB, Job, job_of, read_settings

    target, prompts, engine = given.target or o.DEFAULT_MODEL, given.prompt_words, given.engine
    out, resume = given.out, given.resume
    read_settings(method, {})  # a method that is none is said first
    if resume is None:
        if out is None:
            raise ConfigError(_NEEDS_OUT)
        return Job(method, target, prompts, out, read, engine), None
    there = read_json(resume / "work" / JOB)
    if there is None and given.prompts is not None:
        there = job_of(resume, given.target)
    if there is None:
        raise ConfigError(f"--resume {resume}: no training job there (no work/{JOB})")
    if there["method"] != method:
        raise ConfigError(f"--resume {resume}: its method is {there['method']}, not {method}")
    if given.target is not None and target != there["target"]:
        raise ConfigError(f"--resume {resume}: its target is {there['target']}, not {target}")
    options = {**there["options"], **read}
    if given.prompts is None or prompts == there["prompts"]:
        if out is not None and out != resume:
            raise ConfigError(f"--out {out}: a job goes on in its own folder, {resume}")
        return Job(method, there["target"], there["prompts"], resume, options, engine), None
    if out is None and not (resume / "work" / JOB).is_file():
        raise ConfigError(f"--resume {resume}: give --out DIR, its own folder stays as it is")
    place = out or resume.with_name(f"{resume.name}-adapted")
    return Job(method, there["target"], prompts, place, options, engine), resume


def _check_out(out: Path, target: str | None) -> None:
    """Raise where nothing can be written there, or where it would be written over the target:
    before the work, not after."""
    place = out.absolute()
    if target is not None and Path(target).is_dir() and place.resolve() == Path(target).resolve():
        raise ConfigError(f"--out {out}: the target is there; name another directory")
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    if not there.is_dir():
        raise ConfigError(f"--out {out}: {there} is no directory; name another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: nothing may be written in {there}; name another directory")


def _read(options: list[str]) -> dict[str, str]:
    read: dict[str, str] = {}
    for text in options:
        key, is_option, value = text.partition("=")
        if not is_option or not key.isidentifier():
            raise ConfigError(f"{text!r} must be KEY=VALUE, say layers=4")
        read[key] = value
    return read
