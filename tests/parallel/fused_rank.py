"""One rank of a model on the GPU's fused kernels: fused_rank.py RANK SIZE FOLDER.

On a CPU they run in Triton's interpreter, as the tests of kernels do.
"""

import sys
from pathlib import Path

import torch

import conftest  # noqa: F401  # makes the interpreter stand in for a GPU
from hunch.models.cuda import CudaDecoder
from hunch.models.source import RandomSource
from hunch.parallel.link import Link
from hunch.registry import MODELS, resolve
from kernels.test_gpu_decoder import step
from parallel.test_fused import SPEC


def main(rank: int, size: int, folder: Path) -> None:
    link = Link.in_folder(folder, rank, size, torch.device("cpu"))
    source = RandomSource(0, torch.float16)
    source.group = link.group(size)
    decoder = CudaDecoder(resolve(MODELS, SPEC.architecture)(SPEC, source))
    ids_T = torch.arange(3, 14)
    results = []
    for sizes in ((11,), (4, 1, 6)):  # the same tokens, in one pass and in three
        kv, first, rows = decoder.new_kv(64), 0, []
        for count in sizes:
            last = first + count
            hidden = decoder.forward(ids_T[first:last], step(first, last), kv)
            rows.append(decoder.logits(hidden.last_TD))
            first = last
        results.append(torch.cat(rows))
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
