"""A file's tensors in the decoder's form, however its family stores them.

Fused tensors are split, transposed ones transposed back, rows of q and k put in the order that
kernels rotate, norm weights made whole, prefixes of wrapped models dropped. All other code sees one
form.
Shape letters: V vocabulary, D width, E width of the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.kernels.delta import DeltaShape
from hunch.kernels.recurrence import Recurrence
from hunch.kernels.short_conv import ConvShape
from hunch.kernels.ssm import SsmShape
from hunch.layers.experts import ExpertSpec
from hunch.layers.latent import LatentShape
from hunch.models.build import Names, head_order_of
from hunch.models.experts import ExpertNames
from hunch.models.spec import ModelSpec, RowFactors
from hunch.models.weights.base import Packed, Rows, Weights, WeightsOver, part_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: all of one of the file's, or some of its rows."""

    name: str
    rows: Rows | None = None  # None: all
    is_transposed: bool = False
    expert: int | None = None  # of a tensor that holds all experts; rows are then of this one
    is_stack: bool = False  # a matrix per head, [head, out, in], of which all rows are wanted
    shift: float = 0.0  # added to every number
    factor_N: Tensor | None = None  # factors of the rows
    project: str | None = None  # a matrix it is multiplied with, an embedding's
    is_project_in: bool = False


class Arranged(WeightsOver):
    """`Weights` over another's, in the decoder's form."""

    def __init__(self, weights: Weights, spec: ModelSpec, names: Names) -> None:
        super().__init__(weights)
        self._places = {ours: Place(theirs) for ours, theirs in _renamed(weights, names).items()}
        self._last: tuple[str, torch.dtype, Tensor] | None = None
        self._is_transposed = spec.is_transposed
        for layer in range(spec.num_layers):
            prefix = names.layer.format(layer)
            self._arrange_layer(spec.at(layer), names, prefix)
            if spec.is_value_key and spec.is_value_key[layer]:
                self._repeat_key(names, prefix)
            if spec.experts is not None and spec.experts.layers[layer]:
                self._arrange_experts(spec.experts, names.experts, prefix)
            self._multiply(prefix, spec.row_factors)
        if spec.is_norm_shifted:
            whole = f"{names.recurrent}norm.weight"
            for name, place in self._places.items():
                if name.endswith("norm.weight") and not name.endswith(whole):
                    self._places[name] = replace(place, shift=1.0)
        if spec.embed_width:
            self._project(names)

    def _multiply(self, prefix: str, row_factors: RowFactors) -> None:
        """Multiply matrices by a config's factors here, once."""
        for name, parts in row_factors:
            place = self._places.get(f"{prefix}{name}.weight")
            if place is not None:
                factor_N = torch.cat([torch.full((count,), factor) for count, factor in parts])
                self._places[f"{prefix}{name}.weight"] = replace(place, factor_N=factor_N)

    def _arrange_layer(self, spec: ModelSpec, names: Names, prefix: str) -> None:
        sizes = (spec.num_heads * spec.head_dim, *(2 * (spec.num_kv_heads * spec.head_dim,)))
        qkv = tuple(prefix + name for name in (names.q, names.k, names.v))
        for theirs, ours in names.aliases:
            self._rename(prefix + theirs, prefix + ours)
        fused = (qkv[0], qkv[2], qkv[1]) if spec.is_qvk else qkv
        num_groups = spec.num_qkv_groups or spec.num_kv_heads
        self._split(prefix + names.qkv, fused, sizes, num_groups)
        both = (qkv[0], prefix + names.attn_gate)
        if spec.has_attn_gate and f"{both[1]}.weight" not in self._places:
            self._split(qkv[0], both, (sizes[0],) * 2, spec.num_heads)
        if spec.recurrence is not None:
            self._arrange_recurrence(spec.recurrence, prefix + names.recurrent)
        up = (prefix + names.gate, prefix + names.up)
        self._split(prefix + names.gate_up, up, (spec.ffn_width,) * 2)
        if spec.is_transposed:
            for name in (*qkv, prefix + names.out, *up, prefix + names.down):
                place = self._places.get(f"{name}.weight")
                if place is not None:
                    self._places[f"{name}.weight"] = replace(place, is_transposed=True)
        if spec.latent is not None:
            self._arrange_latent(spec, spec.latent, f"{prefix}self_attn.")
            return
        order = head_order_of(spec)
        if order is not None:
            self._order(qkv[0], order, spec.num_heads)
            self._order(qkv[1], order, spec.num_kv_heads)
            counts = {names.q_norm: spec.num_heads, names.k_norm: spec.num_kv_heads}
            for name, count in counts.items() if not spec.is_qk_norm_centred else ():
                self._order(prefix + name, order, count if spec.is_qk_norm_whole else 1)

    def _repeat_key(self, names: Names, prefix: str) -> None:
        """Values that a file leaves out, as keys are used for them."""
        for ending in ("weight", "bias"):
            key = self._places.get(f"{prefix}{names.k}.{ending}")
            if key is not None:
                self._places[f"{prefix}{names.v}.{ending}"] = key

    def _arrange_latent(self, spec: ModelSpec, shape: LatentShape, prefix: str) -> None:
        """Rotated rows in the kernels' order; a head's matrices to keys and to values apart."""
        flat, values = shape.flat_dim, shape.value_dim
        if shape.is_interleaved:
            turned = [*range(0, shape.rope_dim, 2), *range(1, shape.rope_dim, 2)]
            for first, name, num_heads in (
                (flat, "q_proj", spec.num_heads),
                (flat, "q_b_proj", spec.num_heads),
                (shape.latent_dim, "kv_a_proj_with_mqa", 1),
            ):
                order = [*range(first), *(first + row for row in turned)]
                self._order(prefix + name, order, num_heads)
        for theirs, ours, is_turned in (("k_b", "k_up", True), ("v_b", "v_up", False)):
            stack = self._places.pop(f"{prefix}{theirs}.weight", None)
            if stack is not None:
                place = Place(stack.name, is_transposed=is_turned, is_stack=True)
                self._places[f"{prefix}{ours}.weight"] = place
        both = self._places.pop(f"{prefix}kv_b_proj.weight", None)
        if both is not None:
            self._check_rows(both.name, spec.num_heads * (flat + values))
            rows = torch.arange(spec.num_heads * (flat + values)).view(spec.num_heads, -1)
            self._places[f"{prefix}k_up.weight"] = Place(both.name, rows[:, :flat].flatten())
            self._places[f"{prefix}v_up.weight"] = Place(both.name, rows[:, flat:].flatten())

    def _arrange_recurrence(self, shape: Recurrence, prefix: str) -> None:
        """Split what files fuse before a recurrent layer."""
        fused, parts = f"{prefix}in_proj", tuple(f"{prefix}in_proj_{part}" for part in "bcx")
        if isinstance(shape, DeltaShape):
            self._arrange_delta(shape, prefix)
        elif isinstance(shape, ConvShape):
            self._split(fused, parts, (shape.width,) * 3)
        elif isinstance(shape, SsmShape):
            parts = tuple(f"{prefix}in_proj_{part}" for part in ("z", "xbc", "dt"))
            sizes = (shape.value_width, shape.num_channels, shape.num_heads)
            self._split(fused, parts, sizes)

    def _arrange_delta(self, shape: DeltaShape, prefix: str) -> None:
        """Split what some files fuse by key head: q, k, v and z; b and a."""
        group = shape.num_v_heads // shape.num_k_heads
        for fused, parts, sizes in (
            ("qkvz", ("q", "k", "v", "z"), (shape.k_dim,) * 2 + (group * shape.v_dim,) * 2),
            ("ba", ("b", "a"), (group,) * 2),
        ):
            place = self._places.pop(f"{prefix}in_proj_{fused}.weight", None)
            if place is None:
                continue
            rows = torch.arange(shape.num_k_heads * sum(sizes)).view(shape.num_k_heads, -1)
            found = dict(
                zip(parts, (x.flatten() for x in rows.split_with_sizes(sizes, 1)), strict=True)
            )
            if fused == "qkvz":
                found = {"qkv": torch.cat([found[name] for name in "qkv"]), "z": found["z"]}
            for name, rows_N in found.items():
                self._places[f"{prefix}in_proj_{name}.weight"] = Place(place.name, rows_N)

    def _arrange_experts(self, experts: ExpertSpec, names: ExpertNames, prefix: str) -> None:
        """Name every expert's part of tensors that hold all experts.

        Those without ".weight" may be [expert, in, out], as gpt-oss has them. Qwen3-VL's are so in
        some files and not in others: their shape tells.
        """
        inner, all_up, all_down = experts.width, prefix + names.all_up, prefix + names.all_down
        halves: tuple[Rows, Rows] = (slice(0, inner), slice(inner, 2 * inner))
        if names.gate == names.up:
            halves = (slice(0, inner),) * 2
        elif names.is_interleaved:
            halves = (slice(0, 2 * inner, 2), slice(1, 2 * inner, 2))
        for stem, ending in ((".weight", "weight"), ("", "weight"), ("_bias", "bias")):
            up, down = (self._places.pop(name + stem, None) for name in (all_up, all_down))
            is_turned = stem == "" and names.is_turned
            if up is not None and is_turned:
                sizes = tuple(self.weights.shape(up.name))[1:]
                is_turned = sizes[0] != 2 * inner or sizes[1] == 2 * inner
            for expert in range(experts.routing.num_experts):
                paths = [
                    f"{prefix}{name.format(expert)}.{ending}"
                    for name in (names.gate, names.up, names.down)
                ]
                if up is not None:
                    for path, rows in zip(paths, halves, strict=False):
                        self._places[path] = Place(up.name, rows, is_turned, expert)
                if down is not None:
                    self._places[paths[2]] = Place(down.name, None, is_turned, expert)
        self._arrange_gguf_experts(experts, names, prefix)
        bias = self._places.get(prefix + names.choice_bias)
        if bias is not None and len(self.weights.shape(bias.name)) == 2:  # a row, as in ERNIE
            self._places[prefix + names.choice_bias] = replace(bias, expert=0)

    def _arrange_gguf_experts(self, experts: ExpertSpec, names: ExpertNames, prefix: str) -> None:
        """GGUF files hold gate, up and down of all experts in a tensor each, in every family."""
        stacks = {names.gate: "gate_proj", names.up: "up_proj", names.down: "down_proj"}
        for ending in ("weight", "bias"):
            for ours, theirs in stacks.items():
                stack = self._places.pop(f"{prefix}mlp.experts.{theirs}.{ending}", None)
                for expert in range(experts.routing.num_experts if stack else 0):
                    assert stack is not None
                    path = f"{prefix}{ours.format(expert)}.{ending}"
                    self._places[path] = Place(stack.name, expert=expert)
            router = self._places.pop(f"{prefix}mlp.gate.{ending}", None)
            if router is not None:
                self._places[f"{prefix}{names.router}.{ending}"] = router

    def _rename(self, theirs: str, ours: str) -> None:
        for ending in (".weight", ".bias", ""):
            place = self._places.pop(theirs + ending, None)
            if place is not None:
                self._places[ours + ending] = place

    def _split(
        self, fused: str, parts: tuple[str, ...], sizes: tuple[int, ...], num_groups: int = 1
    ) -> None:
        """Name the parts of a fused tensor; each of its groups has a share of all, side by side."""
        for ending in ("weight", "bias"):
            place = self._places.pop(f"{fused}.{ending}", None)
            if place is None:
                continue
            self._check_rows(place.name, sum(sizes))
            first = 0
            for part, size in zip(parts, sizes, strict=True):
                rows: Rows = slice(first, first + size)
                if num_groups > 1:
                    rows = torch.arange(sum(sizes)).view(num_groups, -1)
                    rows = rows[:, first // num_groups : (first + size) // num_groups].flatten()
                self._places[f"{part}.{ending}"] = Place(place.name, rows)
                first += size

    def _check_rows(self, name: str, num_rows: int) -> None:
        """Raise if a fused tensor has other rows than its parts together: some would be taken for
        others, or left unread."""
        if self._num_rows(name) != num_rows:
            raise ModelFormatError(
                f"tensors whose shape contradicts the config: {name} "
                f"{tuple(self.weights.shape(name))}, of which the config accounts for {num_rows} "
                "rows"
            )

    def _num_rows(self, name: str) -> int:
        return tuple(self.weights.shape(name))[-1 if self._is_transposed else 0]

    def _order(self, name: str, order: list[int], num_heads: int) -> None:
        """Every head's rows in another order."""
        for ending in ("weight", "bias"):
            place = self._places.get(f"{name}.{ending}")
            if place is None:
                continue
            head_dim = len(order)
            heads = torch.arange(num_heads)[:, None] * head_dim
            rows = (heads + torch.tensor(order)).flatten()
            if place.rows is None and len(rows) != self._num_rows(place.name):
                continue  # reading it will raise the error
            if isinstance(place.rows, slice):
                rows = rows + place.rows.start
            elif place.rows is not None:
                rows = place.rows[rows]
            self._places[f"{name}.{ending}"] = replace(place, rows=rows)

    def _project(self, names: Names) -> None:
        """Multiply an embedding that is narrower than the model with the matrix that widens it."""
        wide = {
            side: self._places.pop(f"{name}.weight", None)
            for side, name in (("in", names.project_in), ("out", names.project_out))
        }
        if wide["in"] is None or wide["out"] is None:
            raise ModelFormatError("the model's files lack the projections of its embedding")
        table = self._places[names.embed]
        head = self._places.get(names.head, table)
        self._places[names.embed] = Place(table.name, project=wide["in"].name, is_project_in=True)
        self._places[names.head] = Place(head.name, project=wide["out"].name)

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        shape = tuple(self.weights.shape(place.name))
        shape = shape if place.expert is None else shape[1:]
        if place.is_stack:
            num_heads, num_out, num_in = shape
            sizes = (num_in, num_out) if place.is_transposed else (num_out, num_in)
            return (num_heads * sizes[0], sizes[1])
        if place.is_transposed:
            shape = shape[::-1]
        if place.project is not None:
            wide = tuple(self.weights.shape(place.project))
            return (shape[0], wide[0] if place.is_project_in else wide[1])
        if place.rows is None:
            return shape
        taken = range(shape[0])[place.rows] if isinstance(place.rows, slice) else place.rows
        return (len(taken), *shape[1:])

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        place = self._place(name)
        if place.project is not None:
            table_VE = self.weights.tensor(place.name, torch.float32)
            wide = self.weights.tensor(place.project, torch.float32)
            return (table_VE @ (wide.t() if place.is_project_in else wide)).to(dtype)
        if place.shift:
            whole = self.weights.tensor(place.name, torch.float32) + place.shift
            return (whole if place.rows is None else whole[place.rows]).to(dtype)
        if place.factor_N is not None:
            rows = self._whole(replace(place, factor_N=None), torch.float32)
            rows = rows if place.rows is None else rows[place.rows]
            return (rows * place.factor_N.view(-1, *(1,) * (rows.dim() - 1))).to(dtype)
        whole = self._whole(place, dtype)
        if place.is_stack:
            return (whole.transpose(1, 2) if place.is_transposed else whole).flatten(0, 1)
        whole = whole if place.expert is None else whole[place.expert]
        whole = whole.t() if place.is_transposed else whole
        return whole if place.rows is None else whole[place.rows]

    def part(
        self, name: str, dim: int, part: tuple[int, int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """[first, last) of a dimension; read alone where the file has the tensor as it is."""
        place = self._place(name)
        if place == Place(place.name):
            return part_of(self.weights, place.name, dim, part, dtype)
        return self.tensor(name, dtype).narrow(dim, part[0], part[1] - part[0])

    def _whole(self, place: Place, dtype: torch.dtype) -> Tensor:
        """The whole tensor, read once, as its parts are asked for one after the other."""
        if place.rows is None and place.expert is None:
            return self.weights.tensor(place.name, dtype)
        if self._last is None or self._last[:2] != (place.name, dtype):
            self._last = place.name, dtype, self.weights.tensor(place.name, dtype)
        return self._last[2]

    def packed(self, name: str) -> Packed | None:
        place = self._place(name)
        is_changed = place.project is not None or place.factor_N is not None
        if place.is_transposed or place.shift or is_changed:
            return None
        packed = self.weights.packed(place.name)
        if packed is not None and place.expert is not None:
            size = self.weights.shape(place.name)[1]
            packed = packed.take(slice(place.expert * size, (place.expert + 1) * size))
        return packed if packed is None or place.rows is None else packed.take(place.rows)

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ModelFormatError(f"{self.path} has no tensor {name}")
        return self._places[name]


def _renamed(weights: Weights, names: Names) -> dict[str, str]:
    """The decoder's name of every tensor of the file."""
    found, ours = weights.names(), names.roots[0]
    first = names.embed.removeprefix(ours)
    root = next((root for root in names.roots if root + first in found), ours)
    renamed: dict[str, str] = {}
    for name in found:
        if name.startswith(root) and name != names.head:
            renamed[ours + name.removeprefix(root)] = name
        else:
            renamed[name.removeprefix("language_model.").removeprefix("thinker.")] = name
    return renamed
