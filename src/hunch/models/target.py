"""A target on the best kernels its device has; torch's own where there are none."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hunch.config import ModelConfig
from hunch.errors import UnsupportedModelError
from hunch.models.load import load_decoder
from hunch.models.native import DTYPES, load_native
from hunch.models.weights import Weights

log = logging.getLogger("hunch")


def load_target(model: ModelConfig, weights: Weights, device: torch.device) -> Any:
    """The decoder of `weights`, as the config wants it held."""
    is_native = model.kernels == "auto" and model.dtype in DTYPES
    if device.type == "cpu" and is_native:
        target = load_native(
            weights, dtype=model.dtype, num_threads=model.threads, bits=model.activation_bits
        )
        if target is not None:
            return target
    decoder = load_decoder(weights, dtype=model.dtype, device=device)
    if device.type == "cuda" and model.kernels == "auto":
        from hunch.models.cuda import CudaDecoder  # needs Triton

        try:
            return CudaDecoder(decoder)
        except UnsupportedModelError as error:
            log.warning("%s: using torch's own kernels, slowly, so that text stays exact", error)
    if device.type == "cuda":
        decoder.make_exact()
    return decoder
