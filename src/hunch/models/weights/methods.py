"""Published methods of quantization: from a matrix's stored tensors to its codes.

Shape letters: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.quant import Codes
from hunch.models.weights import bitsandbytes

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq", "mxfp4", "bitsandbytes")
# Methods that store checkpoints as another does: which one, by their settings.
_SAME = {
    "modelopt": ("quant_algo", {"fp8": "fp8"}),
    "auto-round": (
        "packing_format",
        {"auto_round:auto_gptq": "gptq", "auto_gptq": "gptq", "auto_round:auto_awq": "awq"},
    ),
}
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble that output j of eight has


def method_of(given: Mapping[str, Any]) -> str:
    """The method a checkpoint's settings name; raises for one that is not read."""
    method = named = str(given.get("quant_method", "unknown")).lower().removeprefix("intel/")
    if method in _SAME:
        key, known = _SAME[method]
        form = str(given.get(key, "")).lower()
        method, named = known.get(form, ""), f"{method} with {key}={form}"
    if method not in METHODS:
        raise UnsupportedModelError(
            f"quantization_config: quant_method={named!r} is not read; known are "
            f"{', '.join(METHODS)}, and GGUF files. Take one of these, or the model's plain "
            "checkpoint with --dtype int4, int8 or fp8, which rounds it while it is loaded"
        )
    return method


def _ungrouped(scale: Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> Tensor:
    """A scale for each output and group of inputs, from one for all, one per output or blocks."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(shape[0], 1)
    if scale.dim() == 1:
        return scale[:, None]
    if block is not None:
        scale = scale.repeat_interleave(block[0], dim=0)[: shape[0]]
    return scale


def _group_of(scale_NG: Tensor, num_in: int, sizes: Sequence[int], where: str) -> int:
    """Inputs of a group: of the sizes that the settings have the one that fits, else an even share.
    The last group may be smaller."""
    count = scale_NG.shape[1]
    if count == 1:
        return num_in
    for size in sizes:
        if size > 0 and -(-num_in // size) == count:
            return size
    if num_in % count:
        known = f" of {' or '.join(map(str, sizes))}" if sizes else ""
        raise ModelFormatError(f"{where}: {count} groups of scales{known} for {num_in} inputs")
    return num_in // count


def _sizes_of(settings: Mapping[str, Any]) -> list[int]:
    """The sizes of groups of inputs, by a checkpoint's settings."""
    own = settings.get("group_size", settings.get("q_group_size"))
    given = [own, *(weights.get("group_size") for weights in _config_groups(settings))]
    return [int(size) for size in given if isinstance(size, int)]


def _config_groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How compressed-tensors stores the weights of each of its groups of matrices."""
    groups = dict(settings.get("config_groups") or {}).values()
    return [dict(dict(group).get("weights") or {}) for group in groups]


def _fp8(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> Codes:
    """`weight` in e4m3 with `weight_scale_inv` of blocks or `weight_scale` of rows or of all."""
    weight = tensors["weight"]
    if weight.dtype != torch.float8_e4m3fn:
        raise UnsupportedModelError(f"{where}: weights in {weight.dtype}, only float8_e4m3fn")
    given = settings.get("weight_block_size")
    block = (int(given[0]), int(given[1])) if given else None
    scale = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
    shape = (weight.shape[0], weight.shape[1])
    scale_NG = _ungrouped(scale, shape, block)
    return Codes(
        format="fp8",
        code_NK=weight.view(torch.uint8),
        group=_group_of(scale_NG, shape[1], () if block is None else block[1:], where),
        scale_NG=scale_NG,
    )


def _compressed(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> Codes:
    if "weight_packed" in tensors:
        if tensors["weight_packed"].dtype == torch.uint8:
            scales = tensors["weight_scale"]
            if scales.dtype != torch.uint8:
                raise UnsupportedModelError(f"{where}: nvfp4 weights are not read")
            return fp4(tensors["weight_packed"], scales)
        return _pack_quantised(tensors, settings, where)
    weight = tensors["weight"]
    if weight.dtype == torch.float8_e4m3fn:
        return _fp8(tensors, {"weight_block_size": _block_of(settings)}, where)
    if weight.dtype != torch.int8:
        raise UnsupportedModelError(f"{where}: weights in {weight.dtype}, only int8 and fp8")
    scale_NG = _ungrouped(tensors["weight_scale"], (weight.shape[0], weight.shape[1]), None)
    zero_NG = tensors.get("weight_zero_point")
    return Codes(
        format="int8",
        code_NK=weight.view(torch.uint8),
        group=_group_of(scale_NG, weight.shape[1], _sizes_of(settings), where),
        scale_NG=scale_NG,
        zero_NG=None if zero_NG is None else zero_NG.to(torch.int8).expand_as(scale_NG),
    )


def _block_of(settings: Mapping[str, Any]) -> list[int] | None:
    """`block_structure` of a checkpoint whose scales belong to blocks."""
    for weights in _config_groups(settings):
        if given := weights.get("block_structure"):
            return [int(size) for size in given]
    return None


def _pack_quantised(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], where: str
) -> Codes:
    """Codes and zero points in int32, lowest bits first; both are stored as unsigned."""
    num_out, num_in = (int(size) for size in tensors["weight_shape"].tolist())
    packed, scale_NG = tensors["weight_packed"], tensors["weight_scale"]
    bits = 32 * packed.shape[1] // num_in if num_in % 8 == 0 else 4
    if bits not in (4, 8):
        raise UnsupportedModelError(f"{where}: weights of {bits} bits, only 4 and 8")
    code = _fields(packed, bits)[:, :num_in]
    zero_NG = tensors.get("weight_zero_point")
    if zero_NG is not None:
        zero_NG = _fields(zero_NG.T.contiguous(), bits)[:, :num_out].T
    group = _group_of(scale_NG, num_in, _sizes_of(settings), where)
    if bits == 8:  # to the signed codes of int8
        code = code ^ 128
        zero_NG = None if zero_NG is None else (zero_NG ^ 128).view(torch.int8)
    codes = Codes(
        format="int4" if bits == 4 else "int8",
        code_NK=code,
        group=group,
        scale_NG=scale_NG,
        offset=8 if bits == 4 and zero_NG is None else 0,
        zero_NG=zero_NG,
    )
    return _ordered(codes, tensors.get("weight_g_idx"), where)


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of an int32 tensor along its last axis, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    fields = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return fields.flatten(-2).to(torch.uint8)


def _ordered(codes: Codes, group_K: Tensor | None, where: str) -> Codes:
    """Columns sorted by their group, where it is not simply the next one."""
    if group_K is None or bool((group_K < 0).any()):
        return codes
    num_in, size = codes.shape[1], codes.group
    plain_K = torch.arange(num_in, device=group_K.device) // size
    if torch.equal(group_K.to(plain_K.dtype), plain_K):
        return codes
    order_K = torch.argsort(group_K, stable=True)
    if not torch.equal(group_K[order_K].to(plain_K.dtype), plain_K):
        raise UnsupportedModelError(f"{where}: groups of inputs differ in size")
    return replace(codes, code_NK=codes.code_NK.index_select(1, order_K), order_K=order_K)


def _awq(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> Codes:
    """qweight [K, N / 8], qzeros [G, N / 8], scales [G, N]; eight outputs of a word interleaved."""
    _check_bits(settings, where, (4,))
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedModelError(f"{where}: AWQ of version {version!r}, only 'gemm'")

    def outputs(words: Tensor) -> Tensor:
        fields = _fields(words, 4).view(len(words), -1, 8)
        return fields[:, :, list(_AWQ_ORDER)].flatten(1).T.contiguous()

    scale_NG = tensors["scales"].T
    num_in = tensors["qweight"].shape[0]
    return Codes(
        format="int4",
        code_NK=outputs(tensors["qweight"]),
        group=_group_of(scale_NG, num_in, _sizes_of(settings), where),
        scale_NG=scale_NG,
        zero_NG=outputs(tensors["qzeros"]),
    )


def _gptq(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> Codes:
    """qweight [K / 8, N], qzeros [G, N / 8], scales [G, N]. Zeros are stored less one, but in the
    format's second version."""
    bits = _check_bits(settings, where, (4, 8))
    code_NK = _fields(tensors["qweight"].T.contiguous(), bits)
    zero_NG = _fields(tensors["qzeros"], bits).T
    if str(settings.get("checkpoint_format", "gptq")) != "gptq_v2":
        zero_NG = (zero_NG + 1) & ((1 << bits) - 1 if bits == 8 else 31)
    scale_NG = tensors["scales"].T
    if bits == 8:
        code_NK, zero_NG = code_NK ^ 128, (zero_NG ^ 128).view(torch.int8)
    codes = Codes(
        format="int4" if bits == 4 else "int8",
        code_NK=code_NK,
        group=_group_of(scale_NG, code_NK.shape[1], _sizes_of(settings), where),
        scale_NG=scale_NG,
        zero_NG=zero_NG,
    )
    return _ordered(_centred(codes), tensors.get("g_idx"), where)


def _centred(codes: Codes) -> Codes:
    """Without zero points if all are the middle, as products then have less to do."""
    middle = 8 if codes.format == "int4" else 0
    if codes.zero_NG is None or bool((codes.zero_NG != middle).any()):
        return codes
    return replace(codes, zero_NG=None, offset=middle)


def _check_bits(settings: Mapping[str, Any], where: str, allowed: tuple[int, ...]) -> int:
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits not in allowed:
        raise UnsupportedModelError(
            f"{where}: weights of {bits} bits, only {' and '.join(map(str, allowed))}"
        )
    return int(bits)


def fp4(words: Tensor, scale_NG: Tensor) -> Codes:
    """Bytes of two codes, the low one first; scales are exponents of two plus 127."""
    code = torch.stack([words & 15, words >> 4], dim=-1).flatten(-2)
    power_NG = torch.exp2(scale_NG.double() - 127).to(torch.bfloat16)
    return Codes(
        format="fp4", code_NK=code, group=code.shape[1] // scale_NG.shape[1], scale_NG=power_NG
    )


def _mxfp4(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], where: str) -> Codes:
    raise ModelFormatError(f"{where}: mxfp4 holds experts alone")


READERS: dict[str, Callable[[Mapping[str, Tensor], Mapping[str, Any], str], Codes]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "bitsandbytes": bitsandbytes.read,
}
