"""What a GPU's host does per step and row: CPU microseconds around captured steps, without a GPU.

Engine, runner, policy and a server's messages are the real ones. The device is replaced by code
that commits tokens by a rule; its time is subtracted, and launching graphs is not in the figures. A
GPU whose step takes less time than this waits for its host.

With `stay`, requests run for the whole measurement. With `flow`, each ends after --tokens and
another takes its place; the time by which steps are longer then is shown per request. With `--loads
flow --tokens 1` there are first tokens alone, a prompt for each. CPU seconds are measured, not the
clock, so that other work on the machine matters less.

Up to three guesses of a lookup are right, whatever drafts them. So steps that always check three
nodes get as many tokens as those whose nodes the policy chooses (`suffix`, `auto`), and the
difference is the time of the choice.
"""

from __future__ import annotations

import cProfile
import pstats
import socket
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from hunch import SamplingParams
from hunch.bench.parts import PartOptions
from hunch.config import CacheConfig, Config, ModelConfig, ScheduleConfig, SpecConfig
from hunch.engine.engine import Engine
from hunch.garbage import without_collector
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.gpu_tiling import Tiler, Tiling, Workspace
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import (
    CHECKED,
    DRAFTED,
    FIRST,
    KNOWN,
    LENGTH,
    MATCHED,
    REASON,
    TOKENS,
    RowState,
    update_ref,
)
from hunch.loading import load_text
from hunch.models.backends import TRITON
from hunch.models.spec import ModelSpec
from hunch.models.target import Hidden
from hunch.server import wire
from hunch.server.engine_process import Channel, Lines, Loop
from hunch.step import upload
from hunch.step.assemble import assemble
from hunch.step.results import Columns
from hunch.step.step_graphs import StepGraphs
from hunch.step.step_kinds import StepGraph

METHODS = ("off", "suffix:num_nodes=3:adaptive=false", "suffix", "auto")
LOADS = ("stay", "flow")
MAX_LEN, WARM = 4096, 40
# What the policy is told that steps take: so long that its choices do not depend on the host.
PLAIN_NS, NODE_NS = 70_000_000, 4_000_000
MOST_RIGHT, WRONG = 3, 0  # consecutive guesses that are right; the token of a wrong one
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=1024,
    width=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    ffn_width=8,
    max_len=MAX_LEN,
)


class EmptyTarget:
    """A target that computes nothing, with all that captured steps need of one."""

    spec, backend, tables = SPEC, TRITON, None
    is_quantised, activation_bits, weight_bytes = False, None, 0
    device, dtype, kv_dtype = torch.device("cpu"), torch.float32, torch.float32

    def __init__(self) -> None:
        nothing = torch.empty(0)
        workspace = Workspace(nothing, nothing, nothing, 64, 1)
        self.tiler = Tiler(1, 1, MAX_LEN, workspace, self.device)
        self.timing = nullcontext()

    def tiling(self, spans: tuple[Span, ...], num_tokens: int) -> Tiling:
        return Tiling(None)

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        return Hidden(torch.zeros(len(ids_T), SPEC.width), ())

    def logits(self, hidden_MD: Tensor) -> Tensor:
        return torch.zeros(len(hidden_MD), SPEC.vocab_size)

    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        return ((1, 1, SPEC.head_dim),)

    def states_of(self, num_rows: int, max_nodes: int) -> None:
        return None


class EmptyDevice:
    """Commits a token for each row of a step, and some of the nodes it checks."""

    def __init__(self) -> None:
        self.seconds = 0.0  # of the CPU, in place of the device

    def capture(self, steps: StepGraphs, form: Any) -> StepGraph:
        """Replaces `StepGraphs._capture`."""
        columns = steps.columns(form)
        drafter = steps.drafter
        num_drafted = 0
        if drafter is not None and steps.drafts_at(form.num_rows) and drafter.runs_in(form.source):
            num_drafted = steps.num_guesses
        result_RC = np.zeros((form.num_rows, columns.end), dtype=np.int64)
        buffers_QW = steps.download.buffers(result_RC.size).numpy()
        inputs_3R = steps.inputs_3R.numpy()[:, : form.num_rows]

        def finish() -> None:
            began = process_time()
            commit(steps.state, inputs_3R, columns, num_drafted, result_RC)
            steps.state.clock_2[0] += 1
            line_W = buffers_QW[int(steps.state.clock_2[0]) % len(buffers_QW)]
            line_W[-1] = PLAIN_NS + NODE_NS * form.num_nodes
            line_W[: result_RC.size] = result_RC.reshape(-1)
            self.seconds += process_time() - began

        hidden = Hidden(torch.zeros(form.num_rows, SPEC.width), ())
        forward, graph, begin = (
            cast(Any, Replayed(body, hidden)) for body in (lambda: None, finish, lambda: None)
        )
        seconds = (PLAIN_NS + NODE_NS * form.num_nodes) / 1e9
        return StepGraph(form, columns, forward, graph, seconds, 0.0, begin)

    def update(self, *args: Any) -> None:
        began = process_time()
        update_ref(*args)
        self.seconds += process_time() - began

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within the block, captured steps run here."""
        graphs, kernels = cast(Any, StepGraphs), cast(Any, upload)
        captured, sent = graphs._capture, kernels.update
        graphs._capture = lambda steps, form: self.capture(steps, form)
        kernels.update = self.update
        try:
            yield
        finally:
            graphs._capture, kernels.update = captured, sent


@dataclass(frozen=True)
class Replayed:
    """Replaces a graph."""

    replay: Callable[[], None]
    outputs: Hidden | None = None


def commit(
    state: RowState,
    inputs_3R: np.ndarray,
    columns: Columns,
    num_drafted: int,
    result_RC: np.ndarray,
) -> None:
    """Change the rows' state as a step does, and write its result, by a rule instead of a model."""
    known_X, end_X = state.known_X.numpy(), state.end_X.numpy()
    done_X, nodes_X = state.is_done_X.numpy(), state.num_nodes_X.numpy()
    result_RC[:] = 0
    is_live_R = inputs_3R[0] >= 0
    is_live_R &= done_X[inputs_3R[0]] == 0
    row_R, max_checked_R, max_draft_R = inputs_3R[:, is_live_R]
    known_R, num_nodes = known_X[row_R], columns.num_tokens - 1
    checked_R = np.minimum(np.minimum(nodes_X[row_R], max_checked_R), num_nodes)
    wanted_R = 1 + np.minimum(num_right(known_R, row_R), checked_R)
    tokens_R = np.minimum(wanted_R, end_X[row_R] - known_R)
    known_X[row_R] = new_R = known_R + tokens_R
    is_over_R = new_R >= end_X[row_R]
    done_X[row_R], nodes_X[row_R] = is_over_R, np.minimum(max_draft_R, num_drafted)
    line_RC = np.zeros_like(result_RC[is_live_R])
    line_RC[:, TOKENS], line_RC[:, REASON] = tokens_R, is_over_R * LENGTH
    line_RC[:, CHECKED], line_RC[:, MATCHED] = checked_R, 3
    line_RC[:, DRAFTED], line_RC[:, KNOWN] = nodes_X[row_R], new_R
    guesses_at = FIRST + columns.num_tokens
    line_RC[:, FIRST:guesses_at] = text_at(known_R[:, None] + np.arange(columns.num_tokens))
    place_G = np.arange(columns.num_guesses)
    is_right_RG = place_G < num_right(new_R, row_R)[:, None]
    guess_RG = np.where(is_right_RG, text_at(new_R[:, None] + place_G), WRONG)
    line_RC[:, guesses_at : columns.draft] = guess_RG
    result_RC[is_live_R] = line_RC


def text_at(position: np.ndarray) -> np.ndarray:
    """The tokens at these positions, in every row."""
    return np.asarray(500 + position % 500)


def num_right(known_R: np.ndarray, row_R: np.ndarray) -> np.ndarray:
    """The number of right guesses of a lookup after this many tokens."""
    return np.asarray((known_R * 40503 + row_R * 9973 >> 8) % (MOST_RIGHT + 1))


class Traffic:
    """An engine as a server drives it, and a number of requests that are always running."""

    def __init__(self, method: str, num_rows: int, device: EmptyDevice) -> None:
        config = Config(
            model=ModelConfig(max_model_len=MAX_LEN),
            cache=CacheConfig(num_blocks=num_rows * MAX_LEN // 16),
            schedule=ScheduleConfig(max_num_seqs=num_rows).for_gpu(),
            spec=SpecConfig.parse(method),
        )
        runner = assemble(config, cast(Any, EmptyTarget()), torch.device("cpu"), None)
        self.num_rows, self.device = num_rows, device
        ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._channel = Channel(ours)
        self.loop = Loop(Engine(config, runner, load_text(config)), Lines([self._channel]))
        self.num_came = 0  # requests so far

    def submit(self, num_prompt: int, num_tokens: int) -> None:
        """Submit another request, as the HTTP process sends it."""
        began, number = process_time(), self.num_came
        self.num_came += 1
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        message = {
            "op": "submit",
            "id": str(number),
            "prompt_ids": [(number * 31 + place) % 1000 for place in range(num_prompt)],
            "params": wire.dump_params(params),
            "options": {"handle": number},
        }
        self.device.seconds += process_time() - began
        self.loop._obey(self._channel, message)

    def step(self) -> None:
        """Run a step, and what the engine's process does before the next one."""
        self.loop.lines.receive(0.0)
        self.loop._step()
        began = process_time()
        self._read()
        self.device.seconds += process_time() - began

    def _read(self) -> None:
        """Take what the engine's process has sent, if anything."""
        with suppress(BlockingIOError):
            self._theirs.recv(1 << 20)

    def stop(self) -> None:
        """End the running requests."""
        for request_id in list(self.loop.open):
            self.loop._abort(request_id)
        while self.loop.engine.has_work():
            self.loop._step()
            self._read()

    def close(self) -> None:
        lines = self.loop.lines
        for one in (self._channel.sock, self._theirs, lines._bell, lines._button):
            one.close()
        self.loop.engine.close()

    def seconds(self, num_steps: int, num_prompt: int, num_tokens: int) -> float:
        """CPU seconds of so many steps, without those in place of the device."""
        began, device = process_time(), self.device.seconds
        for _ in range(num_steps):
            for _ in range(self.num_rows - len(self.loop.open)):
                self.submit(num_prompt, num_tokens)
            self.step()
        return process_time() - began - (self.device.seconds - device)


class Figures(NamedTuple):
    step: float  # microseconds of the host per step
    num_came: float  # requests that came, per step


def measure(traffic: Traffic, load: str, given: Namespace) -> Figures:
    most = MAX_LEN - given.prompt
    for row in range(traffic.num_rows):  # the ends of requests that flow are spread evenly
        share = given.tokens * (row + 1) // traffic.num_rows + 1
        traffic.submit(given.prompt, share if load == "flow" else most)
    num_tokens = given.tokens if load == "flow" else most
    traffic.seconds(WARM, given.prompt, num_tokens)
    num_before = traffic.num_came
    profiler = cProfile.Profile() if given.profile else nullcontext()
    with without_collector(), profiler:
        rounds = [
            traffic.seconds(given.steps, given.prompt, num_tokens) for _ in range(given.rounds)
        ]
    if isinstance(profiler, cProfile.Profile):
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    num_came = traffic.num_came - num_before
    traffic.stop()
    return Figures(1e6 * median(rounds) / given.steps, num_came / (given.rounds * given.steps))


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("host", __doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 24, 64])
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer that ends")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args(words)
    device = EmptyDevice()
    with device.used():
        for method in given.methods.split(","):
            for num_rows in given.rows:
                traffic = Traffic(method, num_rows, device)
                found = {load: measure(traffic, load, given) for load in given.loads.split(",")}
                for load, (step, num_came) in found.items():
                    line = f"{method:34} {num_rows:4} rows  {load:5} {step:7.0f} us per step"
                    if num_came and "stay" in found:
                        each = (step - found["stay"].step) / num_came
                        line += f"  {each:7.0f} us per request, {num_came:.2f} of them per step"
                    print(line, flush=True)
                traffic.close()
