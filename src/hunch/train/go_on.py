"""Go on training a drafter with served answers, in a process of its own.

It reads its task from stdin (a line of JSON, then the texts), and writes the result to stdout. It
takes one thread; the server gives it the lowest priority and stops it while there are requests.
Texts stay in memory. A new drafter is written if it is better on answers that it did not learn
from.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hunch.errors import ConfigError
from hunch.hub import resolve as find_files
from hunch.models.heads.draft_model import CUT_FROM
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.registry import RECIPES, resolve
from hunch.train.costs import num_parameters
from hunch.train.cut import UNITS, cut_options
from hunch.train.files import read_json
from hunch.train.job import Job, build_student, start_from, write_student
from hunch.train.loop import Loop
from hunch.train.progress import Progress
from hunch.train.texts import Texts

HELD_OUT = 0.2  # share of the answers, to measure with
RATE = 0.3  # share of the recipe's rate, so that what was learned before stays
EPOCHS = 3
STEPS = (20, 1200)  # at least, and at most
BATCH = {"cuda": 4096, "cpu": 1024}  # tokens of a step, at most
LEAST_BATCH = 256
# When training is stopped, the GPU still finishes its step, and a request waits for that: about
# 4 ms, if a step of the target has this many floating-point operations.
STEP_FLOPS = 1.2e12
MIN_GAIN = 1.01  # a new drafter must have this many times the old one's tokens per pass


@dataclass(frozen=True, kw_only=True, slots=True)
class GoOn:
    """The task."""

    target: str
    drafter: str  # its directory
    out: str  # where a better one goes
    device: str  # "cuda" or "cpu"
    epochs: float = EPOCHS


@dataclass(frozen=True, kw_only=True, slots=True)
class WentOn:
    """The result: tokens per pass on held-out answers, by replay."""

    before: float
    after: float
    steps: int
    is_better: bool


def job_for(asked: GoOn) -> Job:
    """The job that would have made the drafter, read from its files."""
    config = read_json(Path(asked.drafter) / "config.json") or {}
    engine = {"device": "cpu"} if asked.device == "cpu" else {}
    if CUT_FROM in config:
        return Job("draft", asked.target, "", Path(asked.out), cut_options(config), engine)
    if config.get("architectures") == ["Qwen3DSparkModel"]:
        options = {
            "layers": str(config["num_hidden_layers"]),
            "block": str(config["block_size"]),
            "features": ",".join(str(layer + 1) for layer in config["target_layer_ids"]),
            "rank": str(config["markov_rank"]),
            "units": str(config.get(UNITS, 1.0)),
        }
        return Job("block", asked.target, "", Path(asked.out), options, engine)
    raise ConfigError(
        f"{asked.drafter}: not a drafter that `hunch train` makes (draft or block); it stays as "
        "it is while serving"
    )


def go_on(asked: GoOn, texts: Texts) -> WentOn:
    """Learn from most of the texts, measure on the others, write what is better."""
    job = job_for(asked)
    batch = _batch(asked)
    num_steps = int(asked.epochs * len(texts.tokens) / batch)
    job.options |= {"batch": str(batch), "steps": str(min(max(num_steps, STEPS[0]), STEPS[1]))}
    before = Path(asked.drafter)
    student, target = build_student(job, texts, before)
    start_from(student, before)
    learn, held = texts.split(max(round(HELD_OUT * len(texts)), 1), 0)
    with tempfile.TemporaryDirectory() as folder:
        rate = RATE * resolve(RECIPES, job.method).lr
        loop = Loop(student, target, Path(folder), job.settings.loop, rate)
        loop.marks, loop.waits = (), True
        old = loop.test(held).tokens_per_pass
        loop.run(learn, held, Progress(is_quiet=True))
        new = loop.test(held).tokens_per_pass
    is_better = new > MIN_GAIN * old
    if is_better:
        write_student(job, student, job.out)
    return WentOn(before=old, after=new, steps=loop.place.step, is_better=is_better)


def _batch(asked: GoOn) -> int:
    """Tokens of a step that is short enough for a request to wait for it."""
    if asked.device != "cuda":
        return BATCH[asked.device]
    spec = ModelSpec.from_config(open_weights(find_files(asked.target)).config)
    size = int(STEP_FLOPS / (2 * num_parameters(spec)))
    return min(max(size, LEAST_BATCH), BATCH["cuda"])


def unpack(data: bytes) -> tuple[GoOn, Texts]:
    """The task from a line of JSON, then the texts as `hunch.adapt.packed` has them."""
    line, _, rest = data.partition(b"\n")
    return GoOn(**json.loads(line)), Texts.from_bytes(rest)[0]


def main() -> None:
    torch.set_num_threads(1)
    found = go_on(*unpack(sys.stdin.buffer.read()))
    sys.stdout.write(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
