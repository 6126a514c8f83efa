"""Matrices in the layout of the C++ kernels: rounded floats, or a GGUF file's blocks as they are.

Shape letters: T packed tokens, M rows, N outputs, K inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.native_library import library, team

INT4, INT8, FLOAT, INT5, K4, K5, K6, TABLE, INT5M, NL, FP4, K2, T2 = range(13)  # of matrices
ROUNDED = (INT4, INT8, FLOAT)  # those that floats can become; the others hold a file's blocks
# GGUF blocks that are kept as they are: their number in the kernels, and the matrix format that
# holds them.
FORMATS = {
    "Q4_0": 1, "Q4_1": 2, "Q8_0": 3, "Q5_0": 4, "Q4_K": 5, "Q5_K": 6, "Q6_K": 7, "Q5_1": 9,
    "IQ4_NL": 10, "MXFP4": 11, "Q2_K": 12, "TQ1_0": 13, "TQ2_0": 14,
}  # fmt: skip
EXACT_FORMAT = {
    "Q4_0": INT4, "Q4_1": INT4, "Q5_0": INT5, "Q8_0": INT8, "Q4_K": K4, "Q5_K": K5, "Q6_K": K6,
    "Q5_1": INT5M, "IQ4_NL": NL, "MXFP4": FP4, "Q2_K": K2, "TQ1_0": T2, "TQ2_0": T2,
}  # fmt: skip
_FLOATS, _CODED = 0, 8


class NativeMatrix:
    """A weight matrix [N, K] in the layout of the kernels."""

    def __init__(
        self, matrix_format: int, num_out: int, num_in: int, num_threads: int | None = None
    ) -> None:
        self.format, self.num_out, self.num_in = matrix_format, num_out, num_in
        self.team = team(num_threads)
        self.handle = library().hunch_matrix_new(matrix_format, num_out, num_in)

    @staticmethod
    def from_floats(
        weight_NK: Tensor, matrix_format: int, num_threads: int | None = None
    ) -> NativeMatrix:
        """Rounded to the format: INT8 and INT4 have a scale per 32 inputs."""
        assert matrix_format in ROUNDED, "the other formats are filled with a file's blocks alone"
        weight_NK = weight_NK.to(torch.float32).contiguous()
        matrix = NativeMatrix(matrix_format, *weight_NK.shape, num_threads)
        matrix._fill(_FLOATS, weight_NK)
        return matrix

    def put_floats(self, first: int, weight_NK: Tensor) -> None:
        """Rows from `first` on, a multiple of 16, rounded to the format."""
        self._fill(_FLOATS, weight_NK.to(torch.float32).contiguous(), first)

    def put_blocks(self, name: str, first: int, data: Tensor) -> None:
        """Rows from `first` on, a multiple of 16, of GGUF blocks."""
        self._fill(FORMATS[name], data.contiguous(), first)

    def set_levels(self, levels_16: Tensor, unit: float) -> None:
        """What the codes of a TABLE mean: whole numbers of -127 to 127, and what 1 is worth."""
        assert self.format == TABLE
        levels = levels_16.to(torch.int8).contiguous()
        library().hunch_matrix_levels(self.handle, levels.data_ptr(), unit)

    def put_coded(self, first: int, data: Tensor) -> None:
        """Rows of a TABLE from `first` on, a multiple of 16: for every 256 inputs d as float16, 16
        scales as int8, and codes in the order of Q4_0."""
        assert self.format == TABLE
        self._fill(_CODED, data.contiguous(), first)

    def _fill(self, form: int, rows: Tensor, first: int = 0) -> None:
        row_bytes = rows[0].numel() * rows.element_size()
        assert first % 16 == 0
        assert first + len(rows) <= self.num_out
        library().hunch_matrix_fill(
            self.handle, self.team, form, rows.data_ptr(), row_bytes, first, len(rows)
        )

    @property
    def nbytes(self) -> int:
        return int(library().hunch_matrix_bytes(self.handle))

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows as float32: embeddings."""
        assert ids_T.numel() == 0 or 0 <= int(ids_T.min()) <= int(ids_T.max()) < self.num_out
        ids = ids_T.to(torch.int64).contiguous()
        out = torch.empty(*ids_T.shape, self.num_in)
        library().hunch_matrix_rows(self.handle, ids.data_ptr(), ids.numel(), out.data_ptr())
        return out

    def __call__(self, x_MK: Tensor, *, is_fine: bool = False) -> Tensor:
        """x times the matrix, float32; a row's result is the same bits in any company.

        A quantised matrix takes x as whole numbers of 8 bits, or 14 where `is_fine`, with a scale
        per row and 32 inputs.
        """
        x_MK = x_MK.to(torch.float32).contiguous()
        out_MN = torch.empty(*x_MK.shape[:-1], self.num_out)
        num_rows = x_MK.numel() // self.num_in
        library().hunch_multiply(
            self.handle, self.team, x_MK.data_ptr(), num_rows, out_MN.data_ptr(), is_fine
        )
        return out_MN

    def __del__(self) -> None:
        if getattr(self, "handle", None) and library is not None:
            library().hunch_matrix_free(self.handle)
