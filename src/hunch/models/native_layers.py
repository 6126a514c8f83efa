"""A file's layers in the form of the CPU's own kernels: as the file has them, or rounded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.experts import SCORES
from hunch.kernels.native_matrix import FLOAT, NativeMatrix
from hunch.kernels.native_structs import (
    MATRICES,
    ExpertsStruct,
    InputsStruct,
    LatentStruct,
    LayerStruct,
    NativePart,
    activation_number,
)
from hunch.layers.latent import LatentShape
from hunch.layers.rope import Rope
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, router_weight
from hunch.models.latent import NORM_EPS as LATENT_EPS
from hunch.models.native_reader import Reader
from hunch.models.native_recurrent import native_recurrent
from hunch.models.spec import ModelSpec


def build_native_layer(
    spec: ModelSpec, reader: Reader, prefix: str, names: Names, layer: int, ropes: list[Rope]
) -> NativePart:
    model, spec = spec, spec.at(layer)
    rope = ropes[spec.rope_index(layer)] if ropes else None
    has_experts = spec.experts is not None and spec.experts.layers[layer]
    is_reader, is_recurrent = spec.is_reader(layer), spec.recurs(layer)
    is_beside = spec.experts is not None and spec.experts.is_beside and has_experts
    has_mlp = spec.has_mlp(layer) and not (has_experts and not is_beside)
    attends = spec.has_mixer(layer) and (spec.attends_too or not is_recurrent)
    where = _matrices(spec, prefix, names, has_mlp=has_mlp, attends=attends)
    if is_recurrent and not attends:
        where["out"] = f"{prefix}{names.recurrent}out_proj"
    where = {name: path for name, path in where.items() if not is_reader or name not in ("k", "v")}
    norms = _norms(spec, prefix, names)
    has_norms = spec.has_qk_norm and not is_recurrent
    mixer, place = prefix + names.recurrent, spec.place_of(layer)
    num_before = spec.kv_shapes(1)[0][0]  # layers of the cache before those of other heads

    def norm(name: str) -> Tensor:
        return reader.tensor(f"{prefix}{name}.weight") if name else torch.ones(spec.head_dim)

    parts: dict[str, Any] = {name: reader.matrix(f"{path}.weight") for name, path in where.items()}
    parts |= {name: reader.norm(path, spec) for name, path in norms.items()}
    return NativePart(
        LayerStruct,
        **parts,
        **_biases(spec, reader, where, norms, is_recurrent=is_recurrent),
        experts=_experts(spec, reader, prefix, names.experts) if has_experts else None,
        recurrent=native_recurrent(spec, reader, mixer, place) if is_recurrent else None,
        latent=_latent(spec, spec.latent, reader, prefix) if spec.latent else None,
        place=place - (num_before if spec.has_other_heads(layer) else 0),
        q_norm=norm(names.q_norm) if has_norms else None,
        k_norm=norm(names.k_norm) if has_norms and not is_reader else None,
        v_norm=torch.ones(spec.head_dim) if spec.has_v_norm and not is_reader else None,
        sinks=reader.tensor(prefix + names.sinks) if spec.has_sinks else None,
        rope=None if rope is None else rope.table_LH,
        temper=None if rope is None else rope.temper_L,
        window=spec.windows[layer] or 0,
        inputs=_inputs(spec, reader, prefix, names),
        stream_scale=float(reader.tensor(prefix + names.scale)) if spec.has_layer_scale else 1.0,
        is_reader=is_reader,
        is_other=spec.has_other_heads(layer),
        ffn_width=spec.ffn_width if spec.ffn_width != model.ffn_width else 0,
        experts_norm=norm(names.experts.norm) if is_beside else None,
        experts_out_norm=norm(names.experts.out_norm) if is_beside else None,
        beside_norm=norm(names.experts.mlp_out_norm) if is_beside else None,
    )


def has_norm_bias(spec: ModelSpec) -> bool:
    return spec.norm == "layer" and spec.has_norm_bias and spec.has_norm_weight


def _norms(spec: ModelSpec, prefix: str, names: Names) -> dict[str, str]:
    """The names in the file of a layer's norms."""
    norms = {"attn_norm": spec.has_input_norms}
    norms["mlp_norm"] = spec.has_input_norms and spec.has_mlp_norm
    norms |= dict.fromkeys(("attn_out_norm", "mlp_out_norm"), spec.has_branch_norms)
    return {name: prefix + getattr(names, name) for name, is_there in norms.items() if is_there}


def _biases(
    spec: ModelSpec,
    reader: Reader,
    where: dict[str, str],
    norms: dict[str, str],
    *,
    is_recurrent: bool,
) -> dict[str, Tensor]:
    """The biases of its matrices and norms, under the kernels' names for them."""
    has_bias = dict.fromkeys(("q", "k", "v", "attn_gate"), spec.has_qkv_bias)
    has_bias["out"] = spec.has_out_bias and not is_recurrent
    has_bias |= dict.fromkeys(("gate", "up", "down"), spec.has_mlp_bias)
    has_bias |= dict.fromkeys(norms, has_norm_bias(spec))
    paths = {name: path for name, path in (where | norms).items() if has_bias[name]}
    return {f"{name}_bias": reader.tensor(f"{path}.bias") for name, path in paths.items()}


def _inputs(spec: ModelSpec, reader: Reader, prefix: str, names: Names) -> NativePart | None:
    if spec.inputs is None:
        return None
    return NativePart(
        InputsStruct,
        gate=reader.matrix(f"{prefix}{names.input_gate}.weight"),
        project=reader.matrix(f"{prefix}{names.input_project}.weight"),
        norm=reader.tensor(f"{prefix}{names.input_norm}.weight"),
    )


def build_native_table(spec: ModelSpec, reader: Reader, names: Names) -> dict[str, Any]:
    """The table that layers read beside the stream, as values of NetworkStruct."""
    if spec.inputs is None:
        return {}
    return {
        "table_width": spec.inputs.width,
        "table_scale": spec.inputs.width**0.5,
        "input_table": reader.matrix(names.table, is_table=True),
        "input_project": reader.matrix(f"{names.table_project}.weight"),
        "input_norm": reader.tensor(f"{names.table_norm}.weight"),
    }


def _matrices(
    spec: ModelSpec, prefix: str, names: Names, *, has_mlp: bool, attends: bool
) -> dict[str, str]:
    """The names in the file of a layer's attention and MLP matrices, if it has them."""
    absent = set() if has_mlp else {"gate", "up", "down"}
    absent |= {"q", "k", "v"} if spec.latent else set()
    absent |= set() if attends else {"q", "k", "v", "out"}
    absent |= set() if spec.is_gated else {"gate"}
    where = {n: prefix + getattr(names, n) for n in MATRICES if n not in absent}
    if attends and spec.has_attn_gate:
        where["attn_gate"] = prefix + names.attn_gate
    return where


def _latent(spec: ModelSpec, shape: LatentShape, reader: Reader, prefix: str) -> NativePart:
    prefix = f"{prefix}self_attn."
    has_bias, is_narrow = spec.has_qkv_bias, shape.q_latent_dim is not None
    names = {"q": "q_b_proj" if is_narrow else "q_proj", "kv": "kv_a_proj_with_mqa"}
    matrices = {part: reader.matrix(f"{prefix}{name}.weight") for part, name in names.items()}
    q_norm = q_bias = q_down = None
    if is_narrow:
        q_down = reader.matrix(f"{prefix}q_a_proj.weight")
        q_norm = reader.tensor(f"{prefix}q_a_layernorm.weight")
        q_bias = reader.tensor(f"{prefix}q_a_proj.bias") if has_bias else None
    return NativePart(
        LatentStruct,
        **matrices,
        q_down=q_down,
        k_up=reader.turned(f"{prefix}k_up.weight", spec.num_heads),
        v_up=reader.matrix(f"{prefix}v_up.weight"),
        q_norm=q_norm,
        kv_norm=reader.tensor(f"{prefix}kv_a_layernorm.weight"),
        q_bias=q_bias,
        kv_bias=reader.tensor(f"{prefix}kv_a_proj_with_mqa.bias") if has_bias else None,
        flat=shape.flat_dim,
        turned=shape.rope_dim,
        latent=shape.latent_dim,
        value=shape.value_dim,
        norm_eps=LATENT_EPS,
    )


def _experts(spec: ModelSpec, reader: Reader, prefix: str, names: ExpertNames) -> NativePart:
    experts = spec.experts
    assert experts is not None
    count, shared = experts.routing.num_experts, prefix + names.shared

    def stack(*paths: str) -> NativeMatrix:
        return reader.stack([f"{path}.weight" for path in paths])

    found: dict[str, Any] = {}
    if experts.has_router_bias:
        found["router_bias"] = reader.tensor(f"{prefix}{names.router}.bias")
    if experts.has_choice_bias:
        found["choice_bias"] = reader.tensor(prefix + names.choice_bias)
    router = reader.tensor(f"{prefix}{names.router}.weight")
    if experts.is_beside:
        router = router_weight(router, reader.tensor(prefix + names.router_scale))
        found["factor"] = reader.tensor(prefix + names.factor)
    if experts.shared_width:
        found["shared_up"] = stack(shared + names.shared_first, f"{shared}up_proj")
        found["shared_down"] = reader.matrix(f"{shared}down_proj.weight")
    if experts.is_shared_gated:
        found["shared_gate"] = reader.floats(f"{prefix}{names.shared_gate}.weight")
    up = [prefix + n.format(e) for e in range(count) for n in (names.gate, names.up)]
    down = [prefix + names.down.format(e) for e in range(count)]
    if experts.has_bias:
        found["up_bias"] = torch.cat([reader.tensor(f"{path}.bias") for path in up])
        found["down_bias"] = torch.cat([reader.tensor(f"{path}.bias") for path in down])
    routing = asdict(experts.routing)
    routing["scores"] = SCORES.index(experts.routing.scores)
    return NativePart(
        ExpertsStruct,
        **routing,
        width=experts.width,
        activation=activation_number(spec.activation),
        router=NativeMatrix.from_floats(router, FLOAT, reader.num_threads),
        up=stack(*up),
        down=stack(*down),
        shared_width=experts.shared_width,
        **found,
    )
