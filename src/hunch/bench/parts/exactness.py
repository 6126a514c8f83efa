"""The cost of exactness on a GPU: a pass's products in a fixed order, and in any order.

Ours add up in one order for any number of rows; the vendor's library chooses by size. Attention,
norms and sampling are the same for both and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hunch.bench.parts import PartOptions
from hunch.bench.parts.requests import load
from hunch.kernels.gpu_gemm import gemm, gemm_gated, gemm_parts, num_parts
from hunch.kernels.gpu_wide import MIN_ROWS, padded, product, product_parts
from hunch.kernels.slices import split_of
from hunch.models.cuda import CudaDecoder
from hunch.step.capture import Graph, new_pool, seconds_of

ROWS = (1, 8, 64, 256)


def price(decoder: CudaDecoder) -> dict[int, tuple[float, float]]:
    """By number of rows: seconds of a pass's products, exact and by the vendor's library."""
    found: dict[int, tuple[float, float]] = {}
    for rows in ROWS:
        pool = new_pool(decoder.device)
        graphs = [
            Graph(_body(decoder, rows, is_exact), decoder.device, pool)
            for is_exact in (True, False)
        ]
        exact, free = (seconds_of(graph, decoder.device) for graph in graphs)
        found[rows] = exact, free
    return found


def _body(decoder: CudaDecoder, rows: int, is_exact: bool) -> Callable[[], None]:
    weights: list[Any] = [
        weight
        for layer in decoder.layers
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]
    weights.append(decoder.decoder.head)
    is_wide = decoder.fused.is_wide and rows >= MIN_ROWS
    height = padded(rows) if is_exact and is_wide else rows
    inputs = {
        width: torch.randn(height, width, device=decoder.device).to(decoder.dtype)
        for width in {weight.weight_NK.shape[1] for weight in weights}
    }

    def body() -> None:
        for place, weight in enumerate(weights):
            x_MK = inputs[weight.weight_NK.shape[1]]
            if not is_exact:
                torch.mm(x_MK, weight.weight_NK.T)
            elif place == len(weights) - 1:
                gemm(x_MK[:rows], weight.weight_NK, _empty(x_MK[:rows], weight.weight_NK))
            else:
                _exact(x_MK, weight.weight_NK, place % 4, is_wide)

    return body


def _exact(x_MK: Tensor, w_NK: Tensor, which: int, is_wide: bool) -> None:
    """One product of a layer, as `CudaDecoder` computes it."""
    if which in (0, 2):
        y_MN = x_MK.new_empty(len(x_MK), len(w_NK))
        if is_wide:
            product(x_MK, w_NK, y_MN)
        elif which == 0:
            gemm(x_MK, w_NK, y_MN)
        else:
            gemm_gated(x_MK, w_NK, x_MK.new_empty(len(x_MK), len(w_NK) // 2))
        return
    num_slices = split_of(*w_NK.shape) if is_wide else num_parts(len(x_MK), w_NK)
    parts_SMN = _empty(x_MK, w_NK).new_empty(num_slices, len(x_MK), len(w_NK))
    if is_wide:
        product_parts(x_MK, w_NK, parts_SMN)
    else:
        gemm_parts(x_MK, w_NK, parts_SMN)


def _empty(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    return torch.empty(len(x_MK), len(w_NK), dtype=torch.float32, device=x_MK.device)


@torch.inference_mode()
def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("exactness", __doc__)
    parser.add_argument("--targets", default="small,7b")
    for target in parser.parse_args(words).targets.split(","):
        with load(target, "off", 1) as llm:
            runner: Any = llm.engine.runner
            for num_rows, (exact, free) in price(runner.target).items():
                print(
                    f"{target:6} products of {num_rows:3} rows: {1e3 * exact:.2f} ms in a fixed "
                    f"order, {1e3 * free:.2f} in any: exactness costs {exact / free - 1:+.0%}",
                    flush=True,
                )
