"""Drafting from remembered answers in Triton."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import draft, gpu_synthetic
from hunch.kernels import step as columns
from hunch.kernels.draft import LENGTH_OF, STRIDE, Remembered
from row_states import DEVICE, cells_of, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

NUM_NODES, VOCAB = 5, 50
ANSWER = list(range(20, 45))
ROWS = {  # what follows a prompt of three tokens, and the answer that is remembered
    "goes on": (ANSWER[:4], ANSWER),
    "its start": (ANSWER[:1], ANSWER),
    "nothing is remembered": (ANSWER[:4], []),
    "departs": ([*ANSWER[:3], 7], ANSWER),
    "departed and came back": ([*ANSWER[:3], 7, *ANSWER[4:6]], ANSWER),
    "near the end of the answer": (ANSWER[:23], ANSWER),
    "at its end": (ANSWER, ANSWER),
    "past its end": ([*ANSWER, 9], ANSWER),
    "few to come": (ANSWER[:6], ANSWER),
    "little room": (ANSWER[:7], ANSWER),
    "ended": (ANSWER[:8], ANSWER),
    "no part of the step": (ANSWER[:9], ANSWER),
    "the last token of the vocabulary": ([1], [1, *[VOCAB - 1] * 6]),
}


def test_what_is_drafted_is_right_as_far_as_the_turn_says() -> None:
    names, made = list(ROWS), []
    texts = [[1, 2, 3, *text] for text, _ in ROWS.values()]
    ends = [len(t) + 3 if n == "few to come" else 80 for n, t in zip(names, texts, strict=True)]
    room = [2 if name == "little room" else 9 for name in names]
    checked = [-1 if name == "no part of the step" else 0 for name in names]
    runs = [0, 5, 2, 4, 1, 3, 2]
    for kernel in (gpu_synthetic.remembered, draft.remembered_ref):
        state = cells_of(texts, ends=ends)
        state.is_done_X[names.index("ended")] = 1
        state.num_nodes_X.fill_(1)
        step = step_of(list(range(len(texts))), 0, max_draft=room, num_checked=checked)
        answers = Remembered.create(len(texts), 30, runs, DEVICE)
        for row, (_, answer) in enumerate(ROWS.values()):
            answers.put(row, answer, 3, 10 * row)
        kernel(state, step, NUM_NODES, answers, VOCAB)
        made.append((
            state.draft_XG, state.parents_XG, state.num_nodes_X, step.result_RC, answers.about_XA,
        ))  # fmt: skip
    assert all(torch.equal(got, want) for got, want in zip(*made, strict=True))
    draft_XG, _, count_X, result_RC, about_XA = made[0]
    counts = dict(zip(names, count_X.tolist(), strict=True))
    assert counts == dict.fromkeys(ROWS, 0) | {
        "goes on": 5, "its start": 5, "near the end of the answer": 2, "few to come": 2,
        "little room": 2, "ended": 1, "no part of the step": 1,
        "the last token of the vocabulary": 5,
    }  # fmt: skip
    assert result_RC[:, columns.DRAFTED].tolist()[: names.index("ended")] == [
        counts[name] for name in names[: names.index("ended")]
    ]
    known = len(texts[0])
    run = runs[known * STRIDE % len(runs)]
    drafted = draft_XG[0, :NUM_NODES].tolist()
    assert drafted[:run] == ANSWER[4 : 4 + run]
    assert all(
        token != right for token, right in zip(drafted[run:], ANSWER[4 + run : 9], strict=True)
    )
    is_left = dict(zip(names, (about_XA[:, LENGTH_OF] > 0).tolist(), strict=True))
    assert not any(is_left[name] for name in ("departs", "departed and came back", "past its end"))
    assert draft_XG.max() < VOCAB


def test_an_answer_longer_than_the_table_is_cut() -> None:
    answers = Remembered.create(2, 4, [1], DEVICE)
    answers.put(1, ANSWER, 3, 0)
    assert answers.about_XA[1].tolist() == [4, 3, 0]
    assert answers.tokens_XE[1].tolist() == ANSWER[:4]
