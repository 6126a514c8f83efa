"""GPUs by their makers' data sheets: memory, bandwidth, dense bfloat16 arithmetic.

Figures "with sparsity" are halved. For a card without bfloat16, its float16 figure is given.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from hunch.errors import ConfigError

NVIDIA = "NVIDIA data sheet: "


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card. Rates are the maker's peaks; the roofline has the shares that are reached."""

    name: str
    memory_gb: float
    bandwidth_gbs: float  # GB per second
    bf16_tflops: float  # dense
    fp8_tflops: float | None  # dense; None: no such units
    source: str


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 180, 7700, 2250, 4500, NVIDIA + "HGX B200, per GPU"),
        Gpu("H200", 141, 4800, 989, 1979, NVIDIA + "H200 SXM"),
        Gpu("H100", 80, 3350, 989, 1979, NVIDIA + "H100 SXM"),
        Gpu("H100-PCIe", 80, 2000, 756, 1513, NVIDIA + "H100 PCIe"),
        Gpu("GH200", 96, 4000, 989, 1979, NVIDIA + "GH200, 96 GB HBM3"),
        Gpu("A100", 80, 2039, 312, None, NVIDIA + "A100 80GB SXM"),
        Gpu("A100-40GB", 40, 1555, 312, None, NVIDIA + "A100 40GB SXM"),
        Gpu("L40S", 48, 864, 362, 733, NVIDIA + "L40S"),
        Gpu("L4", 24, 300, 121, 242, NVIDIA + "L4"),
        Gpu("A10", 24, 600, 125, None, NVIDIA + "A10"),
        Gpu("A10G", 24, 600, 70, None, NVIDIA + "A10G, as Amazon lists it for its G5 machines"),
        Gpu("T4", 16, 320, 65, None, NVIDIA + "T4 (float16)"),
        Gpu("V100", 32, 900, 125, None, NVIDIA + "V100 SXM2 (float16)"),
        Gpu("RTX-5090", 32, 1792, 209, 419, NVIDIA + "RTX Blackwell architecture paper"),
        Gpu("RTX-4090", 24, 1008, 165, 330, NVIDIA + "Ada architecture paper"),
        Gpu("RTX-3090", 24, 936, 71, None, NVIDIA + "Ampere GA102 architecture paper"),
        Gpu("MI300X", 192, 5300, 1307, 2614, "AMD data sheet: Instinct MI300X"),
        Gpu("MI325X", 256, 6000, 1307, 2614, "AMD data sheet: Instinct MI325X"),
    )
}


def find(name: str) -> Gpu:
    """A card by its name, however it is written; the error for an unknown one names others."""
    known = {_plain(one): gpu for one, gpu in GPUS.items()}
    plain = _plain(name)
    if plain in known:
        return known[plain]
    near = difflib.get_close_matches(plain, known, 1, 0.5)
    hint = f"; did you mean {known[near[0]].name}?" if near else "."
    raise ConfigError(
        f"--gpu {name!r} is not one of {', '.join(GPUS)}{hint} Or give --bandwidth, --tflops and "
        "--memory yourself"
    )


def of_device(name: str) -> Gpu | None:
    """The card by its driver's name, such as "NVIDIA H100 80GB HBM3"; None: it is not in the
    table."""
    plain = _plain(name)
    found = [gpu for gpu in GPUS.values() if _plain(gpu.name) in plain]
    # The longest name that fits: "NVIDIA H100 PCIe" is no H100 SXM.
    return max(found, key=lambda gpu: len(gpu.name), default=None)


def _plain(name: str) -> str:
    return "".join(sign for sign in name.lower() if sign.isalnum()).removeprefix("nvidia")
