"""Looking up in Triton: the own text, and a phrase table beside it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hunch.drafting.ngram import NgramText
from hunch.kernels import draft, gpu_expect, gpu_graft, gpu_lookup
from hunch.kernels import step as columns
from hunch.kernels.gpu_lookup import NUM_PLACES, DevicePhrases
from hunch.kernels.lookup import BY_TABLE, NUM_ASKED
from hunch.kernels.phrases import ContinuedChain
from hunch.kernels.step import AS_OTHERS, BY_PREDICTION, NEVER, RowMethods
from phrase_tables import table_of
from row_states import DEVICE, cells_of, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def test_lookup_is_the_ngram_drafter() -> None:
    gen = torch.Generator().manual_seed(5)
    texts = [torch.randint(0, 4, (n,), generator=gen).tolist() for n in (1, 2, 7, 30, 60, 75)]
    texts += [[1, 2, 1, 2, 1, 2], [1, 2, 3, 4], [1, 1, 1]]
    state = cells_of(texts)
    room = [8, 8, 8, 8, 8, 3, 8, 8, 8]
    step = step_of(list(range(len(texts))), 0, max_draft=room)
    state.is_done_X[8] = 1
    gpu_lookup.lookup(state, step, 8, 1, 4)
    for row, text in enumerate(texts):
        host = NgramText(1, 4)
        host.extend(text)
        matched, place = host.find() if row != 8 else (0, 0)
        want = list(text)
        for i in range(8 if matched else 0):
            want.append(want[place + i])
        want = want[len(text) :]
        sent = want[: min(room[row], 80 - len(text) - 1)]
        line = step.result_RC[row].tolist()
        assert int(state.num_nodes_X[row]) == line[columns.DRAFTED] == len(sent)
        assert line[columns.MATCHED] == matched
        assert state.draft_XG[row, : len(sent)].tolist() == sent
        assert state.parents_XG[row, : len(sent)].tolist() == list(range(-1, len(sent) - 1))
        if matched:
            assert line[-8:] == want


def test_a_short_match_leaves_the_draft_that_is_there() -> None:
    gen = torch.Generator().manual_seed(6)
    texts = [torch.randint(0, 4, (n,), generator=gen).tolist() for n in (2, 7, 30, 60)]
    rows = list(range(len(texts)))
    made = []
    for kernel in (gpu_lookup.lookup, draft.lookup_ref):
        state, step = cells_of(texts), step_of(rows, 0, max_draft=[8, 8, 8, 5])
        state.draft_XG.fill_(77)
        state.parents_XG.fill_(-1)
        state.num_nodes_X.fill_(6)
        step.result_RC[:, columns.DRAFTED] = 6
        kernel(state, step, 8, 1, 4, 3)
        made.append((state.draft_XG, state.parents_XG, state.num_nodes_X, step.result_RC[:, :6]))
    assert all(torch.equal(got, want) for got, want in zip(*made, strict=True))
    is_kept = made[0][0][:, 0] == 77
    assert is_kept.any()
    assert not is_kept.all()


@pytest.mark.parametrize("seed", range(4))
def test_another_follower_gets_a_chain_of_its_own(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 3, (n,), generator=gen).tolist() for n in (1, 7, 30, 60, 75, 77)]
    texts += [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 7, 5, 6]]
    rooms = [8, 8, 8, 7, 8, 8, 8, 8]
    made = []
    for kernel in (gpu_lookup.lookup, draft.lookup_ref):
        state, step = cells_of(texts), step_of(list(range(8)), 0, max_draft=rooms)
        state.draft_XG.fill_(-9)
        state.is_done_X[2] = seed == 1
        if seed > 1:  # a row whose request names a lookup gets a chain
            step.methods = RowMethods.create(8, 4, DEVICE)
            own = [columns.SURE, columns.MIN_MATCH, columns.MAX_MATCH]
            step.methods.settings_XW[3, own] = torch.tensor([0, 1, 4], device=DEVICE)
        kernel(state, step, 8, 1, 4, num_second=3)
        counts = state.num_nodes_X.tolist()
        drafts = [state.draft_XG[row, :count].tolist() for row, count in enumerate(counts)]
        parents = [state.parents_XG[row, :count].tolist() for row, count in enumerate(counts)]
        result = step.result_RC[state.is_done_X == 0, columns.DRAFTED :].tolist()
        made.append((counts, drafts, parents, result))
    assert made[0] == made[1]
    counts, drafts, parents, _ = made[0]
    assert drafts[6] == [4, 1, 2, 4, 1, 3, 1, 2]
    assert parents[6] == [-1, 0, 1, 2, 3, -1, 5, 6]
    assert drafts[7] == [7, 5, 6] * 2 + [7, 5]  # one follower alone
    assert parents[7] == list(range(-1, 7))
    assert seed < 2 or parents[3] == list(range(-1, 6))
    assert 0 < counts[5] < 8, "near the row's end there is no second chain"


@pytest.mark.parametrize("num_drafted", [1, 3, 5])
def test_the_table_goes_on_after_a_chain(num_drafted: int) -> None:
    """Of contexts that stand in the chain alone, or begin in the text."""
    gen = torch.Generator().manual_seed(7)
    texts = [torch.randint(0, 6, (n,), generator=gen).tolist() for n in (1, 4, 9, 30, 60, 72)]
    entries = {(a, b): ((3 * a + b) % 6, 9) for a in range(6) for b in range(4)}
    phrases = DevicePhrases.of(table_of({**entries, (2,): (5, 9), (1, 2, 3): (0, 9)}), DEVICE)
    made = []
    for kernel in (gpu_lookup.lookup, draft.lookup_ref):
        state, step = cells_of(texts), step_of(list(range(6)), 0, max_draft=[8, 8, 8, 8, 6, 8])
        state.draft_XG.copy_(torch.arange(state.draft_XG.numel()).view_as(state.draft_XG) % 6)
        state.parents_XG.copy_(torch.arange(state.draft_XG.shape[1]) - 1)
        state.num_nodes_X.fill_(num_drafted)
        state.num_nodes_X[1] = num_drafted - 1  # its chain ended before
        kernel(state, step, 8, 1, 16, NEVER, phrases=phrases, chain=ContinuedChain(num_drafted, 7))
        num_nodes_X = state.num_nodes_X.tolist()
        drafts = [state.draft_XG[row, :count].tolist() for row, count in enumerate(num_nodes_X)]
        made.append((drafts, step.result_RC[:, columns.DRAFTED].tolist()))
        assert torch.equal(state.parents_XG[3], torch.arange(state.draft_XG.shape[1]) - 1)
    assert made[0] == made[1]
    lengths = [len(chain) for chain in made[0][0]]
    assert lengths[1] == num_drafted - 1
    assert max(lengths) > num_drafted


def guesses_of(text: list[int], entries: dict, num_nodes: int = 8) -> tuple[list[int], int]:
    """What one row drafts, and what its match is called."""
    state, step = cells_of([text]), step_of([0], 0)
    phrases = DevicePhrases.of(table_of(entries), DEVICE)
    gpu_lookup.lookup(state, step, num_nodes, 1, 16, phrases=phrases)
    count = int(state.num_nodes_X[0])
    assert step.result_RC[0, -8:].tolist() == [*state.draft_XG[0, :count].tolist()] + [-1] * (
        8 - count
    )
    return state.draft_XG[0, :count].tolist(), int(step.result_RC[0, columns.MATCHED])


def test_the_table_goes_on_where_the_text_is_new() -> None:
    table = {(2, 3): (4, 9), (3, 4): (5, 9), (5,): (6, 9)}
    assert guesses_of([1, 2, 3], table) == ([4, 5, 6], BY_TABLE)
    assert guesses_of([1, 2, 9], table) == ([], 0)
    assert guesses_of([5], table) == ([6], BY_TABLE)


def test_the_longest_context_is_asked() -> None:
    table = {(3,): (10, 15), (2, 3): (11, 15), (1, 2, 3): (12, 15)}
    assert guesses_of([7, 3], table)[0] == [10]
    assert guesses_of([7, 2, 3], table)[0] == [11]
    assert guesses_of([7, 1, 2, 3], table)[0] == [12]


def test_a_sure_entry_outbids_a_short_match_and_none_a_long_one() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    for length, is_told in ((1, True), (8, False)):
        again = [*text, 30, 31, *text[8 - length :]]
        found, matched = guesses_of(again, {(8,): (40, 12)})
        assert found[0] == (40 if is_told else 30)
        assert matched == (BY_TABLE if is_told else length)
    assert guesses_of([*text, 30, 31, 8], {(8,): (40, 0)})[0][0] == 30  # seldom right: not believed


def test_a_chain_that_the_table_took_over_does_not_go_back() -> None:
    text = [1, 2, 30, 31, 32, 1, 2]
    found, matched = guesses_of(text, {(2, 30): (50, 15), (50,): (51, 15)})
    assert found == [30, 50, 51]
    assert matched == 2


def test_the_table_is_asked_for_a_few_guesses() -> None:
    table = {(token,): (token + 1, 15) for token in range(1, 40)}
    assert guesses_of([1], table)[0] == list(range(2, 2 + NUM_ASKED))


@pytest.mark.parametrize("seed", range(2))
def test_many_rows_are_what_plain_python_says(seed: int) -> None:
    rng = random.Random(seed)
    table = {}
    for _ in range(400):
        context = tuple(rng.randrange(12) for _ in range(rng.choice((1, 2, 2, 3, 3))))
        table[context] = rng.randrange(12), rng.randrange(16)
    phrases = DevicePhrases.of(table_of(table), DEVICE)
    texts = [[rng.randrange(12) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
    made = []
    for kernel in (gpu_lookup.lookup, draft.lookup_ref):
        state, step = cells_of(texts), step_of(list(range(12)), 0, max_draft=[8] * 6 + [2] * 6)
        state.is_done_X[3] = 1
        kernel(state, step, 8, 1, 16, phrases=phrases)
        sent = [state.draft_XG[r, : int(state.num_nodes_X[r])].tolist() for r in range(12)]
        lines = [step.result_RC[r].tolist() for r in range(12) if r != 3]
        made.append((sent, lines))
    assert made[0] == made[1]
    assert any(map(len, made[0][0]))


def test_every_entry_is_found_in_its_bucket() -> None:
    rng = np.random.default_rng(0)
    entries = {tuple(c): (int(c[0]), int(c[1]) % 16) for c in rng.integers(0, 60, (5000, 3))}
    table = table_of(entries)
    phrases = DevicePhrases.of(table, "cpu")
    kept = phrases.entries.numpy()
    for at in rng.integers(0, len(table.hash_E), 200):
        found = int(table.hash_E[at])
        bucket = found >> (32 - phrases.bits)
        places = kept[bucket * NUM_PLACES : (bucket + 1) * NUM_PLACES]
        want = found << 32 | int(table.level_E[at]) << 24 | int(table.token_E[at])
        assert want in (places.view(np.uint64)).tolist()
    assert (kept != -1).sum() == len(table.hash_E)


def test_a_table_comes_while_steps_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same memory, as captured steps know no other."""
    monkeypatch.setattr(gpu_lookup, "ROOM_BITS", 6)
    phrases, found = DevicePhrases.with_room(None, DEVICE), []
    where = phrases.entries.data_ptr(), phrases.needed.data_ptr()
    for table in (None, {(2, 3): (4, 9), (4,): (5, 9)}, {(3,): (9, 15)}):
        if table is not None:
            phrases.take(table_of(table))
        state, step = cells_of([[1, 2, 3]]), step_of([0], 0)
        gpu_lookup.lookup(state, step, 8, 1, 16, phrases=phrases)
        found.append(state.draft_XG[0, : int(state.num_nodes_X[0])].tolist())
    assert found == [[], [4, 5], [9]]
    assert where == (phrases.entries.data_ptr(), phrases.needed.data_ptr())


def test_a_table_of_crowded_hashes_takes_little_room() -> None:
    table = table_of({(token,): (token, 9) for token in range(40)})
    table.hash_E = np.array([7] * 10 + list(range(100, 130)), dtype=np.uint32)  # alike, and close
    kept = DevicePhrases.of(table, "cpu").entries.numpy()
    assert len(kept) <= 2**10
    assert NUM_PLACES <= (kept != -1).sum() <= 31


# --- rows that are drafted for in ways of their own -----------------------------------------------


def methods_of(settings: list[list[int]], expected: list[list[int]] | None = None) -> RowMethods:
    methods = RowMethods.create(len(settings), 64, DEVICE)
    methods.settings_XW.copy_(torch.tensor(settings))
    for row, tokens in enumerate(expected or []):
        methods.expected_XE[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        methods.settings_XW[row, columns.EXPECTED] = len(tokens)
    return methods


def test_a_row_looks_up_by_its_own_settings() -> None:
    rng = random.Random(3)
    phrases = DevicePhrases.of(table_of({(t,): (t + 1, 15) for t in range(6)}), DEVICE)
    text = [rng.randrange(5) for _ in range(40)]
    texts = [[*text, 5, *text[10:16]]] * 5
    own = [
        [AS_OTHERS, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 3, 0, 0, 0, 0, 0],
        [0, 2, 16, 1, 0, 0, 0, 0],
        [NEVER, 1, 16, 0, 0, 0, 0, 0],
        [0, 9, 12, 0, 0, 0, 0, 0],
    ]
    made = []
    for kernel in (gpu_lookup.lookup, draft.lookup_ref):
        state, step = cells_of(texts), step_of(list(range(5)), 0)
        step.methods = methods_of(own)
        state.draft_XG.fill_(77)
        state.num_nodes_X.fill_(6)
        kernel(state, step, 8, 1, 16, 20, phrases)
        counts = state.num_nodes_X.tolist()
        made.append(
            (state.draft_XG.tolist(), counts, step.result_RC[:, columns.MATCHED :].tolist())
        )
    assert made[0] == made[1]
    drafts, counts, lines = made[0]
    assert counts == [6, 8, counts[2], 6, 0]
    assert [draft[0] == 77 for draft in drafts] == [True, False, False, True, True]
    assert lines[1][0] == 3  # no longer match counts for it
    assert lines[4][0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_guesses_join_the_tree_that_is_there(seed: int) -> None:
    """Each path of the tree and of the guesses is in what is checked, once."""
    rng = random.Random(seed)
    texts = [[1, 2, 3]] * 6
    own = [[AS_OTHERS] + [0] * 7] * 5 + [[0, 1, 3, 0, 0, 0, 0, 0]]
    trees = [[(rng.randrange(3), rng.randrange(-1, n)) for n in range(6)] for _ in texts]
    trees = [list(dict.fromkeys(tree)) for tree in trees]
    guesses = [[rng.randrange(3) for _ in range(rng.randrange(7))] for _ in texts]
    made = []
    for kernel in (gpu_graft.graft, draft.graft_ref):
        state = cells_of(texts, max_nodes=16)
        step = step_of(list(range(6)), 0, max_draft=[16, 16, 16, 9, 16, 16])
        step.methods = methods_of(own)
        state.is_done_X[4] = 1
        for row, tree in enumerate(trees):
            for node, (token, parent) in enumerate(tree):
                # A node that fell out leaves its children to the root.
                parent = parent if parent < node else -1
                state.draft_XG[row, node], state.parents_XG[row, node] = token, parent
            state.num_nodes_X[row] = len(tree)
            first = step.guesses_at
            step.result_RC[row, first : first + 8] = -1
            for place, token in enumerate(guesses[row]):
                step.result_RC[row, first + place] = token
        before = [_paths(state, row) for row in range(6)]
        kernel(state, step, 6, 16)
        made.append(
            (state.draft_XG.tolist(), state.parents_XG.tolist(), state.num_nodes_X.tolist())
        )
        for row in (0, 1, 2):
            wanted = {tuple(guesses[row][:n]) for n in range(1, len(guesses[row]) + 1)}
            assert set(_paths(state, row)) == {*before[row], *wanted}
        assert _paths(state, 4) == before[4]
        assert _paths(state, 5) == before[5]
        assert int(state.num_nodes_X[3]) <= 9
    assert made[0] == made[1]


def _paths(state: columns.RowState, row: int) -> list[tuple[int, ...]]:
    """What each node of a row's draft and its ancestors say."""
    return [
        tuple(int(state.draft_XG[row, n]) for n in columns.path_of(state, row, node))
        for node in range(int(state.num_nodes_X[row]))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_prediction_is_followed_as_plain_python_says(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, vocab = 10, rng.choice((3, 30))
    texts, settings, expected = [], [], []
    for _ in range(num_rows):
        text = [rng.randrange(vocab) for _ in range(rng.randrange(4, 60))]
        begin = rng.randrange(0, 12)
        changed = [t if rng.random() < 0.9 else rng.randrange(vocab) for t in text]
        answer = changed[begin : begin + rng.randrange(1, 20)]
        prompt = [rng.randrange(vocab) for _ in range(5)]
        texts.append(prompt + answer)
        expected.append(text if rng.random() < 0.9 else [])
        settings.append(
            [AS_OTHERS, 0, 0, 0, 0, rng.random() < 0.3, 5, rng.randrange(-1, 3) + begin]
        )
    made = []
    for kernel in (gpu_expect.expect, draft.expect_ref):
        state, step = (
            cells_of(texts),
            step_of(list(range(num_rows)), 0, max_draft=[8] * 8 + [2] * 2),
        )
        state.is_done_X[3] = 1
        state.num_nodes_X.copy_(torch.tensor([2, 0] * 5))
        state.draft_XG.fill_(77)
        step.methods = methods_of(settings, expected)
        kernel(state, step, 8)
        made.append(
            [
                state.draft_XG.tolist(), state.num_nodes_X.tolist(), step.result_RC.tolist(),
                step.methods.settings_XW.tolist(),
            ]
        )  # fmt: skip
    assert made[0] == made[1]
    assert any(line[columns.MATCHED] > BY_PREDICTION for line in made[0][2])


def test_a_changed_token_does_not_lose_the_prediction() -> None:
    expected = list(range(10, 40))
    for answer, following in (
        ([10, 11, 12], [13, 14]),
        ([10, 11, 99], [13, 14]),  # one for one
        ([10, 11, 98, 99, 12, 13], [14, 15]),  # two more than expected
        ([10, 11, 20, 21], [22, 23]),  # some left out
    ):
        state, step = cells_of([[1, 2, *answer]]), step_of([0], 0)
        step.methods = methods_of([[AS_OTHERS, 0, 0, 0, 0, 0, 2, 0]], [expected])
        gpu_expect.expect(state, step, 2)
        assert state.draft_XG[0, :2].tolist() == following
