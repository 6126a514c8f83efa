"""The cost of requests with rules, scores, a schema, traces, predictions or drafters of their own
on a GPU, beside plain ones.

Sixteen requests at once, 128 new tokens each, the kinds in turn in every round; the median of the
rounds after one that is not counted, and its share of the free requests' speed. A rule changes the
text, and so how many guesses are right: the last column compares passes per second. Token ids must
be the same in every round; with --json they are kept, to be compared with another version's. With
--host a further round shows the host's work in a step, in microseconds: if it waits for the device,
that is the slower one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hunch import LLM, SamplingParams, Speculation
from hunch.bench.device.enlarged import enlarged
from hunch.bench.parts import PartOptions
from hunch.bench.parts.masks import ITEM
from hunch.bench.readers import read_workloads
from hunch.bench.workloads import cycle
from hunch.engine.engine import Engine
from hunch.engine.scheduler import Scheduler
from hunch.garbage import without_collector
from hunch.step.captured_step import CapturedSteps
from hunch.step.results import Download
from hunch.step.row_extras import RowExtras

NUM_REQUESTS, NUM_TOKENS = 16, 128
SCHEMA = {
    "type": "object",
    "properties": {"items": {"type": "array", "minItems": 24, "items": ITEM}},
    "required": ["items"],
    "additionalProperties": False,
}
PREDICTED = "predicted"
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
REQUESTS: dict[str, dict[str, Any]] = {
    "free": {},
    "sampled": {"temperature": 1.0, "seed": 1},
    "penalties": PENALTIES,
    "bias": {"logit_bias": {11: 1.0, 30: -2.0}, "min_tokens": 20},
    "logprobs": {"logprobs": 5},
    "schema": {"structured_outputs": {"json": SCHEMA}},
    "trace": {"speculation": Speculation(trace=True)},
    "predicted": {"prediction": PREDICTED},  # each request's own free answer, with a word changed
    "named": {"speculation": Speculation(mode="ngram")},
}


# The host's work in a step; each without those above it.
WORK: dict[str, tuple[type, str]] = {
    "waiting": (Download, "receive"),
    "grammars": (RowExtras, "adjust_result"),
    "masks": (RowExtras, "fill_masks"),
    "receiving": (CapturedSteps, "receive"),
    "launching": (CapturedSteps, "launch"),
    "results": (CapturedSteps, "apply"),
    "outputs": (Engine, "_apply"),
    "planning": (Scheduler, "plan"),
    "the rest": (Engine, "step"),
}


class HostTimes:
    """Seconds that the host spends in a step, by work."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._inside = [0.0]  # seconds of calls within the work under way, by depth
        self._step = dict.fromkeys(WORK, 0.0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Within the block, steps are timed."""
        before = {name: getattr(*place) for name, place in WORK.items()}
        for name, place in WORK.items():
            setattr(*place, self._timed(name, before[name]))
        try:
            yield
        finally:
            for name, place in WORK.items():
                setattr(*place, before[name])

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            self._inside.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                seconds = time.perf_counter() - began
                self._step[name] += seconds - self._inside.pop()
                self._inside[-1] += seconds
                if len(self._inside) == 1:
                    self.steps.append(self._step)
                    self._step = dict.fromkeys(WORK, 0.0)

        return timed

    def __str__(self) -> str:
        """Medians over all steps, in microseconds."""
        each = {name: statistics.median(step[name] for step in self.steps) for name in WORK}
        parts = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in each.items())
        busy = [sum(step.values()) - step["waiting"] for step in self.steps]
        return f"host {1e6 * statistics.median(busy):.0f} us of work a step: {parts}"


def load(target: str, method: str, max_rows: int, logprobs_mode: str = "raw_logprobs") -> LLM:
    """The default model on a GPU (`small`), or enlarged to 7B's cost (`7b`)."""
    is_small = target == "small"
    return LLM(
        "smollm2-135m",
        weights=None if is_small else enlarged("smollm2-135m", target, "cuda"),
        speculate=method,
        logprobs_mode=logprobs_mode,
        device="cuda",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max_rows,
        max_num_batched_tokens=16384,
        kv_bytes=(8 if is_small else 24) * 2**30,
        enable_prefix_caching=False,
    )


def measure(
    llm: LLM, texts: list[list[int]], num_rounds: int, names: Sequence[str] = tuple(REQUESTS)
) -> dict[str, dict[str, Any]]:
    asks = {name: asked for name, asked in REQUESTS.items() if name == "free" or name in names}
    found: dict[str, dict[str, Any]] = {name: {"rates": []} for name in asks}
    modes = ("default", *llm.engine.capacity.methods)
    for number in range(num_rounds + 1):
        for name, asked in asks.items():
            params = [_params(asked, found["free"], place) for place in range(len(texts))]
            if asked.get("speculation") and params[0].speculation.mode not in modes:
                found.pop(name, None)
                continue
            with without_collector():
                began = time.perf_counter()
                outs = llm.generate(texts, params)
                seconds = time.perf_counter() - began
            answers = [out.outputs[0] for out in outs]
            ids = [answer.token_ids for answer in answers]
            assert found[name].setdefault("ids", ids) == ids, f"{name}: another text"
            if number:
                found[name]["rates"].append(sum(map(len, ids)) / seconds)
            passes = [answer.stats["tokens_per_pass"] for answer in answers]
            found[name]["tokens_per_pass"] = statistics.mean(passes)
    return found


def host_times(llm: LLM, texts: list[list[int]], found: dict[str, dict[str, Any]]) -> None:
    """One more round of each request, with what its steps take of the host."""
    for name, figures in found.items():
        params = [_params(REQUESTS[name], found["free"], place) for place in range(len(texts))]
        times = HostTimes()
        with without_collector(), times.measured():
            llm.generate(texts, params)
        figures["host"] = str(times)


def _params(asked: dict[str, Any], free: dict[str, Any], place: int) -> SamplingParams:
    if asked.get("prediction") == PREDICTED:
        expected = list(free["ids"][place])
        expected[NUM_TOKENS // 2] = expected[0]
        asked = {"prediction": expected}
    return SamplingParams(
        **{"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS, **asked}
    )


def main(words: Sequence[str] = ()) -> None:
    options = PartOptions("requests", __doc__)
    options.add_argument(
        "--prompts", default="chat,code,summary,math", help="[FORM:]PATH or workloads"
    )
    options.add_argument("--targets", default="small,7b")
    options.add_argument("--methods", default="off,auto")
    options.add_argument(
        "--kinds", dest="requests", default=",".join(REQUESTS), help="free requests always run"
    )
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--host", action="store_true", help="what the host does in a step")
    options.add_argument("--logprobs-mode", default="raw_logprobs", help="or processed_logprobs")
    options.add_argument("--json", type=Path)
    given = options.parse_args(words)
    unknown = sorted({*given.requests.split(",")} - {*REQUESTS})
    if unknown:
        options.error(f"--kinds {','.join(unknown)}: there are {', '.join(REQUESTS)}")
    prompts = cycle(read_workloads(given.prompts, None), NUM_REQUESTS)
    kept: dict[str, Any] = {}
    for target in given.targets.split(","):
        for method in given.methods.split(","):
            llm = load(target, method, NUM_REQUESTS, given.logprobs_mode)
            texts = [prompt.encode(llm) for prompt in prompts]
            found = measure(llm, texts, given.rounds, given.requests.split(","))
            if given.host:
                host_times(llm, texts, found)
            kept[f"{target} {method}"] = found
            free = statistics.median(found["free"]["rates"])
            for name, figures in found.items():
                rate = statistics.median(figures["rates"])
                share = f"{rate / free:.2f} of free"
                passes = figures["tokens_per_pass"]
                # Another text may be guessed less often: passes of free requests against these.
                by_pass = rate / free * found["free"]["tokens_per_pass"] / passes
                print(
                    f"{target:6} {method:6} {name:10} {rate:8,.0f} tok/s  {share}  "
                    f"{passes:5.2f} tokens per pass  {by_pass:.2f} of free per pass"
                )
                if given.host:
                    print(f"       {figures['host']}")
            llm.close()
    if given.json is not None:
        given.json.write_text(json.dumps(kept))
