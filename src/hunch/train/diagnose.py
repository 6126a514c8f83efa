"""Why a drafter is bad, in plain words: try what could be wrong, and see whether it helps."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from hunch.errors import ModelError
from hunch.models.heads.files import detect

GAIN = 0.25  # more accepted tokens per pass, as a share, that make a suspicion a finding
GOOD = 2.0  # tokens per pass from which nobody needs a doctor
_LONG = 48  # tokens of an answer after which a drafter should be as good as before


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, and what to do."""

    fault: str
    words: str


@dataclass(slots=True)
class Seen:
    """How guesses fared. Index 1 of `by_shift` is as it should be."""

    num_tokens: int = 0
    num_passes: int = 0
    by_shift: list[int] = field(default_factory=lambda: [0, 0, 0])  # token before, at, after
    first: int = 0  # first guesses that by_shift is about
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=lambda: [0, 0])  # accepted, passes
    late: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.num_passes, 1)

    @property
    def gained(self) -> float:
        """Tokens per pass beyond plain decoding."""
        return max(self.tokens_per_pass - 1, 0.0)

    @property
    def per_position(self) -> list[float]:
        """Of the drafts that had a guess there, the share whose guess was accepted, as stats."""
        return [kept / max(tried, 1) for tried, kept in zip(self.tried, self.kept, strict=True)]

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
                for place in range(_depth(step.parents)):
                    if place >= len(self.tried):
                        self.tried.append(0)
                        self.kept.append(0)
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


@dataclass(slots=True)
class Report:
    """What the doctor found."""

    method: str
    tokens_per_pass: float
    per_position: list[float]
    findings: list[Finding]

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "tokens_per_pass": self.tokens_per_pass,
            "per_position": self.per_position,
            "findings": [{"fault": f.fault, "words": f.words} for f in self.findings],
        }


class Doctor:
    """Runs a drafter beside its target, as it is and with one thing changed at a time."""

    def __init__(
        self,
        target: str,
        folder: Path,
        prompts: list[str],
        engine: dict[str, Any],
        max_tokens: int = 96,
    ) -> None:
        self.target, self.folder, self.prompts, self.engine = target, folder, prompts, engine
        self.method, self.max_tokens = detect(folder), max_tokens
        self.has_template = True  # told by the first look

    def run(self) -> Report:
        """Everything that is wrong; the last word is training where nothing else is."""
        try:
            seen = self.look(self.folder)
        except ModelError as error:
            fault = "vocab_map" if "map of tokens" in str(error) else "files"
            return Report(self.method, 0.0, [], [Finding(fault=fault, words=str(error))])
        findings = [
            found
            for check in (self._shift, self._map, self._features, self._template, self._context)
            if (found := check(seen)) is not None
        ]
        if not findings and (found := self._precision(seen)) is not None:
            findings.append(found)
        if not findings and seen.tokens_per_pass < GOOD:
            findings.append(_training(seen, self.method))
        return Report(self.method, seen.tokens_per_pass, seen.per_position, findings)

    def look(self, folder: Path, options: str = "", *, is_chat: bool = True) -> Seen:
        """Answers to the prompts with this drafter, traced."""
        from hunch import LLM, SamplingParams, Speculation

        seen = Seen()
        with LLM(self.target, speculate=f"{self.method}:{folder}{options}", **self.engine) as llm:
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

    def _better(self, seen: Seen, other: Seen) -> bool:
        return other.gained > seen.gained * (1 + GAIN) + 0.05

    def _shift(self, seen: Seen) -> Finding | None:
        before, at, after = seen.by_shift
        if max(before, after) <= at * (1 + GAIN) + 0.05 * seen.first:
            return None
        word = "before" if before > after else "after"
        share = max(before, after) / max(seen.first, 1)
        return Finding(
            fault="shifted",
            words=(
                f"its first guess is the token one place {word} the one asked for {share:.0%} of "
                "the time: it was trained with targets shifted by one. Train it again with the "
                "tokens its method predicts (the head of index h says token t + 2 + h)"
            ),
        )

    def _map(self, seen: Seen) -> Finding | None:
        if "d2t" not in self._tensors():
            return None
        for name, change in (("one too high", -1), ("one too low", 1), ("absolute", 0)):
            with self._changed(shift_ids=change, is_absolute=name == "absolute") as folder:
                if folder is not None and self._better(seen, self.look(folder)):
                    return Finding(
                        fault="vocab_map",
                        words=(
                            f"its map of tokens (d2t) is wrong: the ids are {name}. d2t[c] must "
                            "be the target's id of column c, less c"
                        ),
                    )
        return None

    def _features(self, seen: Seen) -> Finding | None:
        config = self._config()
        key = "eagle_aux_hidden_state_layer_ids"
        layers = config.get(key) or (config.get("eagle_config") or {}).get(key)
        if layers is None:
            return None
        for shift in (-1, 1):
            moved = [layer + shift for layer in layers]
            with self._changed(config={key: moved}) as folder:
                try:
                    is_better = folder is not None and self._better(seen, self.look(folder))
                except ModelError:
                    continue  # past the target's first or last layer
                if is_better:
                    return Finding(
                        fault="feature_layers",
                        words=(
                            f"it fuses the target's states after layers {layers}, but does better "
                            f"with {moved}: its trainer counted layers from another end. Set "
                            f"{key} to {moved}"
                        ),
                    )
        return None

    def _template(self, seen: Seen) -> Finding | None:
        if not self.has_template or not self._better(seen, self.look(self.folder, is_chat=False)):
            return None
        return Finding(
            fault="chat_template",
            words=(
                "it guesses far better without the chat template than with it: it was trained on "
                "another template than the one served. Train it on answers to prompts as they "
                "are served (hunch train does)"
            ),
        )

    def _context(self, seen: Seen) -> Finding | None:
        (kept, passes), (kept_late, passes_late) = seen.early, seen.late
        if min(passes, passes_late) < 20:
            return None
        early, late = kept / passes, kept_late / passes_late
        if late * (1 + GAIN) + 0.1 > early:
            return None
        return Finding(
            fault="context",
            words=(
                f"it keeps {early:.2f} guesses per pass early in an answer and {late:.2f} later "
                "on: texts are longer than it was trained for, or its rope settings are not "
                "those it was trained with. Train with a longer context=, or give window="
            ),
        )

    def _precision(self, seen: Seen) -> Finding | None:
        if self.method != "draft":
            return None
        if not self._better(seen, self.look(self.folder, ":dtype=float32")):
            return None
        return Finding(
            fault="precision",
            words="it is far better in float32 than as it is held: give draft:PATH:dtype=float32",
        )

    def _config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found

    def _tensors(self) -> dict[str, Any]:
        path = self.folder / "model.safetensors"
        return load_file(path) if path.is_file() else {}

    @contextmanager
    def _changed(
        self,
        *,
        config: dict[str, Any] | None = None,
        shift_ids: int = 0,
        is_absolute: bool = False,
    ) -> Iterator[Path | None]:
        """A copy of the drafter with one thing changed; None where that makes no sense."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "drafter"
            shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("work"))
            if config is not None:
                (folder / "config.json").write_text(json.dumps({**self._config(), **config}))
            elif not self._change_map(folder, shift_ids, is_absolute):
                yield None
                return
            yield folder

    def _change_map(self, folder: Path, shift: int, is_absolute: bool) -> bool:
        import torch

        tensors = self._tensors()
        offset_C = tensors["d2t"].long()
        place_C = torch.arange(len(offset_C))
        ids_C = offset_C if is_absolute else place_C + offset_C + shift
        is_map = int(ids_C.min()) >= 0 and len(ids_C.unique()) == len(ids_C)
        if not is_map or int(ids_C.max()) >= int(self._config()["vocab_size"]):
            return False
        tensors["d2t"] = (ids_C - place_C).to(tensors["d2t"].dtype)
        save_file(tensors, folder / "model.safetensors")
        return True


def _training(seen: Seen, method: str) -> Finding:
    first = seen.per_position[0] if seen.per_position else 0.0
    depth = max(len(seen.per_position), 1)
    even = sum(first**place for place in range(depth + 1))
    shape = (
        "its later guesses fall off faster than its first one promises: train with more unrolled "
        "steps"
        if seen.tokens_per_pass < 0.8 * even
        else "its later guesses keep what its first one promises: the whole drafter needs to be "
        "better"
    )
    return Finding(
        fault="training",
        words=(
            f"nothing is wrong with its files: it is trained too little, or too small. Its first "
            f"guess is right {first:.0%} of the time; at that rate {even:.2f} tokens per pass are "
            f"to be expected, {seen.tokens_per_pass:.2f} were seen; {shape} (hunch train {method} "
            "with more minutes and prompts)"
        ),
    )
