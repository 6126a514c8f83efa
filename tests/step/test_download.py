"""Results reach the host in turn: whatever else runs on the device, each step reads its own."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import stand_in
from hunch import LLM, SamplingParams
from hunch.kernels import gpu_step, gpu_transfer
from hunch.kernels.attention import AttnInputs
from hunch.kernels.step import RowState, StepRows, deliver_ref, pack_ref
from hunch.step.results import NUM_BUFFERS, Download
from tiny_models import write_llama

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_COLUMNS = gpu_step.FIRST + 1
Kernels = ModuleType | SimpleNamespace


class Steps:
    """Steps of some rows, of which only the beginning and the end are run."""

    def __init__(self, kernels: Kernels, num_rows: int, num_columns: int = NUM_COLUMNS) -> None:
        self.kernels, self.num_rows, self.num_columns = kernels, num_rows, num_columns
        self.state = RowState.create(num_rows, 8, 2, 1, 2, 4, DEVICE)
        self.state.known_X.fill_(1)
        self.delivery = Download(num_rows * num_columns, DEVICE)

    def run(self, ids: list[int], mark: int) -> None:
        """Its result is `mark` all over."""
        ids_R = torch.tensor(ids, device=DEVICE)
        none_R = torch.zeros_like(ids_R)
        result_RC = torch.full((len(ids), self.num_columns), mark, device=DEVICE)
        rows = StepRows(ids_R, none_R, none_R, none_R.clone(), none_R[:, None].clone(), result_RC)
        packed_5T = torch.zeros(5, len(ids), dtype=torch.int64, device=DEVICE)
        attn = AttnInputs(*packed_5T[1:4], self.state.table_XB, packed_5T[4], None, 4)
        self.kernels.pack(self.state, rows, packed_5T[0], attn)
        self.kernels.deliver(self.state, rows, self.delivery.buffers(result_RC.numel()))

    def launch(self, mark: int) -> int:
        self.run(list(range(self.num_rows)), mark)
        return self.delivery.next_buffer()

    def apply_all(self, slot: int) -> set[int]:
        size = self.num_rows, self.num_columns
        result_RC, _ = self.delivery.receive(slot, *size, self.num_rows * self.num_columns)
        assert result_RC.shape == (self.num_rows, self.num_columns)
        return set(result_RC.flatten().tolist())


TRITON = SimpleNamespace(pack=gpu_step.pack, deliver=gpu_transfer.deliver)
PLAIN = SimpleNamespace(pack=pack_ref, deliver=deliver_ref)
KERNELS = pytest.mark.parametrize("kernels", [TRITON, PLAIN], ids=["triton", "plain"])


@KERNELS
@pytest.mark.parametrize("size", [(1, NUM_COLUMNS), (6, 400)])  # the latter is written in pieces
def test_steps_under_way_together_keep_their_results(
    kernels: Kernels, size: tuple[int, int]
) -> None:
    steps = Steps(kernels, *size)
    waiting = steps.launch(100)
    for mark in range(101, 101 + 3 * NUM_BUFFERS):
        launched = steps.launch(mark)
        assert steps.apply_all(waiting) == {mark - 1}
        waiting = launched
    assert steps.apply_all(waiting) == {100 + 3 * NUM_BUFFERS}


@KERNELS
def test_runs_without_rows_neither_count_nor_deliver(kernels: Kernels) -> None:
    steps = Steps(kernels, 2)
    for mark in range(2 * NUM_BUFFERS):
        waiting = steps.launch(mark)
        for _ in range(NUM_BUFFERS + 1):
            steps.run([-1, -1], 99)
        assert steps.apply_all(waiting) == {mark}


@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_graphs_captured_while_a_step_runs_change_no_text(
    speculate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.stand_in(monkeypatch)
    path = write_llama(tmp_path / "model", width=32, layers=1)
    prompts = [[5, 6, 7, 8] * 4, [9, 4], [3, 1, 4, 1, 5]]
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    size = {"device": "cpu", "kv_bytes": 2_000_000, "max_model_len": 64}
    with LLM(str(path), speculate=speculate, **size) as llm:
        want = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
        captured = llm.engine.runner.captured
        steps, group = captured.steps, captured._group
        capture, sizes = steps._capture, []

        def again(*size: int) -> object:
            sizes.append(size)
            return capture(*size)

        monkeypatch.setattr(steps, "_capture", again)
        # Every step is of rows that were never seen, and of a kind that was never captured.
        monkeypatch.setattr(
            captured, "_group", lambda work: setattr(captured, "_last_group", None) or group(work)
        )
        step = steps.step
        monkeypatch.setattr(steps, "step", lambda *size: steps._steps.clear() or step(*size))
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == want
    assert len(sizes) > NUM_BUFFERS
