"""Loading a target on the best kernels there are."""

from __future__ import annotations

import logging

import torch

from hunch.config import KV_DTYPES, ModelConfig
from hunch.errors import ConfigError, UnsupportedModelError
from hunch.models.decoder import Decoder
from hunch.models.load import dtype_of, load_decoder
from hunch.models.native import DTYPES, activation_bits, load_native, not_native
from hunch.models.spec import ModelSpec
from hunch.models.stage import WHOLE, Stage
from hunch.models.target import HoldsKV, Target
from hunch.models.weights import Weights, for_length
from hunch.models.weights.adapter import AdaptedWeights
from hunch.parallel.group import SINGLE, Group

log = logging.getLogger("hunch")


def exactness(target: Target) -> str:
    """Whether a row's bits depend on nothing but the row, and by which kernels."""
    is_exact = not isinstance(target, Decoder) or target.is_exact  # only torch's may be inexact
    how = f"{target.backend.name}: {target.backend.about}"
    return f"bit for bit ({how})" if is_exact else "no (torch: sums go by the number of rows)"


def pick_device(device: str) -> str:
    """cpu or cuda, where a user may have said auto."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda': torch sees no CUDA device here; use device='cpu'")
    return device


def load_target(
    model: ModelConfig,
    weights: Weights,
    device: torch.device,
    group: Group = SINGLE,
    stage: Stage = WHOLE,
) -> Target:
    """The model of `weights`, held as the config says; by torch if there are no kernels.

    Each rank of a group loads its part, and each stage of a pipeline its layers.
    """
    weights = for_length(weights, model.max_model_len)
    dtype = dtype_of(model, weights)
    if model.lora is not None:
        weights = AdaptedWeights(weights, model.lora)
    is_native = model.kernels == "auto" and dtype in DTYPES
    if device.type == "cpu" and is_native:
        bits = activation_bits(ModelSpec.from_config(weights.config), model.activation_bits)
        target = load_native(
            weights, dtype=dtype, num_threads=model.threads, bits=bits, group=group, stage=stage
        )
        if target is not None:
            return with_kv(target, model.kv_cache_dtype)
        if problems := not_native(ModelSpec.from_config(weights.config)):
            words = ", ".join(problems)
            log.warning("the CPU's kernels do not know %s: torch computes, exactly, slower", words)
    elif device.type == "cpu" and model.kernels == "auto":
        log.warning("the CPU's kernels do not compute in %s: torch does, slower", dtype)
    decoder = load_decoder(weights, dtype=dtype, device=device, group=group, stage=stage)
    if device.type == "cpu":
        decoder.expand()
    if device.type == "cuda" and model.kernels == "auto":
        from hunch.models.cuda import CudaDecoder  # needs Triton

        try:
            return with_kv(CudaDecoder(decoder, model.max_model_len), model.kv_cache_dtype)
        except UnsupportedModelError as error:
            log.warning("%s: using torch's own kernels, slowly, so that text stays exact", error)
            decoder.expand()
    if device.type == "cuda":
        decoder.make_exact()
    return with_kv(decoder, model.kv_cache_dtype)


def with_kv(target: Target, kv_dtype: str) -> Target:
    """The model with keys and values in the precision a user wants: rounded once, when written."""
    if kv_dtype == "auto":
        return target
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype={kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    if not isinstance(target, HoldsKV) or target.spec.latent is not None:
        raise ConfigError(
            f"KV in {kv_dtype}: not for latent attention, nor for a draft model that is split "
            "over processes; leave it out for this model"
        )
    target.hold_kv(torch.int8 if kv_dtype == "int8" else torch.float8_e4m3fn)
    return target
