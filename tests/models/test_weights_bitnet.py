"""BitNet as it is published: matrices of -1, 0 and 1, products that round what goes into them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from builders import check_rows, plain_logits
from hunch.errors import UnsupportedModelError
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from their_models import make

IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()
OFFLINE = {"linear_class": "autobitlinear", "quantization_mode": "offline"}
PACKED = {"linear_class": "bitlinear", "quantization_mode": "offline"}
ONLINE = {"linear_class": "autobitlinear", "quantization_mode": "online"}


def ternary(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = weight.abs().mean()
    return (weight / mean).round().clamp(-1, 1), mean


def round_inputs(module: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
    scale = 127 / args[0].abs().amax(-1, keepdim=True)
    return (args[0] * scale).round() / scale


def write(folder: Path, settings: dict[str, Any]) -> Any:
    """transformers' model with products as BitNet has them, and its files in a published form."""
    theirs, config, tensors = make("bitnet")
    for name, module in theirs.named_modules():
        if not name.endswith("_proj"):
            continue
        numbers, mean = ternary(module.weight.data)
        module.weight.data = numbers * mean
        module.register_forward_pre_hook(round_inputs)
        if settings is not ONLINE:
            codes = (numbers + 1).to(torch.uint8).view(4, -1, numbers.shape[1])
            parts = [codes[part] << 2 * part for part in range(4)]
            tensors[f"{name}.weight"] = parts[0] | parts[1] | parts[2] | parts[3]
            scale = 1 / mean if settings is PACKED else mean
            tensors[f"{name}.weight_scale"] = scale.reshape(1)
    config["quantization_config"] = {"quant_method": "bitnet", **settings}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return theirs


@pytest.mark.parametrize("settings", [OFFLINE, PACKED, ONLINE], ids=["offline", "packed", "online"])
@torch.no_grad()
def test_logits_are_those_of_rounded_products(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = write(tmp_path, settings)
    expected = theirs(torch.tensor([IDS])).logits[0]
    ours = load_decoder(open_weights(tmp_path))
    logits = plain_logits(ours, IDS)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=2e-3)
    for layer in ours.layers:
        layer.attn.qkv.input_bits = 0
    assert (plain_logits(ours, IDS) - logits).abs().max() > 0.01  # it counts


def test_rows_do_not_depend_on_each_other(tmp_path: Path) -> None:
    write(tmp_path, OFFLINE)
    check_rows(load_decoder(open_weights(tmp_path)))


def test_norms_of_products_are_refused(tmp_path: Path) -> None:
    write(tmp_path, OFFLINE | {"use_rms_norm": True})
    with pytest.raises(UnsupportedModelError, match="use_rms_norm"):
        open_weights(tmp_path)
