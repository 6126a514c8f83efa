"""One measurement, from a user's options to a complete report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from hunch import LLM
from hunch.bench import environment
from hunch.bench.energy import EnergyMeter
from hunch.bench.loads import Load, nobody
from hunch.bench.measure import Cell, OnAnswer, OnTurn, Subject, make_jobs, measure, open_report
from hunch.bench.offline import EngineSubject
from hunch.bench.readers import read_workloads
from hunch.bench.records import Report
from hunch.bench.remote import UrlSubject
from hunch.bench.workloads import Prompt, length_of, long_context
from hunch.errors import ConfigError, RequestError

FEW_TURNS, LINE_SECONDS = 40, 5.0  # of progress in a pipe
SLOW_SECONDS = 10.0  # of opening engines, after which further ones are announced
MARGIN = 16  # tokens by which an answer may get longer if it is tokenized again
GPU_KV = 8 * 2**30  # bytes each engine gets on a GPU, where several share it


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that decides what is measured; kept in the report, compared on resuming."""

    model: str
    methods: tuple[str, ...]
    workload: str = "mixed"
    limit: int | None = None
    first_turns: bool = False  # of conversations, the first question alone
    urls: tuple[str, ...] = ()  # [NAME=]http://...; instead of an engine in this process
    served_model: str | None = None
    temperatures: tuple[float, ...] = (0.0,)
    contexts: tuple[str, ...] = ()  # lengths like 2k, in place of the workload
    concurrency: tuple[int, ...] = (1,)
    rates: tuple[float, ...] = ()  # requests per second, in place of concurrency
    burstiness: float = 1.0
    seconds: float = 10.0  # of arrivals in a round of an open load
    min_requests: int = 8
    num_warmup: int = 0
    max_tokens: int = 96
    top_p: float = 1.0
    seed: int | None = 0
    ignore_eos: bool = False
    rounds: int = 3
    until_decided: bool = False  # leave out rounds that cannot decide anything about `auto`
    engine: dict[str, Any] = field(default_factory=dict)  # further arguments of LLM
    enlarge: str | None = None  # a size that the model is enlarged to, with the same text

    def settings(self) -> dict[str, Any]:
        """The settings as JSON has them, so that they are equal when read back."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def expand(
    methods: Sequence[str], lengths: Sequence[int] = (), trees: Sequence[str] = ()
) -> tuple[str, ...]:
    """Methods with each draft length and tree shape; `off` first, `auto` as it is.

    Draft lengths are fixed: the method always drafts so many, even if they do not pay.
    """
    found = ["off"]
    for method in methods:
        is_fixed = method.partition(":")[0] in ("off", "auto")
        shapes = [""] if is_fixed else [f":tree={tree}" for tree in trees] or [""]
        sizes = [""] if is_fixed else [f":num_nodes={n}:adaptive=false" for n in lengths] or [""]
        found += [method + shape + size for shape, size in product(shapes, sizes)]
    return tuple(dict.fromkeys(found))


class Session:
    """Subjects opened, prompts read, cells laid out."""

    def __init__(
        self, asked: Asked, say: Callable[[str], None], pids: Mapping[str, int] | None = None
    ) -> None:
        self.asked, self.say = asked, say
        self.pids = pids or {}  # processes of servers on this machine, by name
        self.llm: LLM | None = None
        self.subjects: list[Subject] = []
        try:
            self._open()
            self.cells = list(self._cells())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for subject in self.subjects:
            subject.close()

    def _open(self) -> None:
        asked = self.asked
        for name in asked.contexts:  # errors in these are raised before a model is loaded
            length_of(name)
        self._given = [] if asked.contexts else read_workloads(asked.workload, asked.limit)
        if asked.first_turns:
            self._given = [replace(prompt, later=()) for prompt in self._given]
        if asked.urls:
            self.subjects += _servers(asked, self.pids)
            return
        rows = None if asked.rates else max(asked.concurrency)
        # A prompt that comes again in a load must be read again, unless it is a conversation's.
        is_caching = any(prompt.conversation or prompt.later for prompt in self._given)
        arguments = {
            "max_num_seqs": rows, "enable_prefix_caching": is_caching, **asked.engine
        }  # fmt: skip
        first, *others = asked.methods
        began = monotonic()
        self.llm = LLM(
            asked.model, weights=_weights(asked), speculate=first, **_with_kv(arguments, others)
        )
        meter = EnergyMeter(_device(self.llm))
        self.subjects.append(EngineSubject(first, self.llm, meter))
        for method in others:  # one copy of the weights for all
            if monotonic() - began > SLOW_SECONDS:
                self.say(f"{len(self.subjects)} of {len(asked.methods)} engines ready")
            self.subjects.append(EngineSubject(method, self.llm.sibling(method), meter))

    def encode(self, prompt: Prompt) -> list[int]:
        assert self.llm is not None
        return prompt.encode(self.llm)

    def _cells(self) -> Iterator[Cell]:
        asked = self.asked
        loads: list[dict[str, Any]] = [{"rate": rate} for rate in asked.rates]
        loads = loads or [{"concurrency": count} for count in asked.concurrency]
        for context, temperature, axis in product(
            asked.contexts or (None,), asked.temperatures, loads
        ):
            load = Load(
                **axis, burstiness=asked.burstiness, num_warmup=asked.num_warmup,
                seed=asked.seed or 0,
            )  # fmt: skip
            prompts = self._prompts(context)
            count = load.num_requests(len(prompts), asked.seconds, asked.min_requests)
            params = {
                "max_tokens": asked.max_tokens, "temperature": temperature, "top_p": asked.top_p,
                "seed": asked.seed, "ignore_eos": asked.ignore_eos,
            }  # fmt: skip
            encode = None if self.llm is None else self.encode
            point = {**axis, "temperature": temperature}
            if context is not None:
                point["context"] = context
            yield Cell(point, load, make_jobs(prompts, encode, params, count))

    def _prompts(self, context: str | None) -> list[Prompt]:
        """The prompts that the model's context has room for; says how many have none."""
        asked, prompts = self.asked, self._given
        if context is not None:
            prompts = long_context(length_of(context))[: asked.limit]
        if self.llm is None:
            return prompts
        room = self.llm.engine.capacity.max_len
        kept = [p for p in prompts if self._longest(p) <= room]
        if not kept:
            raise RequestError(
                f"no prompt of {context or asked.workload} fits the context of {room} tokens with "
                f"{asked.max_tokens} to generate: give smaller ones or a larger --max-model-len"
            )
        if len(kept) < len(prompts):
            gone = len(prompts) - len(kept)
            self.say(f"{gone} of {len(prompts)} prompts left out: longer than {room} tokens")
        return kept

    def _longest(self, prompt: Prompt) -> int:
        """Tokens of a prompt and its answer, or of a conversation to its end."""
        num_later, most = len(prompt.later), self.asked.max_tokens
        so_far = [
            turn for question in prompt.later for turn in (("assistant", ""), ("user", question))
        ]
        whole = replace(prompt, messages=(*prompt.messages, *so_far))
        return len(self.encode(whole)) + most + num_later * (most + MARGIN)

    @property
    def num_turns(self) -> int:
        each = sum(len(cell.turns()) for cell in self.cells)
        return self.asked.rounds * len(self.subjects) * each

    def run(
        self,
        command: str,
        *,
        save: Path | None = None,
        on_turn: OnTurn = nobody,
        on_answer: OnAnswer = nobody,
    ) -> Report:
        """Measure everything that is not yet in the file `save`."""
        servers = environment.local_servers(self.asked.urls)
        watch = environment.BusyWatch({*self.pids.values(), *servers})
        report = open_report(save, Report(command, self.asked.settings(), {}))
        report.environment = environment.describe(**self._about())
        measure(
            self.subjects, self.cells, self.asked.rounds, report,
            until_decided=self.asked.until_decided, on_turn=on_turn, on_answer=on_answer, save=save,
        )  # fmt: skip
        report.environment |= watch.shares()
        if save is not None:
            report.save(save)
        return report

    def _about(self) -> dict[str, Any]:
        if self.llm is None:
            return {"servers": list(self.asked.urls)}
        import torch

        capacity = self.llm.engine.capacity
        return {
            "model": self.asked.model,
            "size": _size(self.llm),
            "enlarged_to": self.asked.enlarge,
            "dtype": self.llm.config.model.dtype,
            "device": _device(self.llm),
            "kernels": capacity.kernels,
            "activation_bits": capacity.activation_bits,
            "threads": torch.get_num_threads(),
            "max_num_seqs": capacity.max_rows,
            "max_model_len": capacity.max_len,
        }


def _size(llm: LLM) -> dict[str, float]:
    """The model as `hunch plan --from` reads it."""
    from hunch.bench.device.named import size_of

    target = llm.engine.runner.target  # type: ignore[attr-defined]
    size = size_of(target.spec, target.kv_dtype.itemsize)
    return asdict(replace(size, weight_bytes=target.weight_bytes))


def _servers(asked: Asked, pids: Mapping[str, int]) -> list[Subject]:
    subjects: list[Subject] = []
    for number, text in enumerate(asked.urls, 1):
        name, is_named, url = text.partition("=")
        if not is_named or "//" in name:
            name, url = (f"server {number}" if len(asked.urls) > 1 else "server"), text
        if not asked.methods:
            subjects.append(UrlSubject(name, url, asked.served_model, pids.get(name)))
        for method in asked.methods:  # hunch's own field, which other servers do not get
            label = method if len(asked.urls) == 1 else f"{name} {method}"
            wish = {"mode": method}
            subjects.append(UrlSubject(label, url, asked.served_model, speculation=wish))
    names = [subject.name for subject in subjects]
    if len(set(names)) < len(names):  # their answers would count as one server's
        raise ConfigError("--url: two servers have the same name; give each one of its own")
    return subjects


def _device(llm: LLM) -> str:
    return "cuda" if llm.engine.capacity.kernels == "triton" else llm.config.model.device


def _with_kv(arguments: dict[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """On a GPU every engine gets a part of the memory, as the first would take it all."""
    if others and "kv_bytes" not in arguments and arguments.get("device") in ("cuda", "auto"):
        import torch

        if torch.cuda.is_available():
            return {**arguments, "kv_bytes": GPU_KV}
    return arguments


def _weights(asked: Asked) -> Any:
    if asked.enlarge is None:
        return None
    from hunch.bench.device.enlarged import SIZES, enlarged

    if asked.enlarge not in SIZES:
        raise ConfigError(f"--enlarge {asked.enlarge!r} is not one of {', '.join(SIZES)}")
    return enlarged(asked.model, asked.enlarge, str(asked.engine.get("device", "auto")))


@contextmanager
def progress(total: int, is_quiet: bool) -> Iterator[Callable[[str, bool], None]]:
    """A bar with the time left on a terminal, a line now and then in a pipe, nothing if quiet."""
    if is_quiet:
        yield lambda label, is_old: None
        return
    if not sys.stderr.isatty():
        yield _lines(total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeLeft()
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=total)

        def advance(label: str, is_old: bool) -> None:
            bar.update(task, advance=1, description=label[:60])

        yield advance


def _lines(total: int) -> Callable[[str, bool], None]:
    """A line for every turn where there are few, else one every few seconds."""
    console, done, last = Console(stderr=True, highlight=False, width=200), 0, -LINE_SECONDS

    def line(label: str, is_old: bool) -> None:
        nonlocal done, last
        done += 1
        now = monotonic()
        if not is_old and (total <= FEW_TURNS or done == total or now - last > LINE_SECONDS):
            last = now
            console.print(f"[{done} of {total}] {label}", markup=False)

    return line
