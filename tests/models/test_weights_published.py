"""Quantised checkpoints: each form against numbers made without our readers."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from builders import tiny_config, tiny_weights
from hunch.config import ModelConfig
from hunch.errors import ConfigError, ModelFormatError, UnsupportedModelError
from hunch.hub.gguf_file import TYPES
from hunch.kernels.quant import Quantised
from hunch.models.load import dtype_of, load_decoder
from hunch.models.weights import open_weights
from hunch.models.weights.blocks import codes_of
from hunch.models.weights.dequant import dequantise
from published_files import FORMATS, quantised_copy, write

CONFIG = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("size", [(48, 128), (136, 176)])
def test_numbers_are_those_of_the_format(form: str, size: tuple[int, int], tmp_path: Path) -> None:
    settings, make = FORMATS[form]
    tensors, numbers = make(*size)
    stored = {f"layer.q_proj.{name}": tensor for name, tensor in tensors.items()}
    stored["norm.weight"] = torch.ones(3)
    weights = open_weights(write(tmp_path, {**CONFIG, "quantization_config": settings}, stored))
    assert sorted(weights.names()) == ["layer.q_proj.weight", "norm.weight"]
    assert weights.shape("layer.q_proj.weight") == size
    assert torch.equal(weights.tensor("layer.q_proj.weight"), numbers)
    assert torch.equal(weights.tensor("norm.weight"), torch.ones(3))
    assert "quantization_config" not in weights.config
    packed = weights.packed("layer.q_proj.weight")
    assert packed is not None
    codes = packed.take(torch.tensor([3, 1])).codes()
    assert codes is not None
    assert torch.equal(codes.numbers(), numbers[[3, 1]])


SAMPLES = Path(__file__).parent / "format_samples.safetensors"  # by tools/format_samples.py


def samples() -> list[str]:
    with safe_open(SAMPLES, "pt") as file:
        return sorted(file.metadata())


@pytest.mark.parametrize("form", samples())
def test_numbers_are_those_of_other_tools(form: str, tmp_path: Path) -> None:
    with safe_open(SAMPLES, "pt") as file:
        settings = json.loads(file.metadata()[form])
    start, tensors = f"{form}/", load_file(SAMPLES)
    found = {name[len(start) :]: x for name, x in tensors.items() if name.startswith(start)}
    numbers = found.pop("numbers")
    stored = {f"a.q_proj.{name}": tensor for name, tensor in found.items()}
    weights = open_weights(write(tmp_path, {**CONFIG, "quantization_config": settings}, stored))
    assert torch.equal(weights.tensor("a.q_proj.weight").to(numbers.dtype), numbers)
    packed = weights.packed("a.q_proj.weight")  # as a GPU keeps them
    assert packed is not None
    codes = packed.take(torch.tensor([3, 1])).codes()
    assert codes is not None
    assert torch.equal(codes.numbers().to(numbers.dtype), numbers[[3, 1]])


def test_groups_are_as_large_as_the_file_says(tmp_path: Path) -> None:
    tensors, numbers = FORMATS["awq"][1](16, 48)  # groups of 32: the second is half a group
    stored = {f"a.{name}": tensor for name, tensor in tensors.items()}
    for name, settings in {
        "said": {"q_group_size": 32},
        "unsaid": {},
        "other": {"group_size": 64},
    }.items():
        settings = {"quant_method": "awq", **settings}
        folder = write(tmp_path / name, {**CONFIG, "quantization_config": settings}, stored)
        is_same = torch.equal(open_weights(folder).tensor("a.weight"), numbers)
        assert is_same == (name == "said")
    stored["a.scales"] = tensors["scales"].repeat(4, 1)[:7]
    stored["a.qzeros"] = tensors["qzeros"].repeat(4, 1)[:7]
    folder = write(tmp_path / "bad", {**CONFIG, "quantization_config": settings}, stored)
    with pytest.raises(ModelFormatError, match="7 groups of scales of 64 for 48 inputs"):
        open_weights(folder).tensor("a.weight")


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 6, 3), generator=generator, dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.down_proj"
    stored = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(2, 6)}
    settings = {"quant_method": "mxfp4"}
    weights = open_weights(write(tmp_path, {**CONFIG, "quantization_config": settings}, stored))
    assert sorted(weights.names()) == [f"{name}.weight", f"{name}_bias"]
    assert weights.shape(f"{name}.weight") == (2, 6, 96)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [E, in, out]
    assert torch.equal(weights.tensor(f"{name}.weight"), theirs.transpose(1, 2))
    packed = weights.packed(f"{name}.weight")  # as a GPU keeps them
    assert packed is not None
    codes = packed.take(slice(6, 12)).codes()
    assert codes is not None
    assert codes.format == "fp4"
    assert torch.equal(codes.numbers(), theirs[1].t())
    every_other = packed.take(slice(0, 12, 2))  # as a CPU keeps gates
    numbers = dequantise("MXFP4", every_other.blocks(), 96)
    assert torch.equal(numbers, theirs.transpose(1, 2).flatten(0, 1)[::2])


@pytest.mark.parametrize(
    "block_format", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
def test_blocks_of_a_gguf_file(block_format: str) -> None:
    size, num_bytes = next(
        (size, count) for name, size, count in TYPES.values() if name == block_format
    )
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (5, 2, num_bytes), dtype=np.uint8)
    for first in {"Q6_K": (208,)}.get(block_format, (0, 2) if block_format[3] != "0" else (0,)):
        rows[:, :, first : first + 2] = rng.normal(size=(5, 2, 1)).astype(np.float16).view(np.uint8)
    rows = rows.reshape(5, -1)
    codes = codes_of(block_format, torch.from_numpy(rows))
    assert codes is not None
    assert codes.shape == (5, 2 * size)
    want = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[block_format])
    assert np.array_equal(codes.numbers().numpy(), want)
    assert codes_of("Q3_K", torch.from_numpy(rows)) is None


@pytest.mark.parametrize(
    ("settings", "error", "word"),
    [
        ({"quant_method": "hqq"}, UnsupportedModelError, "gptq.* --dtype int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, UnsupportedModelError, "nvfp4"),
        ({"quant_method": "awq", "bits": 3}, UnsupportedModelError, "3 bits"),
        ({"quant_method": "awq", "version": "gemv"}, UnsupportedModelError, "gemv"),
        ("awq", ModelFormatError, "object"),
    ],
)
def test_what_is_not_read_is_named(settings, error, word, tmp_path) -> None:
    stored = {f"a.{name}": tensor for name, tensor in FORMATS["awq"][1](16, 64)[0].items()}
    folder = write(tmp_path, {**CONFIG, "quantization_config": settings}, stored)
    with pytest.raises(error, match=word):
        open_weights(folder).tensor("a.weight")


@pytest.mark.parametrize(
    "form", ["awq", "gptq order", "compressed int8", "fp8", "bitsandbytes nf4", "bitsandbytes int8"]
)
def test_a_model_keeps_what_its_file_holds(form: str, tmp_path: Path) -> None:
    config = tiny_config(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    folder, numbers = quantised_copy(tmp_path, form, config, tiny_weights(config).tensors)
    kept = load_decoder(open_weights(folder), hold="keep")
    expanded = load_decoder(open_weights(folder))
    attn, mlp = kept.layers[0].attn, kept.layers[0].mlp
    for linear in (attn.qkv, attn.out, mlp.gate_up, mlp.down):  # type: ignore[union-attr]
        assert isinstance(linear.weight, Quantised)
    prefix = "model.layers.0.self_attn."
    joined = torch.cat([numbers[f"{prefix}{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(attn.qkv.weight_NK, joined)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(attn.qkv(x), expanded.layers[0].attn.qkv(x))
    assert kept.weight_bytes < expanded.weight_bytes


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, "gptq"),
        ({"quant_method": "intel/auto-round", "packing_format": "auto_round:auto_awq"}, "awq"),
    ],
)
def test_other_tools_write_the_same_files(settings, form, tmp_path) -> None:
    tensors, want = FORMATS[form][1](16, 64)
    stored = {f"a.{name}": tensor for name, tensor in tensors.items()}
    given = {**FORMATS[form][0], **settings}
    folder = write(tmp_path, {**CONFIG, "quantization_config": given}, stored)
    assert torch.equal(open_weights(folder).tensor("a.weight"), want)


def test_zero_points_in_the_middle_are_left_out(tmp_path) -> None:
    tensors, _ = FORMATS["gptq"][1](16, 64)
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], 0x77777777)
    stored = {f"a.{name}": tensor for name, tensor in tensors.items()}
    weights = open_weights(
        write(tmp_path, {**CONFIG, "quantization_config": FORMATS["gptq"][0]}, stored)
    )
    packed = weights.packed("a.weight")
    assert packed is not None
    codes = packed.codes()
    assert codes is not None
    assert codes.zero_NG is None
    assert codes.offset == 8


@pytest.mark.parametrize(
    ("name", "form", "content"),
    [
        ("quantize_config.json", "gptq", {"bits": 4, "group_size": 32, "desc_act": False}),
        ("quant_config.json", "awq", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}),
        ("hf_quant_config.json", "fp8", {"quantization": {"quant_algo": "FP8"}}),
    ],
)
def test_settings_in_a_file_of_their_own(name, form, content, tmp_path) -> None:
    tensors, want = FORMATS[form][1](16, 64)
    if form == "fp8":  # one scale for all
        tensors, want = FORMATS["compressed fp8"][1](16, 64)
    folder = write(tmp_path, CONFIG, {f"a.{part}": tensor for part, tensor in tensors.items()})
    (folder / name).write_text(json.dumps(content))
    assert torch.equal(open_weights(folder).tensor("a.weight"), want)


def test_settings_under_their_older_name(tmp_path) -> None:
    settings, make = FORMATS["compressed int8"]
    tensors, want = make(16, 64)
    config = {**CONFIG, "compression_config": {**settings, "quant_method": "compressed-tensors"}}
    folder = write(tmp_path, config, {f"a.{part}": tensor for part, tensor in tensors.items()})
    assert torch.equal(open_weights(folder).tensor("a.weight"), want)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_without_settings_are_no_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write(tmp_path, CONFIG, {"a.weight": torch.ones(4, 8).to(dtype)})
    with pytest.raises(ModelFormatError, match="no quantization_config"):
        open_weights(folder).tensor("a.weight")


STATE = torch.tensor(list(b'{"shape": [16, -64], "blocksize": 64}'), dtype=torch.uint8)
NO_STATE = torch.tensor(list(b"{shape"), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("form", "name", "other", "word"),
    [
        ("nf4", "weight.quant_map", torch.linspace(-1, 1, 16), "quant_map is not that of nf4"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", None, "without a quant_state"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", STATE, "no JSON with a shape"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", NO_STATE, "no JSON with a shape"),
        ("nf4", "weight", torch.zeros(8, 1, dtype=torch.uint8), "too few for 16 x 64"),
        ("int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format=2"),
        ("int8", "SCB", None, "no scales"),
    ],
)
def test_what_bitsandbytes_files_lack(form, name, other, word, tmp_path) -> None:
    settings, make = FORMATS[f"bitsandbytes {form}"]
    tensors = make(16, 64)[0]
    del tensors[name]
    stored = {f"a.{last}": tensor for last, tensor in tensors.items()}
    if other is not None:
        stored[f"a.{name}"] = other
    folder = write(tmp_path, {**CONFIG, "quantization_config": settings}, stored)
    with pytest.raises((ModelFormatError, UnsupportedModelError), match=word):
        open_weights(folder).tensor("a.weight")


def test_codes_of_bitsandbytes_in_words_of_16_bits(tmp_path) -> None:
    """As files are written for training on several GPUs (`bnb_4bit_quant_storage`)."""
    settings, make = FORMATS["bitsandbytes nf4"]
    tensors, numbers = make(16, 64)
    tensors["weight"] = tensors["weight"].flatten().view(torch.bfloat16)[:, None]
    stored = {f"a.{last}": tensor for last, tensor in tensors.items()}
    folder = write(tmp_path, {**CONFIG, "quantization_config": settings}, stored)
    assert torch.equal(open_weights(folder).tensor("a.weight"), numbers)


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        ("awq_marlin", "awq", "auto"),
        ("auto-round", "awq", "auto"),
        ("inc", "gptq", "auto"),
        ("gptq_marlin", "gptq", "auto"),
        ("moe_wna16", "gptq", "auto"),
        ("compressed-tensors", "compressed int4", "auto"),
        ("modelopt", "fp8", "auto"),
        ("fbgemm_fp8", "fbgemm", "auto"),
        ("bitsandbytes", "bitsandbytes nf4", "auto"),
        ("bitsandbytes", "bitsandbytes int8", "auto"),
        ("bitsandbytes", "awq", None),
        ("fp8", None, "fp8"),
        ("int4", None, "int4"),
        ("fp8", "awq", None),
        ("auto-round", "fp8", None),
        ("awq", None, None),
    ],
)
def test_quantization_by_vllms_names(
    name: str, form: str | None, dtype: str | None, tmp_path: Path
) -> None:
    """None: the files are plain; they are something else, which is an error."""
    settings, make = FORMATS["awq" if form is None else form]
    tensors = {"weight": torch.ones(16, 64)} if form is None else make(16, 64)[0]
    stored = {f"a.q_proj.{last}": tensor for last, tensor in tensors.items()}
    config = CONFIG if form is None else {**CONFIG, "quantization_config": settings}
    weights = open_weights(write(tmp_path, config, stored))
    model = ModelConfig(quantization=name)
    if dtype is not None:
        assert dtype_of(model, weights) == dtype
        return
    with pytest.raises(ConfigError, match="Leave it out"):
        dtype_of(model, weights)
