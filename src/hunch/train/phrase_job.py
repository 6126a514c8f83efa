"""Counts a phrase table in a process of its own, while a network is trained."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hunch.errors import TrainingError
from hunch.kernels.phrases import FILE, load_phrases
from hunch.train.files import write_json, write_whole
from hunch.train.texts import Texts

PER_SECOND = 40_000  # tokens that are counted in a second, at the least
MIN_TOKENS, MAX_TOKENS = 1_000_000, 12_000_000  # of texts that are counted, as there is time
_COUNTER = "hunch.train.phrases"


def stored_texts(texts: Texts, vocab_size: int, seconds: float = 0.0) -> bytes:
    """Texts as the counting process reads them; if it has no time for all, some of every kind."""
    most = min(max(int(PER_SECOND * seconds), MIN_TOKENS), MAX_TOKENS)
    share = min(most / max(int(texts.lengths.sum()), 1), 1.0)
    count = max(int(share * len(texts)), 1)
    some = texts.take(np.linspace(0, len(texts) - 1, count).astype(np.int64))
    return some.to_bytes(vocab_size=np.array(vocab_size))


def write_table(folder: Path, data: bytes, vocab_size: int) -> None:
    """Write a counted table as a directory that `phrases=` can name."""
    table = load_phrases(data, vocab_size)
    config = {"model_type": "phrase_table", "vocab_size": vocab_size}
    write_json(folder / "config.json", {**config, "max_order": table.max_order})
    write_whole(folder / FILE, lambda part: part.write_bytes(data))


class PhraseCount:
    """Counting begins at once; `finish` waits for the result."""

    def __init__(self, texts: Texts, vocab_size: int, seconds: float = 0.0) -> None:
        """`seconds`: when the table is wanted, from now."""
        self.vocab_size = vocab_size
        self._texts = tempfile.TemporaryFile()  # noqa: SIM115  it must outlive this function
        self._texts.write(stored_texts(texts, vocab_size, seconds))
        self._texts.seek(0)
        self._found, self._words = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", _COUNTER]
        self._process = subprocess.Popen(
            command, stdin=self._texts, stdout=self._found, stderr=self._words
        )

    def finish(self, folder: Path, seconds: float) -> bool:
        """Write the table to the folder; False: it took longer than `seconds` more."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            return False
        self._words.seek(0)
        self._found.seek(0)
        if code:
            lines = self._words.read().decode(errors="replace").strip().splitlines()
            raise TrainingError(f"phrases could not be counted: {lines[-1] if lines else code}")
        write_table(folder, self._found.read(), self.vocab_size)
        return True

    def stop(self) -> None:
        """End the process; what it has counted so far is lost."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for file in (self._texts, self._found, self._words):
            file.close()
