"""Put a runner together: drafter, KV groups over the same blocks, capacity, verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from hunch.config import Config, say_once
from hunch.draft import KVShape, Needs
from hunch.drafting.auto import load_drafter
from hunch.drafting.base import DrafterContext
from hunch.drafting.costs import CostCurve
from hunch.errors import ConfigError
from hunch.kernels.recurrence import RecurrentStates
from hunch.models.load_target import exactness
from hunch.models.target import OverProcesses, Target
from hunch.registry import VERIFIERS, resolve
from hunch.sampling.state import SamplingState
from hunch.step.calibrate import calibrate
from hunch.step.kv_cache import (
    allocate,
    allocate_states,
    bytes_per_slot,
    count_blocks,
    working_bytes,
)
from hunch.step.parts import RunnerParts
from hunch.step.runner import Runner
from hunch.types import Capacity, GroupInfo, TextCodec
from hunch.verify.base import Verifier

LEAST_SNAPSHOTS = 4


def assemble(
    config: Config,
    target: Target,
    device: torch.device,
    vocab: Callable[[], dict[str, int]] | None,
    codec: TextCodec | None = None,
    load_codec: Callable[[str], TextCodec] | None = None,
) -> Runner:
    """A runner for a loaded target; the drafter says by its needs what it must be given."""
    schedule, spec = config.schedule, config.spec
    captures = target.backend.captures_steps
    sampling = SamplingState(
        schedule.num_rows, target.spec.vocab_size, device, dense=captures or None
    )
    verify: Verifier = resolve(VERIFIERS, spec.verifier)
    context = _context(config, target, sampling, vocab, codec, load_codec)
    context.wants_q = verify.wants_q
    context.draft_device = _draft_device(spec.device, target)
    drafter = load_drafter(spec, context)
    shapes, groups = _groups(target, drafter.needs, spec.method)
    num_snapshots = _num_snapshots(config)
    states = _states(target, schedule.num_rows, num_snapshots, drafter.needs.max_nodes)
    capacity = replace(
        _capacity(config, context, drafter.needs, shapes),
        groups=tuple(groups),
        has_recurrent_states=states is not None,
        num_snapshots=num_snapshots if states is not None else 0,
    )
    places = zip(shapes, (device, context.draft_device or device), strict=False)
    sizes = capacity.num_blocks, capacity.block_size
    kv = [allocate(shape, *sizes, place) for shape, place in places]
    kv[0].states = states
    if drafter.needs.kv is not None:
        for one in filter(None, (context, context.beside)):
            one.kv, one.group = kv[1], 1
    parts = RunnerParts(
        capacity=capacity,
        target=target,
        kv=kv,
        drafter=drafter,
        verify=verify,
        sampling=sampling,
        scores_processed=config.model.logprobs_mode == "processed_logprobs",
        cost=context.cost,
        prepares=context.prepares,
    )
    depth = _depth(schedule.depth, capacity.max_under_way, captures)
    runner = Runner(parts, depth=depth, captures=captures)
    if runner.is_host_drafting and runner.cost.is_measured:
        calibrate(runner)
    return runner


def _capacity(
    config: Config, context: DrafterContext, needs: Needs, shapes: list[KVShape]
) -> Capacity:
    """How much the engine can hold, and what a request may ask for."""
    target, block_size, is_beside = context.target, config.cache.block_size, needs.kv is not None
    here = shapes if context.draft_device in (None, target.device) else shapes[:1]
    num_blocks = _count_blocks(config, target, here, context.max_len, needs.max_nodes)
    slot_bytes = bytes_per_slot(shapes[1:])
    return Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        max_rows=config.schedule.num_rows,
        max_len=context.max_len,
        max_nodes=needs.max_nodes,
        vocab_size=target.spec.vocab_size,
        window=None if is_beside else target.spec.widest_window,
        kernels=target.backend.name,
        exact=exactness(target),
        activation_bits=target.activation_bits,
        methods=needs.methods or {config.spec.method: needs.max_nodes},
        drafter_bytes=needs.weight_bytes + slot_bytes * num_blocks * block_size,
        max_under_way=target.max_under_way if isinstance(target, OverProcesses) else 1,
    )


def _draft_device(asked: str | None, target: Target) -> torch.device | None:
    """Where draft models are; None: where the target is."""
    if asked is None:
        return None
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ConfigError(f"speculative_device={asked!r}: cpu, or cuda:0, cuda:1, ...") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"speculative_device={asked!r}: cpu, or cuda:0, cuda:1, ...")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    device = torch.device("cuda", device.index or 0)
    if device.index >= count:
        raise ConfigError(f"speculative_device={asked!r}: this machine has {count} GPUs")
    if target.device.type == "cuda" and (target.device.index or 0) == device.index:
        raise ConfigError(
            f"speculative_device={asked!r} is the target's own: leave it out, drafting is then a "
            "part of captured steps"
        )
    return device


def _depth(asked: int | None, max_under_way: int, captures: bool) -> int:
    """How many steps are launched before a result is read: one, or one per pipeline stage."""
    if max_under_way > 1:
        return max_under_way - 1
    return int(captures) if asked is None else asked


def _context(
    config: Config,
    target: Target,
    sampling: SamplingState,
    vocab: Callable[[], dict[str, int]] | None,
    codec: TextCodec | None,
    load_codec: Callable[[str], TextCodec] | None,
) -> DrafterContext:
    return DrafterContext(
        target=target,
        sampling=sampling,
        cost=CostCurve(0.0, is_measured=False) if config.spec.always else CostCurve(),
        device=target.device,
        max_rows=config.schedule.num_rows,
        max_len=_max_len(config, target.spec.max_len),
        vocab_size=target.spec.vocab_size,
        block_size=config.cache.block_size,
        vocab=vocab,
        codec=codec,
        load_codec=load_codec,
    )


def _count_blocks(
    config: Config, target: Target, shapes: list[KVShape], max_len: int, max_nodes: int
) -> int:
    schedule, device, working = config.schedule, target.device, 0
    if config.cache.kv_bytes is None and config.cache.num_blocks is None:
        working = working_bytes(target, schedule.num_tokens, schedule.num_rows, max_len, max_nodes)
    sharing = config.parallel.num_ranks if device.type == "cpu" else 1
    if isinstance(target, OverProcesses):
        shapes = [replace(shapes[0], num_layers=target.most_kv_layers), *shapes[1:]]
    return count_blocks(config, shapes, max_len, max_nodes, device, working, sharing)


def _num_snapshots(config: Config) -> int:
    """How many recurrent states to keep for prompts that begin alike.

    None with pipeline stages: when the last stage could keep a state, the first has moved on.
    """
    if not config.cache.enable_prefix_caching or config.parallel.pipeline_parallel_size > 1:
        return 0
    return max(LEAST_SNAPSHOTS, config.schedule.num_rows // 4)


def _states(
    target: Target, num_rows: int, num_snapshots: int, max_nodes: int
) -> RecurrentStates | None:
    """Recurrent states: those of the rows, then the snapshots."""
    shape = target.states_of(num_rows + num_snapshots, max_nodes)
    if shape is not None:
        words = f"up to {num_snapshots} prefixes" if num_snapshots else "no prefixes"
        say_once(f"this model has recurrent layers: only chains are drafted, {words} are cached")
    return allocate_states(shape, target.dtype, target.device)


def _groups(target: Target, needs: Needs, method: str) -> tuple[list[KVShape], list[GroupInfo]]:
    is_shared = target.spec.latent is not None
    shape = KVShape.of(target.kv_shapes(), target.kv_dtype, is_shared)
    if needs.kv is None:
        return [shape], [GroupInfo(name="target")]
    return [shape, needs.kv], [GroupInfo(name="target"), needs.group or GroupInfo(name=method)]


def _max_len(config: Config, own: int) -> int:
    asked = config.model.max_model_len
    if asked is None:
        return own
    if asked > own:
        raise ConfigError(f"max_model_len={asked} is more than the model's context of {own}")
    return asked
