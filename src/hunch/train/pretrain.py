"""Training on plain text: the first of three stages for a draft from scratch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hunch.errors import ConfigError, RequestError, check_file
from hunch.models.decoder import Decoder
from hunch.prompt_files import read_text, unpacked
from hunch.train.files import write_whole
from hunch.train.kept import OwnTokens
from hunch.train.loop import Loop, LoopOptions
from hunch.train.progress import Progress
from hunch.train.student import Student
from hunch.train.texts import Texts

if TYPE_CHECKING:
    from hunch import LLM

FILE = "text.npz"
NONE = "none"
_PIECE = 20_000  # characters that are tokenized at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainOptions:
    """What a draft reads before it sees an answer."""

    text: str = ""  # plain text, or JSON lines with 'text'; from_scratch needs it, or "none"
    text_share: float = 0.5  # of minutes or steps

    def __post_init__(self) -> None:
        if not 0 < self.text_share < 1:
            raise ConfigError(f"text_share={self.text_share} must be above 0 and below 1")

    @property
    def is_asked(self) -> bool:
        return self.text not in ("", NONE)

    def check(self, method: str, is_from_scratch: bool) -> None:
        if self.is_asked and method != "draft":
            raise ConfigError(f"text= is for train draft: {method} learns from answers alone")
        if is_from_scratch and not self.text:
            raise ConfigError(
                "from_scratch=true begins with plain text: give text=FILE, or text=none to learn "
                "from answers alone"
            )

    def split(self, loop: LoopOptions) -> tuple[LoopOptions, LoopOptions]:
        """The time of this stage, and the rest, for the answers."""
        if not self.is_asked:
            return loop, loop
        share, steps = self.text_share, loop.steps
        first = None if steps is None else max(round(steps * share), 1)
        rest = None if steps is None or first is None else max(steps - first, 1)
        return (
            replace(loop, minutes=loop.minutes * share, steps=first),
            replace(loop, minutes=loop.minutes * (1 - share), steps=rest),
        )


def store_text(llm: LLM, options: PretrainOptions, work: Path, context: int) -> None:
    """Tokenize the text and store it; a second start uses that."""
    path = work / FILE
    if not options.is_asked or path.is_file():
        return
    tokenizer = llm.get_tokenizer()
    tokens: list[int] = []
    for piece in _pieces(Path(options.text)):
        tokens += tokenizer.encode(piece)
    num_texts = len(tokens) // context
    if num_texts < 2:
        raise RequestError(
            f"{options.text}: {len(tokens)} tokens of text are too few; {2 * context} or more are "
            "needed (some millions make a draft worth having)"
        )
    kept = np.array(tokens[: num_texts * context], dtype=np.uint32)

    def write(part: Path) -> None:
        with part.open("wb") as file:
            np.savez_compressed(file, tokens=kept, context=np.array(context))

    write_whole(path, write)


def _pieces(path: Path) -> list[str]:
    """The documents of a file, long ones cut at the ends of lines."""
    check_file(path, "; give plain text, or JSON lines with 'text'")
    whole = read_text(path)
    documents = [whole]
    if unpacked(path).suffix == ".jsonl":
        try:
            documents = [str(json.loads(line)["text"]) for line in whole.split("\n") if line]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise RequestError(f"{path}: every line must be JSON with 'text' in it") from None
    pieces = []
    for document in documents:
        piece = ""
        for line in document.splitlines(keepends=True):
            piece += line
            if len(piece) >= _PIECE:
                pieces.append(piece)
                piece = ""
        pieces.append(piece)
    return [piece for piece in pieces if piece]


def read_stored(work: Path) -> Texts:
    with np.load(work / FILE) as stored:
        tokens, context = stored["tokens"].astype(np.int64), int(stored["context"])
    num_texts = len(tokens) // context
    return Texts(tokens, np.arange(num_texts + 1) * context, np.ones(num_texts, dtype=np.int64))


class Pretrain(Loop):
    """The training loop over plain text, whose own tokens are the right ones."""

    marks = ()  # no candidates are saved: the selection is among drafts that saw answers

    def _new_kept(self, texts: Texts) -> OwnTokens:
        return OwnTokens(self._laid(texts), self.student.columns)


def pretrain(
    student: Student, target: Decoder, work: Path, options: LoopOptions, lr: float, show: Progress
) -> None:
    """Teach the student the text. Killed, it can continue from there."""
    texts = read_stored(work)
    learn, held = texts.hold_out(16, options.seed)
    Pretrain(student, target, work / "pretrain", options, lr).run(learn, held, show)
