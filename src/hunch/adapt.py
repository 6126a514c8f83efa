"""Drafters learn from served answers while they are served: phrases are counted for lookups from
the first minute, and a trained network goes on learning in idle time.

Answers stay in memory, the newest of them, and go to no file. The work is another process's, of the
lowest priority, which is stopped while there are requests: one that trains for as long as there are
some, one that counts for a while. What came of it is taken between two steps. It changes what is
guessed, never what is said.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np

from hunch.config import say_once
from hunch.errors import ConfigError, HunchError
from hunch.kernels.phrases import PhraseTable, load_phrases

log = logging.getLogger("hunch")

MAX_TOKENS = 1_000_000  # of prompts and answers that are remembered
FIRST = 2_000  # tokens of answers after which phrases are counted for the first time,
NETWORK_FIRST = 20_000  # and after which a network goes on learning
NETWORK_TOKENS = 300_000  # that a network learns from at once: the newest
# Environment variables for measurements: the first replaces FIRST and NETWORK_FIRST, the
# second says how often texts are gone over.
FIRST_NAME, EPOCHS_NAME = "HUNCH_ADAPT_AFTER", "HUNCH_ADAPT_EPOCHS"
MORE = 1.5  # times as many tokens before it is done again
PAUSE = 20.0  # seconds between two countings, at least
IDLE = 0.25  # seconds without a step after which there is time for it
PATIENCE = 30.0  # seconds that counting may be kept waiting by requests: it takes about one
_LOOK = 0.02  # seconds between two looks at whether there is
_COUNTER, _TRAINER = "hunch.train.phrases", "hunch.train.go_on"  # modules that other processes run
# The lowest priority from the first import on, also among processes that have a fixed one.
_START = """
import os, runpy, sys
os.nice(19)
if hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
    os.sched_setparam(0, os.sched_param(1))
runpy.run_module(sys.argv[1], run_name="__main__")
"""

Answer = tuple[np.ndarray, int]  # tokens, and how many of them are a prompt's


class Adapter:
    """Remembers answers, and now and then has something made of them by a thread that waits."""

    what = ""  # is done, for the log
    patience = inf  # seconds for which its process may be stopped
    timeout: float | None = 600.0  # seconds that it may take

    def __init__(self, first: int, pause: float) -> None:
        self._pause = pause
        self._texts: deque[Answer] = deque()
        self._num_tokens = 0  # remembered
        self._num_seen, self._next = 0, first  # tokens of answers so far, and when it is due
        self._last = -pause
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: Thread | None = None
        self._found: Any = None
        self._is_closed = False
        self._seen = self._asked = monotonic()  # when the last step began, and the last process
        self._signals, self._is_stopped = Lock(), False
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
            self._thread = Thread(target=self._work, args=(list(self._texts),), daemon=True)
            self._thread.start()

    def apply(self) -> None:
        """Between two steps: stop what runs beside them, and take what is ready."""
        self._seen = monotonic()
        if self._process is not None and not self._is_stopped:
            self._signal(is_stopped=True)
        thread = self._thread
        if thread is None or thread.is_alive():
            return
        self._thread, found, self._found = None, self._found, None
        if found is not None:
            self._take(found)
            self.num_taken += 1

    def wait(self, timeout: float) -> None:
        """Until work that goes on is over."""
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        self._is_closed = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self.wait(5.0)

    def _work(self, texts: list[Answer]) -> None:
        """In a thread: leaves what it found."""
        raise NotImplementedError

    def _take(self, found: Any) -> None:
        raise NotImplementedError

    def _ask(self, module: str, data: bytes) -> bytes | None:
        """What another process makes of it; None, and a word in the log, where it fails."""
        if self._is_closed:
            return None
        self._process, self._is_stopped, self._asked = None, False, monotonic()
        Thread(target=self._watch, daemon=True).start()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            found, words = self._process.communicate(data, timeout=self.timeout)
        except subprocess.TimeoutExpired:
            assert self._process is not None
            self._process.kill()
            log.warning("%s in %.0f seconds", self.what, self.timeout)
            return None
        except OSError as error:
            log.warning("%s: %s", self.what, error)
            return None
        if self._is_closed:
            return None
        if self._process.returncode:
            lines = words.decode(errors="replace").strip().splitlines()
            log.warning("%s: %s", self.what, lines[-1] if lines else "killed")
            return None
        return found

    def _watch(self) -> None:
        """Let the process run while there is nothing to serve, or once it has waited enough."""
        while self._thread is not None and self._thread.is_alive():
            self._signal(is_stopped=not self._is_idle)
            if self._process is not None and self._process.poll() is not None:
                return
            sleep(_LOOK)

    def _signal(self, *, is_stopped: bool) -> None:
        with self._signals:
            process = self._process
            is_stopped = is_stopped and monotonic() - self._asked < self.patience
            if process is None or process.poll() is not None or is_stopped == self._is_stopped:
                return
            if hasattr(signal, "SIGSTOP"):
                os.kill(process.pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)
            self._is_stopped = is_stopped

    @property
    def _is_idle(self) -> bool:
        return monotonic() - self._seen > IDLE

    def _await_idle(self) -> None:
        while not (self._is_idle or self._is_closed):
            sleep(_LOOK)


def packed(texts: Sequence[Answer], vocab_size: int = 0) -> bytes:
    """Answers as another process reads them."""
    stored = io.BytesIO()
    np.savez(
        stored,
        tokens=np.concatenate([tokens for tokens, _ in texts]),
        offset=np.cumsum([0, *(len(tokens) for tokens, _ in texts)]),
        prompt_len=np.array([num_prompt for _, num_prompt in texts]),
        vocab_size=vocab_size,
    )
    return stored.getvalue()


class PhraseAdapter(Adapter):
    """Lets phrases be counted, and hands the table on."""

    what = "phrases could not be counted"
    patience = PATIENCE

    def __init__(
        self,
        take: Callable[[PhraseTable], None],
        vocab_size: int,
        *,
        first: int = FIRST,
        pause: float = PAUSE,
    ) -> None:
        super().__init__(first, pause)
        self._hand_on, self._vocab_size = take, vocab_size

    def _take(self, found: PhraseTable) -> None:
        self._hand_on(found)
        log.info("phrases: %d contexts counted from served answers", len(found.hash_E))

    def _work(self, texts: list[Answer]) -> None:
        data = self._ask(_COUNTER, packed(texts, self._vocab_size))
        try:
            self._found = None if data is None else load_phrases(data, self._vocab_size)
        except HunchError as error:
            log.warning("%s: %s", self.what, error)


class Learner(Protocol):
    """A drafter whose trained network may give way to one of its shape between two steps."""

    path: str

    def load_network(self, path: str) -> Any:
        """The network of these files, ready to be taken; may take a while."""

    def take_network(self, network: Any) -> None: ...


class NetworkAdapter(Adapter):
    """Lets a trained drafter go on learning while nothing is served, and swaps a better one in.

    Better is what has more tokens per pass on answers that were held out. A signal stops the
    process that trains at the first step of a request, and another lets it go on once there were
    no requests for a while. Beside a request it at most finishes the step it was in.
    """

    what = "the drafter could not go on learning"
    timeout = None  # it may be stopped for as long as there are requests

    def __init__(
        self,
        drafter: Learner,
        target: str,
        device: str,
        *,
        first: int = NETWORK_FIRST,
        pause: float = PAUSE,
    ) -> None:
        super().__init__(first, pause)
        self._drafter, self._target, self._device = drafter, target, device
        self._folder: TemporaryDirectory[str] | None = None
        self._path = str(drafter.path)  # of the drafter that serves
        self._num_made = 0
        self._epochs = _given(EPOCHS_NAME)

    def close(self) -> None:
        super().close()
        if self._folder is not None:
            self._folder.cleanup()

    def _work(self, texts: list[Answer]) -> None:
        newest, num_tokens = [], 0
        for tokens, num_prompt in reversed(texts):
            newest.append((tokens, num_prompt))
            num_tokens += len(tokens)
            if num_tokens >= NETWORK_TOKENS:
                break
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="hunch-adapt-")
        self._num_made += 1
        out = Path(self._folder.name) / f"drafter-{self._num_made}"
        asked: dict[str, Any] = {
            "target": self._target, "drafter": self._path, "out": str(out), "device": self._device,
        }  # fmt: skip
        asked |= {} if self._epochs is None else {"epochs": self._epochs}
        self._await_idle()
        line = json.dumps(asked).encode() + b"\n"
        data = self._ask(_TRAINER, line + packed(newest))
        if data is None:
            return
        found = json.loads(data)
        words = f"{found['before']:.2f} tokens per pass before, {found['after']:.2f} after"
        if not found["is_better"]:
            log.info("the drafter stays as it is: %s %d steps", words, found["steps"])
            return
        self._await_idle()
        self._found = self._drafter.load_network(str(out)), str(out), words

    def _take(self, found: tuple[Any, str, str]) -> None:
        network, self._path, words = found
        self._drafter.take_network(network)
        log.info("a drafter that learned from served answers drafts now: %s", words)


class Adapters:
    """Several, as one."""

    def __init__(self, several: Sequence[Adapter]) -> None:
        self.several = several

    def add(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        for one in self.several:
            one.add(prompt_ids, answer_ids)

    def apply(self) -> None:
        for one in self.several:
            one.apply()

    def close(self) -> None:
        for one in self.several:
            one.close()


def _given(name: str) -> int | None:
    """What a variable says, if it is set."""
    given = os.environ.get(name)
    if given is None:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{name}={given!r} must be a whole number, 1 or more")
    return int(given)


def adapter_for(options: Mapping[str, str], runner: Any, target: str) -> Adapters | None:
    """What `adapt=true` asks for; None: nobody did, or nothing here can learn."""
    if options.get("adapt", "").lower() not in ("true", "1", "yes", "on"):
        return None
    found: list[Adapter] = []
    drafter = runner.drafter
    after = _given(FIRST_NAME)
    first = {} if after is None else {"first": after}
    if hasattr(getattr(drafter, "lookup", drafter), "take_phrases"):
        vocab_size = runner.target.spec.vocab_size
        found.append(PhraseAdapter(drafter.take_phrases, vocab_size, **first))
    network = getattr(getattr(drafter, "network", None), "method", drafter)
    if hasattr(network, "take_network") and hasattr(signal, "SIGSTOP"):
        found.append(NetworkAdapter(network, target, runner.target.device.type, **first))
    if not found:
        say_once("adapt: neither lookups nor a network of `hunch train` draft here; nothing adapts")
        return None
    return Adapters(found)
