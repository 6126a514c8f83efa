"""Latent attention from a config and a source of tensors: shared by every family that has it.

Shape letters: N heads, P width of a head's part without a position, V width of its values, C width
of the latent.
"""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import UnsupportedModelError
from hunch.layers.attention import Heads
from hunch.layers.latent import HeadLinear, LatentAttention, LatentBlock, LatentShape
from hunch.layers.rope import stretch
from hunch.models.build import Names, build_mlp, build_rms_norms
from hunch.models.keys import read_common
from hunch.models.reading import Config, Defaulted, read_count, read_int, read_rope
from hunch.models.source import Source
from hunch.models.spec import ModelSpec
from hunch.parallel.group import Share, head_spans

NORM_EPS = 1e-6  # of the norms inside, whatever the config has for the others
_SCALES = ("mscale", "mscale_all_dim")  # read here; reading.py knows yarn without them


def read_latent(config: Config, architecture: str) -> ModelSpec:
    """Latent attention as one KV head, as wide as the latent and the rotated part of the key."""
    latent, rope_dim = (read_int(config, key) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    flat = read_int(config, "qk_nope_head_dim")
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    plain = {key: value for key, value in given.items() if key not in _SCALES}
    changed = {
        "head_dim": latent + rope_dim,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": plain.get("rope_theta", config.get("rope_theta")),
    }
    common = read_common(Defaulted(changed, config), architecture)
    common["rope"] = rope = read_rope(Defaulted(changed, config), rope_dim, plain)
    scale = (flat + rope_dim) ** -0.5
    if rope.rope_type == "proportional":
        raise UnsupportedModelError("rope_type 'proportional' is not supported with latents")
    every = float(given.get("mscale_all_dim") or 0.0)
    if rope.rope_type == "yarn" and every:
        scale *= stretch(rope.factor, every) ** 2
        if given.get("mscale"):
            ratio = stretch(rope.factor, float(given["mscale"])) / stretch(rope.factor, every)
            common["rope"] = replace(rope, attention_factor=ratio)
    config.get("qk_head_dim")  # the sum of two others
    shape = LatentShape(
        flat_dim=flat,
        rope_dim=rope_dim,
        value_dim=read_int(config, "v_head_dim"),
        latent_dim=latent,
        q_latent_dim=read_count(config, "q_lora_rank") or None,
        scale=scale,
        is_interleaved=bool(config.get("rope_interleave", True)),
    )
    return ModelSpec(**common, latent=shape, attn_scale=scale)


def build_latent_block(
    spec: ModelSpec, source: Source, prefix: str, layer: int, names: Names
) -> LatentBlock:
    """A layer of a target; arrange.py has ordered the rows that are rotated."""
    attn_norm, mlp_norm = build_rms_norms(spec, source, prefix, names)
    attn = _attention(spec, source, prefix, layer)
    mlp = build_mlp(spec, source, prefix, layer, names=names)
    return LatentBlock(attn_norm, attn, mlp_norm, mlp, spec.residual_scale)


def _attention(spec: ModelSpec, source: Source, prefix: str, layer: int) -> LatentAttention:
    shape = spec.latent
    assert shape is not None
    prefix, heads, width, bias = (
        f"{prefix}self_attn.",
        spec.num_heads,
        spec.width,
        spec.has_qkv_bias,
    )
    per_head, rank = shape.flat_dim + shape.rope_dim, shape.q_latent_dim
    first, last = head_spans(heads, 1, source.group)[0]  # every rank has the latent of all

    def part(size: int) -> Share:
        return first * size, last * size

    def by_head(name: str, size: int) -> HeadLinear:
        sizes = (heads * size, shape.latent_dim)
        layer = HeadLinear(source.take(f"{prefix}{name}.weight", *sizes, split=0, part=part(size)))
        layer.is_exact = True
        return layer

    down, q_norm = {"kv_a_proj_with_mqa": shape.latent_dim + shape.rope_dim}, None
    if rank is not None:
        down = {"q_a_proj": rank} | down
        q_norm = source.rms_norm(f"{prefix}q_a_layernorm", rank, NORM_EPS)
    paths, sizes = tuple(prefix + name for name in down), tuple(down.values())
    q_name, values = "q_proj" if rank is None else "q_b_proj", shape.value_dim
    return LatentAttention(
        source.linear(paths, sizes, width, has_bias=bias, is_split=False),
        source.linear(
            (prefix + q_name,), (heads * per_head,), rank or width, parts=(part(per_head),)
        ),
        q_norm,
        source.rms_norm(f"{prefix}kv_a_layernorm", shape.latent_dim, NORM_EPS),
        by_head("k_up", shape.flat_dim),
        by_head("v_up", values),
        source.row_linear(
            f"{prefix}o_proj", width, heads * values, has_bias=bias, part=part(values)
        ),
        Heads(num_heads=last - first, num_kv_heads=1, head_dim=spec.head_dim, scale=shape.scale),
        spec.place_of(layer),
    )
