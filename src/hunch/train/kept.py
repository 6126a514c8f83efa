"""The target's opinions and states, computed once: a text that comes again costs no pass.

Of each opinion the likeliest columns are kept (they hold nearly all of it), of the states what the
student asks for. They lie in the device's memory where there is room; a CPU's go to files beside
the job where they are more, a GPU computes them anew, which is faster than reading them.

Shape letters: B texts of a batch, L their padded length, T = B * L, M positions that teach, N
positions of all texts, D width, K likeliest columns, C columns, R rows of a part.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hunch.layers.attention import split_heads
from hunch.train.batches import Batch, Texts, put
from hunch.train.packs import Laid, Pack
from hunch.train.states import TOP, PackRead, TargetOutputs, TopOpinions
from hunch.train.student import Student
from hunch.train.vocab import Columns

MEMORY_SHARE = 0.6  # of what a GPU has free
HOST_BYTES = 2**31  # in memory on a CPU; more goes to disk


class Kept:
    """Room for the outputs on all texts, filled as batches pass."""

    def __init__(
        self,
        texts: Texts,
        columns: Columns,
        device: torch.device,
        dtype: torch.dtype,
        *,
        feature_widths: tuple[int, ...] = (),
        hidden_width: int = 0,
        context: int = 1024,
        folder: Path | None = None,
    ) -> None:
        self.columns, self.device = columns, device
        self._column_V = columns.column_V.cpu()
        self.laid = Laid(texts, self._column_V, context)
        self.num_top = min(TOP, len(columns))
        self.start = self.laid.start
        self.is_kept = np.zeros(len(texts), dtype=np.bool_)
        num_tokens = int(self.start[-1])
        width = sum(feature_widths) + hidden_width
        store = _Store(num_tokens * bytes_of(len(columns), width, dtype), device, folder)
        self.column_NK = store("columns", (num_tokens, self.num_top), torch.int32)
        self.p_NK = store("opinions", (num_tokens, self.num_top), dtype)
        self.features = [
            store(f"features-{i}", (num_tokens, width), dtype)
            for i, width in enumerate(feature_widths)
        ]
        self.hidden_ND = None
        if hidden_width:
            self.hidden_ND = store("hidden", (num_tokens, hidden_width), dtype)

    def has(self, batch: Batch | Pack) -> bool:
        return bool(self.is_kept[batch.index_B].all())

    def _rows(self, batch: Batch) -> Tensor:
        """Where each of the T positions lies; padding has its text's last."""
        start_B = put(torch.from_numpy(self.start[batch.index_B]), batch.ids_BL.device)
        pos_L = torch.arange(batch.ids_BL.shape[1], device=batch.ids_BL.device)
        inside_BL = torch.minimum(pos_L, batch.length_B[:, None] - 1)
        return (start_B[:, None] + inside_BL).flatten()

    def add(self, batch: Batch, outputs: TargetOutputs) -> None:
        """Keep what a pass over the batch said; `outputs` have nothing mixed into them."""
        assert isinstance(outputs.p_MC, Tensor)
        row_N = self._rows(batch)
        pos_T = torch.arange(len(row_N), device=row_N.device) % batch.ids_BL.shape[1]
        inside = (pos_T < batch.length_B.repeat_interleave(batch.ids_BL.shape[1])).nonzero()
        inside_T = inside.squeeze(1)
        features = tuple(feature_TD[inside_T] for feature_TD in outputs.features)
        read = PackRead(outputs.hidden_TD[inside_T], features, outputs.p_MC)
        self._keep(row_N[outputs.row_M], row_N[inside_T], read)
        self.is_kept[batch.index_B] = True

    def add_pack(self, pack: Pack, read: PackRead) -> None:
        """Keep what a pass over the pack said."""
        device = read.p_MC.device
        at_M, at_T = (put(torch.from_numpy(at), device) for at in (pack.at_M, pack.at_T))
        self._keep(at_M, at_T, read)
        self.is_kept[pack.index_B] = True

    def _keep(self, at_M: Tensor, at_T: Tensor, read: PackRead) -> None:
        """Opinions and states, each at its place."""
        top = TopOpinions.of(read.p_MC)
        at_M, at_T = at_M.to(self.p_NK.device), at_T.to(self.p_NK.device)
        self.p_NK[at_M] = top.p_MK.to(self.p_NK)
        self.column_NK[at_M] = top.column_MK.to(self.column_NK)
        for kept_ND, feature_TD in zip(self.features, read.features, strict=True):
            kept_ND[at_T] = feature_TD.to(kept_ND)
        if self.hidden_ND is not None:
            self.hidden_ND[at_T] = read.hidden_TD.to(self.hidden_ND)

    def opinions(self, at_M: Tensor) -> TopOpinions:
        """The target's, at places among all texts."""
        column_MK = self.column_NK.index_select(0, at_M)
        return TopOpinions(column_MK, self.p_NK.index_select(0, at_M), len(self.columns))

    def outputs(
        self, batch: Batch, *, greedy_share: float = 0.0, seed: int = 0, late: float = 1.0
    ) -> TargetOutputs:
        """As `run_target` gives them: positions of answers whose next token has a column."""
        row_T, home = self._rows(batch), self.p_NK.device
        ids_BL, known = batch.ids_BL, batch.host or batch
        # Which positions teach is found where the batch was made: a device that is asked for the
        # number of them has nothing to do until its answer has come and the next work with it.
        label_T = self._column_V[known.ids_BL.roll(-1, dims=1).flatten().cpu()]
        row_M = (known.is_taught_BL().flatten().cpu() & (label_T >= 0)).nonzero().squeeze(1)
        label_M = put(label_T[row_M], ids_BL.device)
        known_M, row_M = row_M, put(row_M, ids_BL.device)
        at_M = row_T[row_M].to(home)
        column_MK = self.column_NK[at_M].to(ids_BL.device)
        p_MK = self.p_NK[at_M].to(ids_BL.device)
        where = row_T.to(home)
        features = tuple(kept_ND[where].to(ids_BL.device) for kept_ND in self.features)
        hidden_TD = row_T.new_empty(0)
        if self.hidden_ND is not None:
            hidden_TD = self.hidden_ND[where].to(ids_BL.device)
        opinions = TopOpinions(column_MK, p_MK, len(self.columns)).toward(label_M, greedy_share)
        return TargetOutputs(
            batch, split_heads, hidden_TD, features, row_M, opinions, label_M, seed, late, known_M
        )


def keep_for(student: Student, texts: Texts, *, context: int, folder: Path) -> Kept | None:
    """Room for what the target says of the texts to a student, where there is any."""
    target = student.target
    widths = (target.spec.width,) * len(student.feature_layers)
    hidden = target.spec.width if student.needs_hidden else 0
    size = bytes_of(len(student.columns), sum(widths) + hidden, target.dtype)
    if not has_room(int(texts.lengths.clip(max=context).sum()) * size, target.device):
        return None
    return Kept(
        texts,
        student.columns,
        target.device,
        target.dtype,
        feature_widths=widths,
        hidden_width=hidden,
        context=context,
        folder=folder,
    )


def bytes_of(num_columns: int, width: int, dtype: torch.dtype) -> int:
    """What is kept of one token, with states of this width in all."""
    return min(TOP, num_columns) * (4 + dtype.itemsize) + width * dtype.itemsize


def has_room(num_bytes: int, device: torch.device) -> bool:
    """Whether this many bytes can be kept; on a CPU always, as they are kept on disk."""
    if device.type != "cuda":
        return True
    return num_bytes <= MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]


class _Store:
    """Makes empty tensors: on the device, or as files in a folder where they are too large."""

    def __init__(self, num_bytes: int, device: torch.device, folder: Path | None) -> None:
        self.device = device
        self.folder = folder if device.type != "cuda" and num_bytes > HOST_BYTES else None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.folder is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        size = max(int(np.prod(shape)), 1)
        path = self.folder / f"{name}.bin"
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)
