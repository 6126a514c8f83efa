"""Why a drafter guesses badly: changes what could be wrong, and sees whether that helps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hunch.errors import ModelError
from hunch.models.heads.files import BLOCKS, detect
from hunch.train.changes import (
    changed,
    fused_layers,
    moved_map,
    read_config,
    read_tensors,
    turned_heads,
    unread_tensors,
)
from hunch.train.replay import Drafted

GAIN = 0.25  # by this share more tokens must be accepted for a change to be a finding
GOOD = 2.0  # with this many tokens per pass there is nothing to diagnose
_LONG = 48  # tokens of an answer after which a drafter should still be as good as before


# What is wrong, by the name of the fault, and what to do.
WORDS = {
    "shifted": (
        "its first guess is the token one place {word} the one asked for {share:.0%} of the time: "
        "it was trained with targets shifted by one, or hardly at all. Train it again with the "
        "tokens its method predicts (the head of index h says token t + 2 + h)"
    ),
    "tensors": "{unread}; look for a newer hunch, or a file of the published form",
    "vocab_map": (
        "its map of tokens (d2t) is wrong: the ids are {name}. d2t[c] must be the target's id of "
        "column c, less c"
    ),
    "feature_layers": (
        "it fuses the target's states by {key} {layers}, but does better with {moved}: its trainer "
        "counted layers from another end. Set {key} to {moved}"
    ),
    "places": (
        "its places tell other tokens than its config says: set sample_from_anchor to {other}"
    ),
    "rope_layout": (
        "its heads are laid out for a rope that turns neighbours, hunch reads halves (as Hugging "
        "Face's files are): convert q_proj, k_proj and their norms"
    ),
    "chat_template": (
        "it guesses far better without the chat template than with it: it was trained on another "
        "template than the one served. Train it on answers to prompts as they are served (hunch "
        "train does)"
    ),
    "context": (
        "it keeps {early:.2f} guesses per pass early in an answer and {late:.2f} later on: texts "
        "are longer than it was trained for, or its rope settings are not those it was trained "
        "with. Train with a longer context=, or give window="
    ),
    "rounded_target": (
        "it guesses far better beside the target in float32: it was trained for states that this "
        "target's rounding changes. Train it on the target as it is served"
    ),
    "precision": ("it is far better in float32 than as it is held: give draft:PATH:dtype=float32"),
    "training": (
        "nothing is wrong with its files: it is trained too little, or too small. Its first guess "
        "is right {first:.0%} of the time; at that rate {even:.2f} tokens per pass are to be "
        "expected, {seen:.2f} were seen; its later guesses {shape} (hunch train {method} with more "
        "minutes and prompts)"
    ),
}


class Finding(NamedTuple):
    """One thing that is wrong."""

    fault: str
    words: str


def found(fault: str, **facts: Any) -> Finding:
    return Finding(fault, WORDS[fault].format(**facts))


@dataclass(slots=True)
class Seen(Drafted):
    """How many guesses were right in the engine. Index 1 of `by_shift` is as it should be."""

    by_shift: list[int] = field(default_factory=lambda: [0, 0, 0])  # token before, at, after
    first: int = 0  # first guesses that by_shift is about
    early: list[int] = field(default_factory=lambda: [0, 0])  # accepted, passes
    late: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def gained(self) -> float:
        """Tokens per pass beyond plain decoding."""
        return max(self.tokens_per_pass - 1, 0.0)

    def add(self, text: list[int], trace: list[Any]) -> None:
        """An answer, and the drafts that were made for it."""
        at = 0
        for step in trace:
            if step.tokens and at > 0:
                near = text[at - 1 : at + 2]
                if len(set(near)) == 3:  # where tokens repeat, a shift cannot be seen
                    self.first += 1
                    for place, token in enumerate(near):
                        self.by_shift[place] += step.tokens[0] == token
                depth = _depth(step.parents)
                self.deepen(depth)
                for place in range(depth):
                    self.tried[place] += 1
                    self.kept[place] += place < len(step.accepted)
                part = self.early if at < _LONG else self.late
                part[0] += len(step.accepted)
                part[1] += 1
            self.num_passes += at > 0
            self.num_tokens += min(len(step.accepted) + 1, len(text) - at) * (at > 0)
            at += len(step.accepted) + 1


def _depth(parents: list[int]) -> int:
    deep: list[int] = []
    for parent in parents:
        deep.append(1 if parent < 0 else deep[parent] + 1)
    return max(deep, default=0)


class Trial(NamedTuple):
    """How the drafter did with one thing changed."""

    name: str
    tokens_per_pass: float
    per_position: list[float]


@dataclass(slots=True)
class Report:
    """What the doctor found."""

    method: str
    tokens_per_pass: float
    per_position: list[float]
    findings: list[Finding]
    trials: list[Trial] = field(default_factory=list)  # the first: as it is

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "tokens_per_pass": self.tokens_per_pass,
            "per_position": self.per_position,
            "findings": [finding._asdict() for finding in self.findings],
            "trials": [trial._asdict() for trial in self.trials],
        }


@dataclass(slots=True)
class Doctor:
    """Runs a drafter beside its target, as it is and with one thing changed at a time."""

    target: str
    folder: Path
    prompts: list[str]
    engine: dict[str, Any]
    max_tokens: int = 96
    options: str = ""  # of the drafter, as ":KEY=VALUE"...
    say: Callable[[str], None] = lambda words: None  # is told what is tried now
    method: str = field(init=False)
    has_template: bool = True  # both are known after the first look
    is_rounded: bool = False  # the target's weights are held in fewer than 16 bits
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.method = detect(self.folder)

    def run(self) -> Report:
        """Everything that is wrong; if nothing else is found, it is the training."""
        self.say("trying: as it is")
        try:
            with unread_tensors() as words:
                seen = self.look(self.folder)
        except ModelError as error:
            fault = "vocab_map" if "map of tokens" in str(error) else "files"
            return Report(self.method, 0.0, [], [Finding(fault, str(error))])
        checks = (
            self._shift, self._map, self._features, self._places, self._rope, self._template,
            self._context, self._rounding,
        )  # fmt: skip
        findings = [found("tensors", unread=words[0])] if words else []
        findings += [one for check in checks if (one := check(seen)) is not None]
        for last in (self._precision, self._training):
            if not findings and (one := last(seen)) is not None:
                findings.append(one)
        as_it_is = Trial("as it is", seen.tokens_per_pass, seen.per_position)
        return Report(self.method, *as_it_is[1:], findings, [as_it_is, *self.trials])

    def look(self, folder: Path, options: str = "", *, is_chat: bool = True) -> Seen:
        """Answers to the prompts with this drafter, traced."""
        from hunch import LLM, SamplingParams, Speculation

        seen = Seen()
        spec = f"{self.method}:{folder}{self.options}{options}"
        with LLM(self.target, speculate=spec, always_draft=True, **self.engine) as llm:
            self.is_rounded = llm.engine.capacity.activation_bits is not None
            room = max(llm.engine.capacity.max_len - self.max_tokens, 1)
            self.has_template = llm.has_chat_template
            encode = llm.encode_turn if is_chat else llm.get_tokenizer().encode
            ids = [encode(text)[-room:] for text in self.prompts]
            params = SamplingParams(
                temperature=0,
                max_tokens=self.max_tokens,
                ignore_eos=True,
                speculation=Speculation(trace=True),
            )
            for output in llm.generate(ids, params, use_tqdm=False):
                answer = output.outputs[0]
                seen.add(list(answer.token_ids), answer.trace or [])
        return seen

    def _helps(
        self,
        seen: Seen,
        name: str,
        options: str = "",
        *,
        is_chat: bool = True,
        **changes: Mapping[str, Any],  # to the drafter's files
    ) -> bool:
        """Whether the drafter guesses better with these changes; the trial is noted."""
        self.say(f"trying: {name}")
        with changed(self.folder, **changes) if changes else nullcontext(self.folder) as folder:
            try:
                other = self.look(folder, options, is_chat=is_chat)
            except ModelError:
                return False  # what was changed does not fit this target
        self.trials.append(Trial(name, other.tokens_per_pass, other.per_position))
        return other.gained > seen.gained * (1 + GAIN) + 0.05

    def _shift(self, seen: Seen) -> Finding | None:
        before, at, after = seen.by_shift
        if max(before, after) <= at * (1 + GAIN) + 0.05 * seen.first:
            return None
        share = max(before, after) / max(seen.first, 1)
        return found("shifted", word="before" if before > after else "after", share=share)

    def _map(self, seen: Seen) -> Finding | None:
        if "d2t" not in read_tensors(self.folder):
            return None
        for name, shift in (("one too high", -1), ("one too low", 1), ("absolute", 0)):
            tensors = moved_map(self.folder, shift, is_absolute=name == "absolute")
            if tensors and self._helps(seen, f"token ids {name}", tensors=tensors):
                return found("vocab_map", name=name)
        return None

    def _features(self, seen: Seen) -> Finding | None:
        fused = fused_layers(self.folder)
        if fused is None:
            return None
        key, layers = fused
        for shift in (-1, 1):
            moved = [layer + shift for layer in layers]
            if self._helps(seen, f"{key} {moved}", config={key: moved}):
                return found("feature_layers", key=key, layers=layers, moved=moved)
        return None

    def _places(self, seen: Seen) -> Finding | None:
        if self.method not in BLOCKS:
            return None
        config = read_config(self.folder)
        given = {**(config.get("dflash_config") or {}), **config}.get("sample_from_anchor")
        is_shifted = self.method == "dspark" if given is None else bool(given)
        other, config = str(not is_shifted).lower(), {"sample_from_anchor": not is_shifted}
        is_better = self._helps(seen, f"sample_from_anchor {other}", config=config)
        return found("places", other=other) if is_better else None

    def _rope(self, seen: Seen) -> Finding | None:
        tensors = turned_heads(self.folder)
        is_better = tensors and self._helps(seen, "rope of neighbours", tensors=tensors)
        return found("rope_layout") if is_better else None

    def _template(self, seen: Seen) -> Finding | None:
        name = "without the chat template"
        is_better = self.has_template and self._helps(seen, name, is_chat=False)
        return found("chat_template") if is_better else None

    def _context(self, seen: Seen) -> Finding | None:
        (kept, passes), (kept_late, passes_late) = seen.early, seen.late
        if min(passes, passes_late) < 20:
            return None
        early, late = kept / passes, kept_late / passes_late
        is_worse = late * (1 + GAIN) + 0.1 <= early
        return found("context", early=early, late=late) if is_worse else None

    def _rounding(self, seen: Seen) -> Finding | None:
        if not self.is_rounded or seen.tokens_per_pass >= GOOD:
            return None
        engine, self.engine = self.engine, {**self.engine, "dtype": "float32"}
        try:
            is_better = self._helps(seen, "target in float32")
        finally:
            self.engine = engine
        return found("rounded_target") if is_better else None

    def _precision(self, seen: Seen) -> Finding | None:
        name, options = "draft in float32", ":dtype=float32"
        is_better = self.method == "draft" and self._helps(seen, name, options)
        return found("precision") if is_better else None

    def _training(self, seen: Seen) -> Finding | None:
        if seen.tokens_per_pass >= GOOD:
            return None
        first = seen.per_position[0] if seen.per_position else 0.0
        even = sum(first**place for place in range(max(len(seen.per_position), 1) + 1))
        shape = "keep what its first one promises: the whole drafter needs to be better"
        if seen.tokens_per_pass < 0.8 * even:
            shape = "fall off faster than its first one promises: train with more unrolled steps"
        facts = {"first": first, "even": even, "seen": seen.tokens_per_pass}
        return found("training", **facts, shape=shape, method=self.method)
