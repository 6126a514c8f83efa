"""How much `hunch serve --adapt` slows requests: the same ones to a server with and without it.

Both servers run from the start, and while one of them is asked the other is stopped, as a drafter
that learns takes the time in which its own server is idle. Before every request there is a pause
for it. Texts are sampled, each with a seed of its own, so that phrases learned from one answer do
not help much in the next; both servers give the same texts.

    hunch bench part adapt
    hunch bench part adapt --model MODEL --device cuda --speculate draft:PATH --epochs 1000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hunch.bench.environment import cpu_seconds, processes
from hunch.bench.parts import PartOptions
from hunch.bench.peers import Peer, post, serving
from hunch.bench.readers import read_workloads
from hunch.errors import EngineError

LEARNING, TRAINER = (
    "hunch.train.",
    "hunch.train.go_on",
)  # parts of the commands of processes that learn
AFTER_NAME, EPOCHS_NAME = "HUNCH_ADAPT_AFTER", "HUNCH_ADAPT_EPOCHS"  # read by hunch.adapt
LEAST_PAIRS = 8  # in which a drafter must have learned
ASK_SECONDS = 300.0  # that an answer may take
LEARN_SECONDS = 120.0  # until a drafter must have begun to learn


@dataclass
class Server:
    """A server in processes of its own, which can be paused and continued."""

    name: str
    url: str
    pid: int
    seconds: list[float] = field(default_factory=list)  # of each request
    texts: list[str] = field(default_factory=list)

    def ask(self, messages: list[dict[str, str]], num_tokens: int, seed: int) -> float:
        body = {
            "messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "seed": seed,
            "temperature": 0.8,
        }  # fmt: skip
        began = time.perf_counter()
        found = post(f"{self.url}/v1/chat/completions", body, ASK_SECONDS)
        seconds = time.perf_counter() - began
        self.texts.append(found["choices"][0]["message"]["content"])
        return seconds

    def signal(self, number: int) -> None:
        """Send a signal to all its processes but those that learn, which the server itself
        stops."""
        for pid in processes(self.pid):
            if LEARNING not in command_of(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""  # it has left


def trained_seconds(server: Server) -> float | None:
    """CPU seconds that training processes of a server have had; None: there is none."""
    found = [cpu_seconds(pid) for pid in processes(server.pid) if TRAINER in command_of(pid)]
    told = [seconds for seconds in found if seconds is not None]
    return sum(told) if told else None


@contextlib.contextmanager
def servers(words: Sequence[str]) -> Iterator[list[Server]]:
    """One without --adapt and one with it."""
    command = sys.executable, "-m", "hunch", "serve", *words, "--port", "{port}"
    plain, adapting = Peer("plain", command), Peer("adapt", (*command, "--adapt"))
    with serving(plain) as first, serving(adapting) as second:
        both = [Server(plain.name, *first), Server(adapting.name, *second)]
        try:
            yield both
        finally:
            for server in both:  # a paused one does not notice that it should end
                server.signal(signal.SIGCONT)


def measure(both: Sequence[Server], args: argparse.Namespace) -> tuple[float, list[str]]:
    """Ask both in turn while the drafter learns; returns CPU seconds of training in the pauses, and
    what went wrong."""
    prompts = [prompt for prompt in read_workloads(args.workload) if prompt.messages]
    chats = [prompt.chat_messages for prompt in prompts]
    adapting = both[1]
    for server in both:
        for number in range(-(-args.after // args.tokens) + 2):
            server.ask(chats[number % len(chats)], args.tokens, 10_000 + number)
    end = time.monotonic() + LEARN_SECONDS
    while not args.no_network and trained_seconds(adapting) is None:
        if time.monotonic() > end:
            return 0.0, [f"no drafter began to learn in {LEARN_SECONDS:.0f} s"]
        time.sleep(0.2)
    adapting.signal(signal.SIGSTOP)
    before = trained = trained_seconds(adapting) or 0.0
    for number in range(args.requests):
        order = both if number % 2 else both[::-1]
        for server in order:
            server.signal(signal.SIGCONT)
            time.sleep(args.pause)
            chat = chats[number % len(chats)]
            server.seconds.append(server.ask(chat, args.tokens, number))
            server.signal(signal.SIGSTOP)
        now = trained_seconds(adapting)
        if now is None and not args.no_network:
            break
        trained = now or trained
    wrong = []
    if len(adapting.seconds) < min(LEAST_PAIRS, args.requests):
        wrong.append(f"training was over after {len(adapting.seconds)} pairs; give more --epochs")
    if both[0].texts != both[1].texts:
        wrong.append("texts differ")
    return trained - before, wrong


def main(words: Sequence[str]) -> None:
    """Print a table of both servers, and the ratio of each pair of requests."""
    parser = PartOptions("adapt", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default="draft", help="what drafts, and learns")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", default="2", help="of each server")
    parser.add_argument("--requests", type=int, default=40, help="to each server")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--pause", type=float, default=0.6, help="seconds before each request")
    parser.add_argument("--after", type=int, default=600, help="tokens until learning begins")
    parser.add_argument("--epochs", type=int, help="over what was answered; a GPU needs hundreds")
    parser.add_argument("--kv-bytes", type=int, default=2**30, help="of each server")
    parser.add_argument("--workload", default="chat,code,math,summary")
    parser.add_argument("--no-network", action="store_true", help="phrases alone: nothing trains")
    args = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that both servers are closed
    given = [args.model, "--stats-interval", "0"]
    for name in ("speculate", "device", "threads", "kv_bytes"):
        given += [f"--{name}", str(getattr(args, name))]
    os.environ[AFTER_NAME] = str(args.after)  # which both servers inherit
    if args.epochs is not None:
        os.environ[EPOCHS_NAME] = str(args.epochs)
    with servers(given) as both:
        trained, wrong = measure(both, args)
    if wrong:
        raise EngineError("; ".join(wrong))
    print("| server | end to end, P50 | P95 |\n|---|---|---|")
    for server in both:
        middle, high = 1000 * np.percentile(server.seconds, [50, 95])
        print(f"| {server.name} | {middle:.0f} ms | {high:.0f} ms |")
    plain, adapting = (np.array(server.seconds) for server in both)
    ratios = adapting / plain
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    halves, tails = np.percentile(adapting, [50, 95]) / np.percentile(plain, [50, 95])
    print(
        f"\nwith --adapt a request takes {middle:.3f} times as long (quartiles {low:.3f} and "
        f"{high:.3f}; P50 {halves:.3f}, P95 {tails:.3f}); {len(ratios)} pairs, texts equal; "
        f"training had {trained:.1f} s of a core in the pauses"
    )
