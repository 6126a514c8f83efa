"""Compares drafters of several kinds, taught the same answers for the same number of seconds.

Each learns for as long, not counting the target's passes over the answers. Then all of them draft
in the engine, one request at a time in turn: as a chain and as a tree of 15 nodes, each in every
step, and under `auto`, where the policy decides. The answers are those that `hunch train` left in a
directory, or the target's to prompts that come with hunch.

    hunch bench part drafters --target MODEL --job DIR
    hunch bench part drafters --drafters draft:layers=2,block:layers=2 --seconds 60
    hunch bench part drafters --rates 0.25,0.5,1,2,4 --seconds 15 --forms none
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hunch import LLM
from hunch.bench.parts import PartOptions
from hunch.errors import ConfigError
from hunch.models.decoder import Decoder
from hunch.registry import RECIPES, resolve
from hunch.train.answering import HELD, room_for
from hunch.train.job import PROMPTS, Job, answer_prompts, build_student, drafts_as, write_student
from hunch.train.kept import Kept
from hunch.train.loop import CONTEXT, Loop
from hunch.train.outcome import is_beside, speculate_text
from hunch.train.plan import NUM_TRIED, WITHOUT
from hunch.train.progress import Progress
from hunch.train.prompts import BUILTIN, read_prompts
from hunch.train.regenerate import AnswerOptions, for_answers, give_back, read_answers, regenerate
from hunch.train.serving import Serving
from hunch.train.speeds import Speeds, compare_speeds, engine_for_one
from hunch.train.texts import Texts

NUM_HELD = 32  # answers that no drafter learns from
COMPARING = 30.0  # seconds for answers in the engine, at most
AUTO, NONE, LOOKUPS = "auto", "none", "lookups alone"
# What a method drafts in every step, by form; a tree of as many nodes as `auto` has them.
BEST_FIRST = "tree=dynamic:num_nodes=15"
OTHERS = ("block", "medusa", "mlp")
FORMS = {
    "chain": {**dict.fromkeys(("draft", "eagle3"), "num_nodes=5"), **dict.fromkeys(OTHERS, "")},
    "tree": {
        "draft": "tree=dynamic:num_nodes=15:depth=3:width=5:branch=5",
        "eagle3": "tree=dynamic:num_nodes=15:depth=5",
        **dict.fromkeys(OTHERS, BEST_FIRST),
    },
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A drafter to be taught."""

    method: str
    options: Mapping[str, str]
    rate: float  # times the recipe's

    @staticmethod
    def parse(text: str, rate: float) -> Wanted:
        """METHOD[:KEY=VALUE]..."""
        method, *words = text.split(":")
        if bad := [word for word in words if "=" not in word]:
            raise ConfigError(f"{text!r}: {bad[0]!r} is no KEY=VALUE")
        return Wanted(method, dict(word.split("=", 1) for word in words), rate)

    @property
    def name(self) -> str:
        words = [self.method, *(f"{key}={value}" for key, value in self.options.items())]
        return " ".join(words + ([] if self.rate == 1.0 else [f"rate x {self.rate:g}"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Taught:
    """A drafter after its seconds."""

    name: str
    method: str
    folder: Path
    num_parameters: int
    steps: int
    step_ms: float
    tokens_per_second: float  # that it learned from
    tokens_per_pass: float  # on held-out answers to such prompts, without an engine
    per_position: list[float]
    unseen: float | None  # the same on answers to `--unseen` or held-out prompts

    def forms(self, wanted: Sequence[str]) -> dict[str, str]:
        """The `speculate=` text of each form; forms that its method lacks are left out."""
        found = {}
        for form in wanted:
            options = FORMS.get(form, {}).get(self.method)
            if form == AUTO and is_beside(self.method):
                found[f"{self.name}, {form}"] = speculate_text(self.method, self.folder)
            elif options is not None:
                words = [drafts_as(self.method), str(self.folder), options, "adaptive=false"]
                found[f"{self.name}, {form}"] = ":".join(word for word in words if word)
        return found


@dataclass(slots=True)
class Teaching:
    """The material that all drafters are taught with."""

    job: Job
    texts: Texts
    seconds: float
    folder: Path
    unseen: Texts | None = None
    target: Decoder | None = None
    # The target's outputs on the texts, for the last kind of drafter: they are large.
    kept: dict[tuple[Any, ...], Kept] = field(default_factory=dict)

    def teach(self, wanted: Wanted, place: str) -> Taught:
        folder = self.folder / place
        options = {"minutes": str(self.seconds / 60), "test_every": "1e9", **wanted.options}
        job = replace(self.job, method=wanted.method, options=options)
        recipe, loop_options = resolve(RECIPES, job.method), job.settings.loop
        student, self.target = build_student(job, self.texts, target=self.target)
        loop = Loop(student, self.target, folder, loop_options, wanted.rate * recipe.lr)
        loop.is_trial, loop.marks = True, (1.0,)
        loop.kept = self.kept.get(student.asks)
        learn, held = self.texts.hold_out(NUM_HELD, loop_options.seed)
        loop.run(learn, held, Progress())
        self.kept = {} if loop.kept is None else {student.asks: loop.kept}
        replay, done = loop.test(held), loop.place
        write_student(job, student, folder / "files")
        return Taught(
            name=wanted.name,
            method=wanted.method,
            folder=folder / "files",
            num_parameters=sum(tensor.numel() for tensor in student.tensors.values()),
            steps=done.step,
            step_ms=1000.0 * done.seconds / max(done.step, 1),
            tokens_per_second=done.num_tokens / max(done.seconds, 1e-9),
            tokens_per_pass=replay.tokens_per_pass,
            per_position=replay.per_position,
            unseen=None if self.unseen is None else loop.test(self.unseen).tokens_per_pass,
        )

    def release(self) -> None:
        self.target = None
        self.kept.clear()
        give_back()


def answers_of(
    job: Job, seconds: float, file: Path | None, folder: Path
) -> tuple[Texts, Texts | None, list[list[int]]]:
    """A job's answers, which are made first if there are none; answers to prompts that no drafter
    learns from (a file's, or those held out); and the prompts held out."""
    work = job.work
    if not list((work / "answers").glob("shard-*.npz")):
        answer_prompts(job, Progress(), seconds)
        give_back()
    held_out: list[list[int]] = json.loads((work / PROMPTS).read_text("utf-8"))["held_out"]
    other = work / HELD
    if file is not None:
        other, options = folder / "unseen", AnswerOptions(max_tokens=128)
        with Serving(job.target).engine(for_answers(job.target, job.engine, CONTEXT)) as llm:
            prompts = read_prompts(file).encode(llm, room_for(options, CONTEXT))
            regenerate(llm, prompts, other, options, Progress())
        give_back()
    unseen = read_answers(other) if list(other.glob("*.npz")) else None
    return read_answers(work / "answers"), unseen, held_out


def print_heading(num_tokens: int, seconds: float) -> None:
    print(f"\n{num_tokens:,} tokens of answers, {seconds:g} s of learning each\n")
    print(
        "| drafter | parameters | steps | ms a step | tokens/s | tokens per pass | by place | "
        "on unseen prompts |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )


def print_taught(one: Taught) -> None:
    """Print a line as soon as a drafter has learned, as the next one takes minutes."""
    places = " ".join(f"{share:.2f}" for share in one.per_position)
    unseen = "" if one.unseen is None else f"{one.unseen:.3f}"
    print(
        f"| {one.name} | {one.num_parameters / 1e6:.1f}M | {one.steps} | {one.step_ms:.1f} | "
        f"{one.tokens_per_second:,.0f} | {one.tokens_per_pass:.3f} | {places} | "
        f"{unseen} |",
        flush=True,
    )


def print_speeds(speeds: Speeds) -> None:
    print(
        f"\nplain decoding: {speeds.plain:,.0f} tok/s; {speeds.num_prompts} held-out prompts, "
        f"{speeds.num_tokens} tokens, one request at a time\n\n"
        "| | tokens per pass | a step, in plain ones | speed of plain |\n|---|---|---|---|"
    )
    for name, speedup in speeds.speedup.items():
        tokens = speeds.tokens_per_pass[name]
        print(f"| {name} | {tokens:.2f} | {tokens / speedup:.2f} | {speedup:.2f}x |")


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("drafters", __doc__)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--job", type=Path, help="--out of a hunch train, whose answers are used")
    parser.add_argument("--answering", type=float, default=20.0, help="seconds, where it has none")
    parser.add_argument("--drafters", default="draft,block", help="METHOD[:KEY=VALUE]..., ...")
    parser.add_argument("--rates", default="1", help="learning rates, times the recipe's")
    parser.add_argument("--seconds", type=float, default=100.0, help="of learning, each")
    parser.add_argument("--unseen", type=Path, help="prompts to test on; else those held out")
    parser.add_argument("--forms", default="chain,tree,auto", help="in the engine, or none")
    parser.add_argument("--prompts", type=int, default=NUM_TRIED, help="in the engine, held out")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    args = parser.parse_args(words)
    forms = [] if args.forms == NONE else args.forms.split(",")
    if unknown := sorted({*forms} - {*FORMS, AUTO}):
        raise ConfigError(f"no form {unknown[0]!r}: chain, tree and auto, or none alone")
    rates = [float(rate) for rate in args.rates.split(",")]
    wanted = [Wanted.parse(text, rate) for text in args.drafters.split(",") for rate in rates]
    with TemporaryDirectory(prefix="hunch-drafters-") as made:
        folder = Path(made)
        out = args.job or folder / "job"
        job = Job("draft", args.target, BUILTIN, out, {}, {"device": args.device})
        texts, unseen, held_out = answers_of(job, args.answering, args.unseen, folder)
        teaching = Teaching(job, texts, args.seconds, folder, unseen)
        taught: list[Taught] = []
        print_heading(len(texts.tokens), args.seconds)
        for number, one in enumerate(wanted):
            taught.append(teaching.teach(one, f"{number}-{one.method}"))
            print_taught(taught[-1])
            give_back()
        teaching.release()
        report: dict[str, Any] = {"taught": [asdict(one) for one in taught]}
        if forms:
            methods = {LOOKUPS: WITHOUT}
            for done in taught:
                methods |= done.forms(forms)
            engine = engine_for_one(job.target, job.engine, CONTEXT)
            with LLM(job.target, speculate="off", **engine) as llm:
                prompts = held_out[: args.prompts]
                speeds = compare_speeds(llm, methods, prompts, seconds=COMPARING)
            print_speeds(speeds)
            report["engine"] = speeds.to_json()
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
