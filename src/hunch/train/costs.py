"""What drafting costs beside a target on this device: a few products and passes, timed.

A pass of the target is timed for several numbers of rows. A drafted node is timed in five drafts
that are cut from the target. That gives the cost of a layer, of its MLP's units, of another layer
beside it, of a thousand columns, and of the rest. If no draft can be cut from the target, a layer
is assumed to cost what the target's do. Nothing here knows a model by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, Span
from hunch.models.heads.draft_model import CUT_FROM, DRAFTS_FOR
from hunch.models.load import MadeWeights, spec_of
from hunch.models.spec import ModelSpec
from hunch.models.target import Target
from hunch.models.weights import Weights
from hunch.registry import MODELS, resolve
from hunch.step.capture import Graph, new_pool, seconds_of
from hunch.train.cut import can_lose_units, not_abreast, side_by_side, with_units
from hunch.train.kept import MEMORY_SHARE
from hunch.train.student import unlike_llama

ROWS = (1, 2, 3, 5, 8, 12)
MORE_ROWS = (16, 32, 64)  # those of trees, which only a GPU checks
_FEW, _MANY = 4096, 32768  # columns of the timed drafts
_ABREAST = 4  # layers side by side, in the timed draft that has several
_FEW_UNITS = 0.25  # share of the units, in the timed draft that has fewer
_ROUNDS, _SECONDS = 20, 3.0  # of timings in turn, and what all may take together
_Size = tuple[int, int, float, int]  # layers, columns, share of units, layers side by side
_PRODUCT_ROWS = {"cuda": 16384, "cpu": 256}  # of the product that measures training's speed


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds on this device, one request at a time."""

    passes: tuple[tuple[int, float], ...]  # rows of a target's pass, and what it takes
    node: float  # of a drafted node, besides layers and columns
    per_layer: float  # of each layer
    per_column: float  # of each token that it may guess
    products: float  # FLOP per second of training's products
    step: float = 0.0  # the engine's own, in every step
    per_units: float = 0.0  # of a layer, what its MLP's units cost; 0: they cannot become fewer
    per_abreast: float = 0.0  # of a layer, one more beside it; 0: none can stand there
    abreast_units: float = 0.0  # of that, what its units cost
    room: float | None = None  # bytes that the target's opinions may take; None: any number

    def of_pass(self, num_rows: int) -> float:
        """Seconds of a pass over `num_rows` rows, interpolated between the measured ones."""
        below = [point for point in self.passes if point[0] <= num_rows]
        above = [point for point in self.passes if point[0] >= num_rows]
        (low, least), (high, most) = below[-1] if below else self.passes[0], (above or below)[0]
        if not above and len(below) > 1:
            (low, least), (high, most) = below[-2:]
        if high == low:
            return least
        return least + (most - least) * (num_rows - low) / (high - low)

    def of_layer(self, units: float = 1.0, abreast: int = 1) -> float:
        """Seconds of some of the target's layers abreast, each with a share of its units."""
        fewer = 1.0 - units
        beside = self.per_abreast - fewer * self.abreast_units
        return self.per_layer - fewer * self.per_units + (abreast - 1) * beside

    def of_node(
        self, num_layers: float, num_columns: int, units: float = 1.0, abreast: int = 1
    ) -> float:
        """Seconds of a drafted node, for a network with this many of the target's layers."""
        layers = num_layers * self.of_layer(units, abreast)
        return self.node + layers + num_columns * self.per_column


@torch.inference_mode()
def measure_costs(target: Target, weights: Weights, *, seconds: float = _SECONDS) -> Costs:
    """Time the target as it serves and some drafts cut from it, in turn."""
    device, sizes = target.device, _timed_sizes(target.spec, weights, target.device)
    rows = (*ROWS, *MORE_ROWS) if device.type == "cuda" else ROWS
    bodies = [_pass_of(target, num_rows) for num_rows in rows]
    bodies += [_pass_of(cut_draft(target, weights, *size), 1) for size in sizes]
    found = timed([captured(body, device) for body in bodies], seconds)
    passes = found[: len(rows)]
    for at in reversed(range(len(rows) - 1)):  # that more rows take less is noise
        passes[at] = min(passes[at], passes[at + 1])
    node = dict(zip(sizes, found[len(rows) :], strict=True))
    return Costs(
        passes=tuple(zip(rows, passes, strict=True)),
        products=_products(target.spec, device),
        room=_room(target),
        **_parts(target, target.spec, node, passes[0]),
    )


@torch.inference_mode()
def measure_cuts(
    target: Target, weights: Weights, costs: Costs, *, seconds: float = _SECONDS
) -> Costs:
    """The same target's costs with drafts that are cut from another model."""
    spec, device = spec_of(weights), target.device
    sizes = _timed_sizes(spec, weights, device)
    bodies = [_pass_of(cut_draft(target, weights, *size, spec), 1) for size in sizes]
    found = timed([captured(body, device) for body in bodies], seconds)
    node = dict(zip(sizes, found, strict=True))
    parts = _parts(target, spec, node, costs.of_pass(1))
    return replace(costs, products=_products(spec, device), **parts)


def _timed_sizes(spec: ModelSpec, weights: Weights, device: torch.device) -> list[_Size]:
    """Layers, columns, share of units and layers side by side of each draft that is timed."""
    if spec.rope is None or any(unlike_llama(spec).values()):
        return []  # none can be cut from it
    few, many, deep = _marks(spec)
    sizes = list(dict.fromkeys([(1, few, 1.0, 1), (deep, few, 1.0, 1), (1, many, 1.0, 1)]))
    if can_lose_units(spec, weights, resolve(MODELS, spec.architecture).names):
        sizes.append((deep, few, _FEW_UNITS, 1))
        if device.type == "cuda" and not not_abreast(spec):
            sizes.append((deep, few, 1.0, _ABREAST))
    return sizes


def _marks(spec: ModelSpec) -> tuple[int, int, int]:
    """Few columns and many, and a number of layers, of the drafts that are timed."""
    few, many = min(_FEW, spec.vocab_size), min(_MANY, spec.vocab_size)
    return few, many, min(3, max(spec.num_layers - 1, 1))


def _parts(
    target: Target, spec: ModelSpec, node: dict[_Size, float], one_row: float
) -> dict[str, Any]:
    """What layers, units and columns cost of a drafted node, from drafts of several sizes."""
    few, many, deep = _marks(spec)
    each = one_row / spec.num_layers  # about the time of a layer in a pass
    base, whole = node.get((1, few, 1.0, 1), 2 * each), node.get((deep, few, 1.0, 1), 0.0)
    per_layer = max(whole - base, 0.0) / max(deep - 1, 1)
    if deep == 1 or not node:
        per_layer = min(base, each)
    per_column = max(node.get((1, many, 1.0, 1), 0.0) - base, 0.0) / max(many - few, 1)
    fewer = node.get((deep, few, _FEW_UNITS, 1), whole)
    per_units = max(whole - fewer, 0.0) / deep / (1 - _FEW_UNITS)
    wide = node.get((deep, few, 1.0, _ABREAST))
    # A product reads its weights, at most three times as fast as the target's products do.
    least = one_row / max(target.weight_bytes, 1) / 3
    least *= 1 if target.is_quantised else target.dtype.itemsize
    per_abreast = 0.0
    if wide is not None:
        per_abreast = max(wide - whole, 0.0) / deep / (_ABREAST - 1)
        per_abreast = max(per_abreast, least * layer_parameters(spec))
    of_units = unit_parameters(spec) / layer_parameters(spec)
    per_layer = max(per_layer, least * layer_parameters(spec))
    per_column = max(per_column, least * spec.width)
    return {
        "node": max(base - per_layer - few * per_column, 0.0),
        "per_layer": per_layer,
        "per_column": per_column,
        "per_units": min(per_units, per_layer * of_units),
        "per_abreast": per_abreast,
        "abreast_units": per_abreast * of_units,  # it adds no launch, only bytes
    }


def least_costs(spec: ModelSpec, target: ModelSpec | None = None) -> Costs:
    """A lower bound of all costs, known before the target is loaded: a drafted node reads its
    weights in half as many bits as the target's, and rows cost nothing. Seconds are passes of the
    target. Drafts are cut from a model of shape `spec`, by default the target."""
    share = 0.5 / num_parameters(target or spec)
    return Costs(
        passes=((1, 1.0), (ROWS[-1], 1.0)),
        node=0.0,
        per_layer=share * layer_parameters(spec),
        per_column=share * spec.width,
        products=_products(spec, torch.device("cpu")),
        per_units=share * unit_parameters(spec),
    )


def layer_parameters(spec: ModelSpec) -> int:
    """Weights of one of the target's layers."""
    heads = spec.num_heads * spec.head_dim + spec.num_kv_heads * spec.head_dim
    return 2 * spec.width * heads + unit_parameters(spec)


def unit_parameters(spec: ModelSpec) -> int:
    """Weights of its MLP."""
    return (3 if spec.is_gated else 2) * spec.width * spec.ffn_width


def num_parameters(spec: ModelSpec) -> int:
    """Weights that a pass of the target reads."""
    return spec.num_layers * layer_parameters(spec) + spec.vocab_size * spec.width


def _room(target: Target) -> float | None:
    """Bytes that training will have for the target's opinions of the texts."""
    if target.device.type != "cuda":
        return None
    memory = torch.cuda.get_device_properties(target.device).total_memory
    return MEMORY_SHARE * max(memory - target.weight_bytes, 0)


class BlankWeights(MadeWeights):
    """The tensors of a draft that is cut from a model, to time it: only their shapes matter."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        config = {**weights.config, CUT_FROM: ""}
        super().__init__(config, spec, weights.path, weights.metadata)
        self.nbytes = 0
        names = resolve(MODELS, spec.architecture).names
        for table in (names.embed, names.head):  # shared with the model
            self.shapes.pop(table, None)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(self.shapes[name], 0.01, dtype=dtype)


def cut_draft(
    target: Target,
    weights: Weights,
    num_layers: int,
    num_columns: int,
    units: float = 1.0,
    abreast: int = 1,
    other: ModelSpec | None = None,
) -> Target:
    """A draft with so many layers beside the target, as the engine would hold it: as wide as the
    target's layers, or as those of another model."""
    spec = other or target.spec
    cut = side_by_side(with_units(spec, units) if units < 1 else spec, abreast)
    cut = replace(cut, num_layers=num_layers, windows=spec.windows[:num_layers])
    stored = BlankWeights(weights, cut)
    if other is not None:
        stored.config |= {CUT_FROM: str(weights.path), DRAFTS_FOR: ""}
    ids_C = torch.arange(num_columns) if num_columns < spec.vocab_size else None
    return target.backend.load_cut(stored, cut, target, "auto", ids_C)


def _pass_of(model: Target, num_rows: int) -> Callable[[], Any]:
    """A pass over one request's next tokens, and the choice of the best token after each."""
    kv = model.new_kv(64)
    pos_T = torch.arange(num_rows, device=model.device)
    attn = AttnInputs(
        pos_T=pos_T,
        slot_T=pos_T,
        seq_T=torch.zeros_like(pos_T),
        table_SB=torch.arange(4, device=model.device)[None],
        base_T=torch.full_like(pos_T, num_rows + 1),
        tree_TP=None,
        block_size=16,
        spans=(Span(0, num_rows, 0, 0, num_rows),),
    )
    return lambda: model.logits(model.forward(pos_T, attn, kv).last_TD).argmax(-1)


def captured(body: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """The body as the engine runs it; returns the seconds of a run. On a GPU that is a captured
    graph, timed by the device. By the host's clock short runs would take longer while it compiles
    kernels, which steps do not."""
    if device.type != "cuda":
        return clocked(body)
    return partial(seconds_of, Graph(body, device, new_pool(device)), device)


def clocked(body: Callable[[], Any]) -> Callable[[], float]:
    """The body, timed: returns the seconds of a run."""

    def run() -> float:
        began = perf_counter()
        body()
        return perf_counter() - began

    return run


def timed(bodies: Sequence[Callable[[], float]], seconds: float) -> list[float]:
    """The shortest run of each, taken in turn: noise only ever adds."""
    found = [inf] * len(bodies)
    for body in bodies:
        body()  # warms caches
    ends = perf_counter() + seconds
    for _ in range(_ROUNDS):
        found = [min(least, body()) for least, body in zip(found, bodies, strict=True)]
        if perf_counter() > ends:
            break
    return found


def _products(spec: ModelSpec, device: torch.device) -> float:
    """FLOP per second of a product of training's size and this model's width."""
    num_rows = _PRODUCT_ROWS.get(device.type, _PRODUCT_ROWS["cpu"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.zeros(num_rows, spec.width, dtype=dtype, device=device)
    w = torch.zeros(4 * spec.width, spec.width, dtype=dtype, device=device)

    def body() -> None:
        torch.nn.functional.linear(x, w)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * num_rows * w.numel() / timed([clocked(body)], 0.2)[0]
