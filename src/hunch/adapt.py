"""Phrases counted from served answers while they are served: for any model, from the first minute.

Answers stay in memory, the newest of them, and go to no file. Counting is another process's work,
of the lowest priority, so that requests do not wait for it; what it found is taken between two
steps. It changes what is guessed, never what is said.
"""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np

from hunch.config import say_once
from hunch.errors import HunchError
from hunch.kernels.phrases import PhraseTable, load_phrases

log = logging.getLogger("hunch")

MAX_TOKENS = 1_000_000  # of prompts and answers that are remembered
FIRST = 2_000  # tokens of answers after which phrases are counted for the first time
MORE = 1.5  # times as many tokens before they are counted again
PAUSE = 20.0  # seconds between two countings, at least
_COUNTER = "hunch.train.count"  # the module that another process runs
_TIMEOUT = 600.0


class PhraseAdapter:
    """Remembers answers, lets them be counted now and then, and hands the table on."""

    def __init__(
        self,
        take: Callable[[PhraseTable], None],
        vocab_size: int,
        *,
        first: int = FIRST,
        pause: float = PAUSE,
    ) -> None:
        self._take, self._vocab_size, self._pause = take, vocab_size, pause
        self._texts: deque[tuple[np.ndarray, int]] = deque()  # tokens, and how many are a prompt's
        self._num_tokens = 0  # remembered
        self._num_seen, self._next = 0, first  # tokens of answers so far, and when to count
        self._last = -pause
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: Thread | None = None
        self._found: PhraseTable | None = None
        self.num_taken = 0

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """An answer is over."""
        if not answer_ids:
            return
        tokens = np.array([*prompt_ids, *answer_ids], dtype=np.uint32)
        self._texts.append((tokens, len(prompt_ids)))
        self._num_tokens += len(tokens)
        self._num_seen += len(answer_ids)
        while self._num_tokens > MAX_TOKENS and len(self._texts) > 1:
            self._num_tokens -= len(self._texts.popleft()[0])
        is_due = self._num_seen >= self._next and monotonic() - self._last >= self._pause
        if is_due and self._thread is None:
            self._next = int(MORE * self._num_seen)
            self._last = monotonic()
            self._thread = Thread(target=self._count, args=(list(self._texts),), daemon=True)
            self._thread.start()

    def apply(self) -> None:
        """Between two steps: take a table that is ready."""
        thread = self._thread
        if thread is None or thread.is_alive():
            return
        self._thread, found, self._found = None, self._found, None
        if found is not None:
            self._take(found)
            self.num_taken += 1
            log.info("phrases: %d contexts counted from served answers", len(found.hash_E))

    def wait(self, timeout: float) -> None:
        """Until a counting that runs is over."""
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self.wait(5.0)

    def _count(self, texts: list[tuple[np.ndarray, int]]) -> None:
        """In a thread that only waits: the work is another process's."""
        stored = io.BytesIO()
        np.savez(
            stored,
            tokens=np.concatenate([tokens for tokens, _ in texts]),
            offset=np.cumsum([0, *(len(tokens) for tokens, _ in texts)]),
            prompt_len=np.array([num_prompt for _, num_prompt in texts]),
            vocab_size=self._vocab_size,
        )
        command = [sys.executable, "-m", _COUNTER]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            data, words = self._process.communicate(stored.getvalue(), timeout=_TIMEOUT)
            if self._process.returncode:
                lines = words.decode(errors="replace").strip().splitlines()
                log.warning("phrases could not be counted: %s", lines[-1] if lines else "killed")
                return
            self._found = load_phrases(data, self._vocab_size)
        except subprocess.TimeoutExpired:
            assert self._process is not None
            self._process.kill()
            log.warning("phrases could not be counted in %.0f seconds", _TIMEOUT)
        except (OSError, HunchError) as error:
            log.warning("phrases could not be counted: %s", error)


def adapter_for(options: Mapping[str, str], runner: Any) -> PhraseAdapter | None:
    """The adapter that `adapt=true` asks for; None: nobody did, or the drafter takes no phrases."""
    if options.get("adapt", "").lower() not in ("true", "1", "yes", "on"):
        return None
    if not hasattr(runner.drafter, "take_phrases"):
        say_once("adapt: phrases are counted for lookups alone; nothing is adapted here")
        return None
    return PhraseAdapter(runner.drafter.take_phrases, runner.target.spec.vocab_size)
