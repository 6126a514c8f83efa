"""One rank of a model on the GPU's fused kernels: fused_rank.py RANK SIZE FOLDER NAME.

On a CPU they run in Triton's interpreter, as the tests of kernels do.
"""

import sys
from pathlib import Path

import torch

import conftest  # noqa: F401  # makes the interpreter stand in for a GPU
from gpu_inputs import step
from hunch.models.cuda import CudaDecoder
from hunch.parallel.link import Link
from hunch.registry import MODELS, resolve
from parallel.test_fused import MODELS_OF_TESTS
from random_models import RandomSource


def main(rank: int, size: int, folder: Path, name: str) -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    link = Link.in_folder(folder, rank, size, device)
    spec, hold = MODELS_OF_TESTS[name]
    source = RandomSource(0, torch.float16)
    source.group, source.hold, source.device = link.group(size), hold, device
    decoder = CudaDecoder(resolve(MODELS, spec.architecture)(spec, source))
    group, made = link.group(size), list[int]()
    all_slices = group.all_slices
    if size > 1:

        def noted(part_STD: torch.Tensor) -> torch.Tensor:
            made.append(part_STD[0].numel())
            return all_slices(part_STD)

        group.all_slices = noted
    ids_T = torch.arange(3, 9, device=device)
    results = []
    for sizes in ((6,), (2, 1, 3)):  # the same tokens, in one pass and in three
        kv, first, rows = decoder.new_kv(64), 0, []
        for count in sizes:
            last = first + count
            made.clear()
            hidden = decoder.forward(ids_T[first:last], step(first, last), kv)
            said = decoder.exchanges(count)
            assert size == 1 or made == [exchange.num_numbers for exchange in said]
            rows.append(decoder.logits(hidden.last_TD))
            first = last
        results.append(torch.cat(rows))
    torch.save([result.cpu() for result in results], folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
