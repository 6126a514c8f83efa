"""How long a pass takes, from bytes, operations and layers: a roofline with measured constants.

A pass over M tokens of B sequences, each with L tokens of context, reads the weights and B * L
tokens of KV, multiplies every weight M times, and walks its layers one after the other:

    seconds = (memory^p + arithmetic^p + layers^p) ^ (1/p)

KV is read at less than half the rate of weights, once for each sequence however many of its tokens
are in the pass. A layer takes a least time, and a little more for every token. The three overlap
partly, as p says: with p = 1 they would be added, with a large p the largest would count. The
constants are fitted to passes of a 7B and a 135M geometry on an H200, and to drafts of 3 and 7
under an open load there (docs/benchmarks.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hunch.bench.gpus import Gpu
from hunch.errors import ConfigError

OVERLAP = 1.5  # p
# Shares of the maker's peaks that were reached, seconds a layer takes at least and per token.
BANDWIDTH_SHARE = 0.81
KV_SHARE = 0.36  # of the bandwidth, while KV is read
DECODE_SHARE = 0.61  # of the arithmetic, in passes over few tokens
PREFILL_SHARE = 0.76  # of the arithmetic, while prompts are read
LAYER_SECONDS = 27e-6
TOKEN_SECONDS = 27e-9
BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.56}  # per weight, with scales

# parameters -> layers, bytes of KV per token in 16 bits; of well-known models
GEOMETRIES = {
    0.135e9: (30, 23_040),  # SmolLM2-135M
    0.5e9: (24, 12_288),  # Qwen2.5-0.5B
    1.24e9: (16, 32_768),  # Llama-3.2-1B
    3.2e9: (28, 114_688),  # Llama-3.2-3B
    8.0e9: (32, 131_072),  # Llama-3.1-8B
    14.8e9: (48, 196_608),  # Qwen2.5-14B
    32.8e9: (64, 262_144),  # Qwen2.5-32B
    70.6e9: (80, 327_680),  # Llama-3.1-70B
    405e9: (126, 516_096),  # Llama-3.1-405B
}


@dataclass(frozen=True, slots=True)
class Size:
    """A model's figures for the roofline."""

    params: float
    num_layers: int
    kv_bytes: float  # per token
    weight_bytes: float
    expert_share: float = 0.0  # share of the parameters in experts that only some tokens use
    asked: float = 1.0  # share of these experts that a token uses

    def seen(self, tokens: float) -> float:
        """The share of the weights that a pass over so many tokens reads, if each token's experts
        are random."""
        return 1 - self.expert_share * math.pow(1 - self.asked, tokens)

    @property
    def active(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.params * self.seen(1)

    @staticmethod
    def parse(text: str, dtype: str = "bf16") -> Size:
        """'8B', '135M', '70b': its weights, with the layers and KV of the nearest known model."""
        if dtype not in BYTES:
            raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(BYTES)}")
        units = {"m": 1e6, "b": 1e9, "t": 1e12}
        unit = units.get(text[-1:].lower(), 1.0)
        try:
            params = float(text[:-1] if unit != 1.0 else text) * unit
        except ValueError:
            params = 0.0
        if not 1e6 <= params <= 1e14:
            raise ConfigError(f"model size {text!r} must be a number of parameters, say 8B or 135M")
        near = min(GEOMETRIES, key=lambda known: abs(math.log(known / params)))
        num_layers, kv_bytes = GEOMETRIES[near]
        return Size(params, num_layers, float(kv_bytes), params * BYTES[dtype])

    @property
    def name(self) -> str:
        """Its parameters, written as 8B or 135M."""
        unit, suffix = (1e9, "B") if self.params >= 1e9 else (1e6, "M")
        return f"{self.params / unit:.3g}{suffix}"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine: rates that are reached, not the advertised ones."""

    name: str
    bytes_per_second: float
    flops: float  # in passes over few tokens
    prefill_flops: float
    memory_bytes: float
    num_gpus: int = 1
    layer_seconds: float = LAYER_SECONDS
    kv_rate: float = KV_SHARE / BANDWIDTH_SHARE  # of reading KV, against that of weights
    scale: float = 1.0  # measured seconds over the roofline's, from a report
    token_cost: float = 1.0  # the same for what a further token adds

    @staticmethod
    def of(gpu: Gpu, num_gpus: int = 1, dtype: str = "bf16") -> Machine:
        """Several GPUs share every pass, and together reach nine tenths of their rates."""
        together = num_gpus if num_gpus == 1 else 0.9 * num_gpus
        tflops = gpu.fp8_tflops if dtype == "fp8" and gpu.fp8_tflops else gpu.bf16_tflops
        return Machine(
            gpu.name if num_gpus == 1 else f"{num_gpus} x {gpu.name}",
            gpu.bandwidth_gbs * 1e9 * BANDWIDTH_SHARE * together,
            tflops * 1e12 * DECODE_SHARE * together,
            tflops * 1e12 * PREFILL_SHARE * together,
            gpu.memory_gb * 1e9 * num_gpus,
            num_gpus,
        )

    def step_seconds(self, size: Size, rows: float, tokens: float, context: float) -> float:
        """A pass over `tokens` tokens of each of `rows` sequences."""
        kv_bytes = rows * context * size.kv_bytes / self.kv_rate
        weight_bytes = size.weight_bytes * size.seen(rows * tokens)
        read = (weight_bytes + kv_bytes) / self.bytes_per_second
        computed = self.token_cost * 2 * size.active * rows * tokens / self.flops
        walked = size.num_layers * (self.layer_seconds + TOKEN_SECONDS * rows * tokens)
        parts = (read, computed, walked)
        return float(self.scale * sum(part**OVERLAP for part in parts) ** (1 / OVERLAP))

    def prefill_seconds(self, size: Size, tokens: float) -> float:
        """Reading this many tokens of prompts; never faster than a pass."""
        return self.scale * max(self._prompt_parts(size, tokens))

    def reading_seconds(self, size: Size, tokens: float) -> float:
        """A pass over a few prompts beside steps: weights are read, and tokens computed."""
        return self.scale * sum(self._prompt_parts(size, tokens))

    def _prompt_parts(self, size: Size, tokens: float) -> tuple[float, float]:
        """What computing so many tokens of prompts takes, and reading the weights."""
        computed = self.token_cost * 2 * size.active * tokens / self.prefill_flops
        return computed, size.weight_bytes * size.seen(tokens) / self.bytes_per_second

    def most_rows(self, size: Size, context: float) -> int:
        """Sequences whose KV fits beside the weights, with a tenth of the memory left over."""
        free = 0.9 * self.memory_bytes - size.weight_bytes
        return max(0, int(free / (context * size.kv_bytes)))
