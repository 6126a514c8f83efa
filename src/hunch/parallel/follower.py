"""A rank other than 0: holds its part of each model and computes what rank 0 orders.

`python -m hunch.parallel.follower RANK SIZE DEVICE FOLDER`, started by executor.py. It leaves when
rank 0 does: its standard input ends then, or the line to it breaks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.config import ModelConfig
from hunch.errors import HunchError
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.parallel.link import Link, Numbers, rank_device
from hunch.parallel.orders import Op, Pass, read_load
from hunch.parallel.part import Layout, Part
from hunch.parallel.whole import NoMemory
from hunch.step.batch import Batch


class Follower:
    """The loop of a rank."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.parts: dict[int, Part] = {}
        self.kv: dict[int, KVCache] = {}
        self.steps: dict[int, Any] = {}  # by model: its parts of captured steps
        self.passes: dict[int, Any] = {}  # by KV cache: captured passes of its model
        self.begun: dict[int, deque[Pass]] = {}  # by model: passes yet to be finished
        self.moves: dict[int, list[Tensor]] = {}  # by KV cache: slots whose KV has yet to move
        self.lacked = ""  # the reason why a pass failed, until rank 0 asks for it

    @torch.inference_mode()
    def run(self) -> None:
        """Carry out orders until rank 0 ends."""
        while True:
            order = self.link.receive()
            if order[0] == Op.CLOSE:
                return
            self.obey(order)

    def obey(self, order: Numbers) -> None:
        match Op(int(order[0])):
            case Op.LOAD:
                self._load(read_load(order))
            case Op.FORWARD:
                self._forward(Pass.unpack(order))
            case Op.LOGITS:
                if (part := self.parts.get(int(order[1]))) is not None:
                    self._try(partial(part.follow_logits, int(order[2])))
            case Op.ASK:
                reason, self.lacked = self.lacked, ""
                self.link.tell_rank_0(reason)
            case Op.ROWS:
                if (part := self.parts.get(int(order[1]))) is not None:
                    part.output_rows(torch.from_numpy(order[2:]))
            case Op.FINISH:
                if (part := self.parts.get(int(order[1]))) is not None and part.stage.is_last:
                    self._run(part, self.begun[int(order[1])].popleft())
            case Op.STEP:
                self._step(order[1:].tolist())
            case Op.MOVES:
                if int(order[1]) in self.kv:
                    self._note_moves(int(order[1]), torch.from_numpy(order[2:].reshape(2, -1)))
            case Op.CLEAR:
                if (kv := self.kv.get(int(order[1]))) is not None:
                    kv.clear(torch.from_numpy(order[2:]).to(self.link.device))
            case Op.STATES:
                if (kv := self.kv.get(int(order[1]))) is not None and kv.states is not None:
                    kv.states.copy(int(order[2]), int(order[3]))
            case Op.PASSES:
                self._capture_passes(*order[1:].tolist())
            case Op.PREPARE:
                self._prepare_pass(*order[1:].tolist())
            case Op.PROBE:
                if (part := self.parts.get(int(order[1]))) is not None:
                    part.probe(int(order[2]))
            case Op.DROP:
                self.parts.pop(int(order[1]), None)
            case Op.FREE:
                self.kv.pop(int(order[1]), None)
                self.moves.pop(int(order[1]), None)
                self.passes.pop(int(order[1]), None)
                for steps in self.steps.values():
                    steps.forget(int(order[1]))

    def _load(self, asked: dict[str, Any]) -> None:
        layout, text = Layout(asked["num_ranks"], asked["num_stages"]), ""
        if self.link.rank < layout.size:
            try:
                model = ModelConfig(**asked["model"])
                path = Path(asked["path"])
                self.parts[asked["number"]] = Part.load(self.link, path, model, layout)
            except (HunchError, OSError, RuntimeError) as error:
                text = f"{type(error).__name__}: {error}"
        self.link.tell_rank_0(text)

    def _forward(self, asked: Pass) -> None:
        part = self.parts.get(asked.model)
        if part is None:
            return  # a drafter that only some ranks hold
        if part.line is not None and part.stage.is_last:
            self.begun.setdefault(asked.model, deque()).append(asked)
        else:
            self._run(part, asked)

    def _step(self, numbers: list[int]) -> None:
        """Run this rank's part of a captured step."""
        from hunch.parallel.step_parts import StepParts, StepSize  # needs Triton

        asked, is_new = StepSize(*numbers[:-1]), bool(numbers[-1])
        part = self.parts[asked.model]
        kv = self._kv(part, asked.kv, asked.num_slots)
        self._move(asked.kv)
        if asked.model not in self.steps:
            self.steps[asked.model] = StepParts(part, self.link)
        self.steps[asked.model].run(asked, kv, is_new=is_new)

    def _prepare_pass(self, model: int, kv: int, size: int, depth: int) -> None:
        from hunch.parallel.step_parts import prepare_led  # needs Triton

        prepare_led(self.parts[model], self.link, self.passes[kv], size, depth)

    def _capture_passes(self, model: int, kv: int, num_slots: int, *sizes: int) -> None:
        from hunch.parallel.step_parts import passes_of  # needs Triton

        part, (num_rows, num_blocks, block_size) = self.parts[model], sizes
        cache = self._kv(part, kv, num_slots)
        self.passes[kv] = passes_of(part, cache, num_rows, num_blocks, block_size)

    def _kv(
        self, part: Part, number: int, num_slots: int, rows: tuple[int, int] = (0, 0)
    ) -> KVCache:
        if number not in self.kv:
            self.kv[number] = part.new_kv(num_slots, self.link.device, *rows)
        return self.kv[number]

    def _run(self, part: Part, asked: Pass) -> None:
        """Run a pass; if memory is short, nothing of it counts."""
        self._note_moves(asked.kv, asked.moves_2M)

        def prepared() -> KVCache:
            kv = self._kv(part, asked.kv, asked.num_slots, asked.rows)
            self._move(asked.kv)
            return kv

        batch = Batch(asked.ids_T, asked.attn, [])
        if asked.kv in self.passes:
            from hunch.parallel.step_parts import run_led  # needs Triton

            self._try(partial(run_led, part, self.passes[asked.kv], batch, prepared))
            return

        def inputs() -> tuple[Tensor, AttnInputs, KVCache]:
            moved = batch.to(self.link.device)
            return moved.ids_T, moved.attn, prepared()

        self._try(partial(part.run, len(asked.ids_T), asked.feature_layers, inputs))

    def _try(self, share: Callable[[], object]) -> None:
        """Run this rank's share of a pass. If memory is short, rank 0 will ask for the error."""
        try:
            share()
        except NoMemory as error:
            self.lacked = str(error) or "no memory"

    def _note_moves(self, kv: int, moves_2M: Tensor) -> None:
        if moves_2M.shape[1]:
            self.moves.setdefault(kv, []).append(moves_2M)

    def _move(self, number: int) -> None:
        """Move KV as rank 0 did; what memory is short for is moved before the next pass."""
        waiting = self.moves.get(number, [])
        while waiting:
            self.kv[number].move(*waiting[0].to(self.link.device))
            del waiting[0]


def leave_with_parent() -> None:
    """End this process when rank 0 ends, as its standard input is closed then."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main(rank: int, size: int, device_type: str, folder: Path) -> int:
    leave_with_parent()
    torch.set_num_threads(int(os.environ["HUNCH_RANK_THREADS"]))
    try:
        print("here", flush=True)
    except BrokenPipeError:  # rank 0 is gone already
        os._exit(0)
    link = Link.in_folder(folder, rank, size, rank_device(device_type, rank, size))
    return follow(link)


def follow(link: Link) -> int:
    """Carry out rank 0's orders until it is done; returns the exit code."""
    try:
        Follower(link).run()
    except RuntimeError as error:
        if "closed by peer" in str(error) or "reset by peer" in str(error):
            return 1  # another rank is gone: rank 0 reports which
        print(f"{type(error).__name__}: {error}", flush=True)
        raise
    finally:
        link.stop_waiting()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
