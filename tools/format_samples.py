"""Makes tests/models/format_samples.safetensors: matrices that other tools packed or unpacked.

    pip install compressed-tensors==0.20.0
    python tools/format_samples.py --awq autoawq-0.2.9/awq/utils/packing_utils.py \
        --gptq auto_gptq-0.7.1/auto_gptq/nn_modules/qlinear/qlinear_cuda.py

    pip install bitsandbytes==0.50.2
    python tools/format_samples.py --bitsandbytes

Of autoawq and auto-gptq one file of the source distribution each is enough. What a command does not
make stays as it is in the file. The numbers are what those tools say the codes stand for;
`tests/models/test_weights_published.py` holds our readers to them.

Shape letters: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

OUT = Path(__file__).resolve().parents[1] / "tests" / "models" / "format_samples.safetensors"
N, K, GROUP = 32, 64, 32
Sample = tuple[dict[str, Any], dict[str, Tensor], Tensor]  # settings, what is stored, its numbers


def awq(path: Path) -> Sample:
    """Any words are codes; unpacked by AutoAWQ."""
    words = torch.randint(-(2**31), 2**31 - 1, (K + K // GROUP, N // 8)).int()
    weight, zeros = words[:K], words[K:]
    scales = (torch.rand(K // GROUP, N) * 0.02 + 0.005).half()
    numbers_KN = load(path).dequantize_gemm(weight, zeros, scales.float(), 4, GROUP)
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    return settings, {"qweight": weight, "qzeros": zeros, "scales": scales}, numbers_KN.T


def gptq(path: Path, bits: int, *, is_ordered: bool) -> Sample:
    """Packed by AutoGPTQ."""
    group_K = torch.arange(K) // GROUP
    group_K = group_K[torch.randperm(K)] if is_ordered else group_K
    scale_NG = (torch.rand(N, K // GROUP) * 0.02 + 0.005).half().float()
    zero_NG = torch.randint(1, 2**bits - 1, scale_NG.shape).float()
    code_NK = torch.randint(0, 2**bits, (N, K)).float()
    linear = torch.nn.Linear(K, N, bias=False)
    linear.weight.data = (code_NK - zero_NG[:, group_K]) * scale_NG[:, group_K]
    numbers_NK = linear.weight.data.clone()
    packed = load(path).QuantLinear(bits, GROUP, K, N, False, weight_dtype=torch.float16)
    packed.pack(linear, scale_NG, zero_NG, group_K.int())
    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": is_ordered}
    return settings, packed.state_dict(), numbers_NK


def compressed(form: str, scale_size: tuple[int, ...], **given: Any) -> Sample:
    """Packed and unpacked by compressed-tensors, in bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**given))
    scale = (torch.rand(scale_size) * 0.02 + 0.01).bfloat16()
    plain = {"weight": (torch.randn(N, K) * 0.1).bfloat16(), "weight_scale": scale}
    if not given.get("symmetric", True):
        half = 2 ** (given["num_bits"] - 1)
        plain["weight_zero_point"] = torch.randint(-half, half, scale_size).to(torch.int8)
    tool = BaseCompressor.get_value_from_registry(form)
    stored = tool.compress(plain, scheme)
    groups = {"group_0": scheme.model_dump(mode="json")}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return settings, stored, tool.decompress(stored, scheme)["weight"]


def fp8_blocks() -> Sample:
    """Unpacked by compressed-tensors' converter of such checkpoints, in float32."""
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer

    block = (16, 32)
    stored = {
        "weight": (torch.randn(N, K) * 20).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(N // block[0], K // block[1]) * 0.01,
    }
    tool = FP8BlockDequantizer(targets=["a"], weight_block_size=block, dtype=torch.float32)
    found = tool.process({f"a.{name}": tensor for name, tensor in stored.items()})
    return {"quant_method": "fp8", "weight_block_size": list(block)}, stored, found["a.weight"]


def bitsandbytes_4(form: str, width: int, *, is_nested: bool) -> Sample:
    """Packed and unpacked by bitsandbytes, in float32."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    code, state = quantize_4bit(
        torch.randn(N, width) * 0.1, quant_type=form, compress_statistics=is_nested
    )
    stored = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return settings, {"weight": code, **stored}, dequantize_4bit(code, state)


def bitsandbytes_8() -> Sample:
    """Its numbers in bfloat16: before, they are rounded twice there and once here."""
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    code, largest, _ = int8_vectorwise_quant((torch.randn(N, K) * 0.1).half())
    stored = {"weight": code, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return settings, stored, int8_vectorwise_dequant(code, largest).bfloat16()


def bitsandbytes_samples() -> dict[str, Sample]:
    return {
        "bitsandbytes nf4": bitsandbytes_4("nf4", K, is_nested=False),
        "bitsandbytes nf4 nested": bitsandbytes_4("nf4", K, is_nested=True),
        "bitsandbytes nf4 odd": bitsandbytes_4("nf4", K + 16, is_nested=True),
        "bitsandbytes fp4": bitsandbytes_4("fp4", K, is_nested=False),
        "bitsandbytes fp4 nested": bitsandbytes_4("fp4", K, is_nested=True),
        "bitsandbytes int8": bitsandbytes_8(),
    }


def load(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def samples(awq_file: Path, gptq_file: Path) -> dict[str, Sample]:
    grouped, rows, groups = {"strategy": "group", "group_size": GROUP}, (N, 1), (N, K // GROUP)
    pack, int4, int8 = (
        "pack-quantized",
        {"num_bits": 4, "type": "int"},
        {"num_bits": 8, "type": "int"},
    )
    fp8 = {"num_bits": 8, "type": "float"}
    blocks = {"strategy": "block", "block_structure": [16, 32]}
    return {
        "awq": awq(awq_file),
        "gptq 4": gptq(gptq_file, 4, is_ordered=False),
        "gptq 4 order": gptq(gptq_file, 4, is_ordered=True),
        "gptq 8": gptq(gptq_file, 8, is_ordered=False),
        "gptq 8 order": gptq(gptq_file, 8, is_ordered=True),
        "packed int4": compressed(pack, groups, **int4, **grouped),
        "packed int4 rows": compressed(pack, rows, **int4, strategy="channel"),
        "packed int4 zeros": compressed(pack, groups, **int4, **grouped, symmetric=False),
        "packed int8": compressed(pack, groups, **int8, **grouped),
        "packed int8 zeros": compressed(pack, groups, **int8, **grouped, symmetric=False),
        "int8 rows": compressed("int-quantized", rows, **int8, strategy="channel"),
        "int8 whole": compressed("int-quantized", (1,), **int8, strategy="tensor"),
        "fp8 rows": compressed("float-quantized", rows, **fp8, strategy="channel"),
        "fp8 whole": compressed("float-quantized", (1,), **fp8, strategy="tensor"),
        "fp8 blocks": compressed("float-quantized", (2, 2), **fp8, **blocks),
        "fp8 inverse blocks": fp8_blocks(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--awq", type=Path)
    parser.add_argument("--gptq", type=Path)
    parser.add_argument("--bitsandbytes", action="store_true")
    args = parser.parse_args()
    tensors: dict[str, Tensor] = load_file(OUT)
    with safe_open(OUT, "pt") as file:
        settings: dict[str, str] = file.metadata()
    torch.manual_seed(0)
    made = samples(args.awq, args.gptq) if args.awq and args.gptq else {}
    if args.bitsandbytes:
        torch.manual_seed(0)
        made |= bitsandbytes_samples()
    for form, (given, stored, numbers) in made.items():
        settings[form] = json.dumps(given)
        found = {**stored, "numbers": numbers}
        for name in [name for name in tensors if name.startswith(f"{form}/")]:
            del tensors[name]
        tensors |= {f"{form}/{name}": tensor.contiguous() for name, tensor in found.items()}
    save_file(tensors, OUT, settings)


if __name__ == "__main__":
    main()
