"""The target's opinions and states, computed once: reading a text again takes no pass.

Of each opinion the likeliest columns are kept, which hold nearly all of it; of the states, those
that the student needs. They are in the device's memory if it has room. On a CPU larger ones are in
files beside the job. A GPU without room keeps those of one pack and computes them anew each time,
which is faster than reading them from files.

Shape letters: T tokens of a pack, M positions that teach, N positions there is room for, D width, K
likeliest columns.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hunch.train.packs import Laid, Pack, PackInputs
from hunch.train.states import TOP, States, TopOpinions
from hunch.train.student import Student
from hunch.train.vocab import Columns

MEMORY_SHARE = 0.6  # share of a GPU's free memory
HOST_BYTES = 2**31  # in memory on a CPU; more goes to disk


class Kept:
    """Room for the target's outputs on all texts, filled pack by pack; or on one pack."""

    def __init__(
        self,
        laid: Laid,
        columns: Columns,
        device: torch.device,
        dtype: torch.dtype,
        *,
        feature_widths: tuple[int, ...] = (),
        hidden_width: int = 0,
        folder: Path | None = None,
        room: int = 0,  # tokens of a pack, if there is no room for all texts
    ) -> None:
        self.laid, self.columns, self.is_whole = laid, columns, not room
        self.is_kept = np.zeros(len(laid.lengths), dtype=np.bool_)
        num_tokens, num_top = room or int(laid.start[-1]), min(TOP, len(columns))
        width = sum(feature_widths) + hidden_width
        store = _Store(num_tokens * bytes_of(len(columns), width, dtype), device, folder)
        self.column_NK = store("columns", (num_tokens, num_top), torch.int32)
        self.p_NK = store("opinions", (num_tokens, num_top), dtype)
        self.features = [
            store(f"features-{i}", (num_tokens, width), dtype)
            for i, width in enumerate(feature_widths)
        ]
        self.hidden_ND = self.p_NK[:0]
        if hidden_width:
            self.hidden_ND = store("hidden", (num_tokens, hidden_width), dtype)

    def placed(self, pack: Pack) -> Pack:
        """The pack with the indices of its outputs."""
        return pack if self.is_whole else replace(pack, at_T=np.arange(pack.num_tokens))

    def has(self, pack: Pack) -> bool:
        return bool(self.is_kept[pack.index_B].all())

    def add(self, pack: Pack, inputs: PackInputs, states: States, p_MC: Tensor) -> None:
        """Keep the outputs of a pass over a pack with these inputs."""
        top = TopOpinions.of(p_MC)
        self.p_NK[inputs.at_M] = top.p_MK
        self.column_NK[inputs.at_M] = top.column_MK
        for kept_ND, feature_TD in zip(self.features, states.features, strict=True):
            kept_ND[inputs.at_T] = feature_TD
        if len(self.hidden_ND):
            self.hidden_ND[inputs.at_T] = states.hidden_TD
        self.is_kept[pack.index_B] = self.is_whole

    def opinions(self, inputs: PackInputs) -> TopOpinions:
        """The target's opinions at the rows of these inputs."""
        column_MK = self.column_NK.index_select(0, inputs.at_M)
        return TopOpinions(column_MK, self.p_NK.index_select(0, inputs.at_M), len(self.columns))

    def states(self, inputs: PackInputs) -> States:
        """The target's states, those that the student needs."""
        hidden_TD = self.hidden_ND
        if len(hidden_TD):
            hidden_TD = hidden_TD.index_select(0, inputs.at_T)
        return States(hidden_TD, tuple(x.index_select(0, inputs.at_T) for x in self.features))


class OwnTokens(Kept):
    """For texts whose own tokens teach: there are no outputs to keep."""

    def __init__(self, laid: Laid, columns: Columns) -> None:
        super().__init__(laid, columns, torch.device("cpu"), torch.float32, room=1)
        self.is_whole = True

    def has(self, pack: Pack) -> bool:
        return True

    def opinions(self, inputs: PackInputs) -> TopOpinions:
        own_M1 = torch.ones_like(inputs.label_M, dtype=torch.float32)[:, None]
        return TopOpinions(inputs.label_M[:, None].int(), own_M1, len(self.columns))


def keep_for(student: Student, laid: Laid, *, room: int, folder: Path) -> Kept:
    """Room for the target's outputs that a student needs, on at least `room` tokens."""
    target = student.target
    widths = (target.spec.width,) * len(student.feature_layers)
    hidden = target.spec.width if student.needs_hidden else 0
    size = bytes_of(len(student.columns), sum(widths) + hidden, target.dtype)
    return Kept(
        laid,
        student.columns,
        target.device,
        target.dtype,
        feature_widths=widths,
        hidden_width=hidden,
        folder=folder,
        room=0 if has_room(int(laid.start[-1]) * size, target.device) else room,
    )


def bytes_of(num_columns: int, width: int, dtype: torch.dtype) -> int:
    """Bytes that are kept of one token, with states of this width in all."""
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
