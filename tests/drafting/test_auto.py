"""Auto falls silent where guesses fail, and comes back when they are right again."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hunch.drafting.recycling import RecyclingDrafter
from hunch.drafting.trees import nodes_of
from hunch.kernels.successor_entries import ONE_TOKEN, Entries
from hunch.types import Request, SamplingParams, Speculation
from spec_rows import Desk

CURVE = {1: 1.0, 2: 1.13, 4: 1.42, 8: 2.1, 16: 4.0}


def noise(rng: random.Random, count: int) -> list[int]:
    """A few words in random order: something always matches, nothing can be guessed."""
    return [rng.randrange(12) for _ in range(count)]


def test_random_text_is_decoded_almost_plainly():
    rng = random.Random(0)
    desk = Desk("auto", CURVE)
    desk.commit(0, noise(rng, 200), is_prompt=True)
    desk.replay(0, noise(rng, 60))
    passes, drafted, _ = desk.replay(0, noise(rng, 300))
    assert drafted / passes < 0.2


def test_it_comes_back_when_the_text_can_be_guessed_again():
    rng = random.Random(1)
    desk = Desk("auto", CURVE)
    passage = [rng.randrange(1000) for _ in range(150)]
    desk.commit(0, passage + noise(rng, 100), is_prompt=True)
    desk.replay(0, noise(rng, 300))
    passes, _, accepted = desk.replay(0, passage)
    assert accepted / len(passage) > 0.6
    assert len(passage) / passes > 2.5


def test_it_pays_on_copied_text_by_the_curve_it_was_given():
    rng = random.Random(2)
    desk = Desk("auto", CURVE)
    passage = [rng.randrange(1000) for _ in range(300)]
    desk.commit(0, passage, is_prompt=True)
    passes, drafted, _ = desk.replay(0, passage)
    mean_cost = desk.cost.seconds(1 + round(drafted / passes)) / desk.cost.seconds(1)
    assert len(passage) / passes / mean_cost > 2.0


def test_where_rows_cost_a_whole_pass_nothing_is_drafted():
    desk = Desk("auto", {1: 1.0, 2: 2.0, 16: 16.0})
    desk.commit(0, [1, 2, 3, 4] * 20, is_prompt=True)
    assert desk.chain() == []


def test_options_reach_the_method_and_unknown_ones_are_told():
    desk = Desk("auto:num_nodes=3")
    desk.commit(0, [1, 2, 3, 4] * 20, is_prompt=True)
    assert len(desk.chain()) == 3


def told(mode: str, prediction: list[int], prompt: list[int], spec: str = "auto") -> Desk:
    """A desk whose row 0 has a wish."""
    desk = Desk(spec)
    wish = SamplingParams(speculation=Speculation(mode=mode))
    desk.rows.requests = [
        Request(id="a", prompt_ids=prompt, params=wish, seed=0, prediction_ids=tuple(prediction)),
        None,
        None,
        None,
    ]
    desk.commit(0, prompt, is_prompt=True)
    return desk


REPEATED = [1, 2, 3, 4, 5, 6, 7, 8] * 6
EXPECTED = list(range(500, 560))


def test_a_prediction_on_track_is_drafted_from_and_named():
    desk = told("auto", EXPECTED, REPEATED)
    desk.commit(0, EXPECTED[:5])
    draft = desk.propose(0)
    assert list(draft.methods) == ["prediction"]
    assert draft.tokens_RN[0].tolist()[:8] == EXPECTED[5:13]


def test_where_the_prediction_fails_the_suffix_drafts():
    desk = told("auto", EXPECTED, REPEATED)
    desk.commit(0, REPEATED[:12])
    draft = desk.propose(0)
    assert list(draft.methods) == ["suffix"]
    assert draft.tokens_RN[0].tolist()[:3] == [5, 6, 7]


@pytest.mark.parametrize("mode", ["suffix", "ngram", "prediction"])
def test_a_request_may_name_its_method(mode):
    desk = told(mode, EXPECTED, REPEATED)
    draft = desk.propose(0)
    assert list(draft.methods) == [mode]
    first = EXPECTED[0] if mode == "prediction" else 1
    assert draft.tokens_RN[0, 0] == first


def test_rows_with_different_wishes_share_a_draft():
    desk = told("ngram", EXPECTED, REPEATED)
    desk.commit(1, REPEATED, is_prompt=True)
    desk.commit(2, [9, 9, 4, 17, 21], is_prompt=True)
    draft = desk.propose(0, 1, 2)
    assert list(draft.methods) == ["ngram", "suffix", "suffix"]
    counts = draft.num_nodes_R.tolist()
    assert 0 < counts[0] <= 8 < counts[1] <= 16
    assert draft.tokens_RN[0, : counts[0]].tolist() == REPEATED[: counts[0]]
    assert draft.tokens_RN[1, : counts[1]].tolist() == REPEATED[: counts[1]]


def test_a_row_forgets_the_wish_of_the_request_before():
    desk = told("prediction", EXPECTED, REPEATED)
    desk.leave(0)
    desk.rows.requests[0] = Request(
        id="b", prompt_ids=REPEATED, params=SamplingParams(), seed=0, prediction_ids=()
    )
    desk.commit(0, REPEATED, is_prompt=True)
    draft = desk.propose(0)
    assert list(draft.methods) == ["suffix"]
    assert draft.tokens_RN[0, 0] == 1


def test_successors_are_drafted_beside_the_lookups_guesses():
    """The same for a row alone as among others."""
    entries = Entries(*map(np.array, ([ONE_TOKEN] * 2, [4, 9], [7, 11], [120, 130])))
    desk = Desk("auto", {1: 1.0, 64: 1.1})
    context = desk.drafter.context
    desk.drafter.recycling = RecyclingDrafter({}, None, context, entries, learns=False)
    desk.commit(0, [9, 4, 9, 4], is_prompt=True)
    desk.commit(1, [20, 9], is_prompt=True)
    alone, other = desk.propose(0), desk.propose(1)
    assert (list(alone.methods), list(other.methods)) == (["suffix"], ["recycling"])
    (nodes,), (guess,) = nodes_of(alone), nodes_of(other)
    assert nodes[0][:2] == [9, 4]
    assert (7, -1) in zip(*nodes, strict=True)
    assert guess == ([11], [-1])
    both = desk.propose(0, 1)
    assert list(both.methods) == ["suffix", "recycling"]
    assert nodes_of(both) == [nodes, guess]


def test_the_loaded_methods_are_told_with_their_sizes():
    sizes = Desk("auto").drafter.needs.methods
    assert list(sizes) == ["auto", "suffix", "prediction", "ngram"]
    assert sizes["prediction"] == Desk("auto").drafter.needs.max_nodes > sizes["auto"]
