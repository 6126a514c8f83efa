"""Looking up in the answers of other requests, in Triton, against the plain form of it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import gpu_recall
from hunch.kernels import step as columns
from hunch.kernels.draft import lookup_ref
from hunch.kernels.shared_texts import SharedTexts, recall_ref
from hunch.kernels.step import RowMethods
from row_states import DEVICE, cells_of, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def texts_of(answers: list[list[int]], size: int) -> SharedTexts:
    texts, first = SharedTexts.create(size, DEVICE), 0
    for answer in answers:
        first = texts.add(answer, first)
    return texts


def random_texts(seed: int, *sizes: int) -> list[list[int]]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 6, (size,), generator=noise).tolist() for size in sizes]


@pytest.mark.parametrize("size", [40, 200, 9000])  # written over, nearly full, in several chunks
@pytest.mark.parametrize("num_nodes", [3, 8])
def test_kernels_follow_their_specification(size: int, num_nodes: int) -> None:
    texts = random_texts(1, 1, 2, 7, 30, 60, 75, 20, 20)
    ring = texts_of([*random_texts(2, 30, 9, 1, 40, 17), [*texts[3][4:], 5, 4, 3]], size)
    made = []
    for kernel in (gpu_recall.recall, recall_ref):
        state, step = cells_of(texts), step_of([0, 1, -1, 2, 3, 4, 5, 6, 7], 0)
        step.max_draft_R[4], step.num_checked_R[2] = 2, -1
        state.is_done_X[6] = 1
        step.methods = RowMethods.create(len(texts), 4, DEVICE)
        step.methods.settings_XW[7, columns.SURE] = 3  # its request names a method
        lookup_ref(state, step, num_nodes, 1, 16)
        own = step.result_RC[:, columns.MATCHED].tolist()
        kernel(state, step, num_nodes, ring)
        counts = state.num_nodes_X.tolist()
        drafts = [state.draft_XG[row, :count].tolist() for row, count in enumerate(counts)]
        parents = [state.parents_XG[row, :count].tolist() for row, count in enumerate(counts)]
        made.append((drafts, parents, step.result_RC.tolist()))
        longer = [
            new > old
            for new, old in zip(step.result_RC[:, columns.MATCHED].tolist(), own, strict=True)
        ]
        assert any(longer)
        assert not all(longer)
        assert longer[4]  # what follows its end stands in the ring
        assert drafts[3] == [5, 4]  # as many as it may
        assert not longer[2]
        assert not longer[7]
        assert not longer[8]
    assert made[0] == made[1]


@pytest.mark.parametrize("recall", [gpu_recall.recall, recall_ref], ids=["kernel", "plain"])
def test_the_longest_match_counts_and_of_equals_the_last(recall) -> None:  # type: ignore[no-untyped-def]
    def guesses(text: list[int], *answers: list[int], size: int = 64) -> tuple[list[int], int]:
        state, step = cells_of([text]), step_of([0], 0)
        lookup_ref(state, step, 8, 1, 16)
        recall(state, step, 8, texts_of(list(answers), size))
        count = int(state.num_nodes_X[0])
        return state.draft_XG[0, :count].tolist(), int(step.result_RC[0, columns.MATCHED])

    assert guesses([1, 2, 3], [2, 3, 7], [2, 3, 8, 9]) == ([8, 9], 2)
    assert guesses([1, 2, 3], [1, 2, 3, 7], [2, 3, 8]) == ([7], 3)
    assert guesses([1, 2, 3], [1, 2, 3], [4]) == ([], 0)  # nothing followed
    assert guesses([3, 5, 3], [3, 6]) == ([5, 3, 5, 3, 5, 3, 5, 3], 1)  # its own text as good
    assert guesses([9, 3, 5, 9, 3], [1, 9, 3, 6]) == ([5, 9, 3, 5, 9, 3, 5, 9], 2)
    assert guesses([8, 9, 3, 5, 9, 3], [5, 9, 3, 6]) == ([6], 3)
    # The ring's seam, and an answer longer than it.
    assert guesses([1, 2, 3], [5] * 4, [1, 2, 3, 4, 6], size=8) == ([4, 6], 3)
    assert guesses([1, 2, 3], [5, 5, 5, 1, 2, 3, 4, 6], size=6) == ([4, 6], 3)


def test_nothing_is_left_after_clear() -> None:
    texts = texts_of([[1, 2, 3]], 8)
    texts.clear()
    assert texts.tokens_K.tolist() == [-1] * 8
