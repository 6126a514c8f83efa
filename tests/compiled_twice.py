"""Compiles products in few bits as a launch does and as workers do, and prints how they differ.

    TRITON_INTERPRET=0 PYTHONPATH=src:tests python tests/compiled_twice.py FOLDER

Constants like "int8" are words to these kernels, and types to Triton's own way to compile ahead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from triton import knobs

import compile_only
from hunch.kernels.gpu_compile import CompileWorkers, Job, Noter
from hunch.kernels.quant import Quantised, pack
from hunch.kernels.quantise import quantise


def held(code_format: str) -> Quantised:
    weight_NK = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    return pack(quantise(weight_NK.bfloat16(), code_format), torch.bfloat16, "cpu")


def main(folder: Path) -> None:
    compile_only.pytest_configure(None)  # type: ignore[arg-type]
    from hunch.kernels.gpu_gemm import gemm

    def launch() -> None:
        for code_format in ("int8", "fp8"):
            for num_rows in (1, 20):
                x_MK = torch.zeros(num_rows, 256, dtype=torch.bfloat16)
                gemm(x_MK, held(code_format), torch.empty(num_rows, 64, dtype=torch.bfloat16))

    jobs: list[Job] = []
    knobs.cache.dir = str(folder / "workers")
    Noter(jobs.append)(launch)
    workers = CompileWorkers(2)
    for job in jobs:
        workers.submit(job)
    done = list(workers.results())
    workers.close()
    knobs.cache.dir = str(folder / "launches")
    launch()
    code = [
        {path.parent.name: path.read_text() for path in sorted((folder / name).rglob("*.ptx"))}
        for name in ("workers", "launches")
    ]
    same = [code[0].get(name) == text for name, text in code[1].items()]
    print(json.dumps({"words": [held(code_format).paired for code_format in ("int8", "fp8")],
                      "compiled": done, "same": same}))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
