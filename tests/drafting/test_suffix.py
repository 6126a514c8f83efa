"""Suffix lookup trusts its witnesses as far as their record says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hunch.drafting.suffix import MAX_MATCH, Store, SuffixText
from hunch.errors import ConfigError
from spec_rows import Desk


def words(seed: int, count: int, low: int = 0, high: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(low, high) for _ in range(count)]


def test_copies_a_long_match():
    passage = words(1, 60)
    desk = Desk("suffix")
    desk.commit(0, [*passage, 5, *passage[:10]], is_prompt=True)
    assert desk.chain()[:8] == passage[10:18]


def test_the_longest_match_wins():
    desk = Desk("suffix")
    desk.commit(0, [1, 2, 3, 4, 50, 51, 9, 4, 60, 61, 8, 3, 4, 70, 2, 3, 4], is_prompt=True)
    assert desk.chain()[0] == 50


def test_trust_grows_with_the_match():
    """With dear rows a long match is still worth checking, a single common token is not."""
    curve = {1: 1.0, 2: 1.45, 4: 2.2, 16: 7.0}
    passage = words(2, 30)
    weak, strong = Desk("suffix", curve), Desk("suffix", curve)
    weak.commit(0, [*passage, 5, passage[7]], is_prompt=True)
    strong.commit(0, [*passage, 5, *passage[:12]], is_prompt=True)
    assert weak.chain() == []
    assert strong.chain()[:2] == passage[12:14]


def test_a_tree_guesses_both_ways_where_witnesses_differ():
    desk = Desk("suffix:tree=true")
    desk.commit(0, [1, 2, 3, 4, 50, 51, 1, 2, 3, 4, 60, 61, 1, 2, 3, 4], is_prompt=True)
    draft = desk.propose(0)
    num_nodes = int(draft.num_nodes_R[0])
    nodes = list(zip(draft.parents_RN[0].tolist(), draft.tokens_RN[0].tolist(), strict=True))[
        :num_nodes
    ]
    assert nodes[0] == (-1, 60)  # the most recent first
    assert (-1, 50) in nodes
    assert (nodes.index((-1, 50)), 51) in nodes
    assert all(parent < index for index, (parent, _) in enumerate(nodes))
    assert len(set(nodes)) == len(nodes)


def test_other_requests_help_only_when_shared():
    passage = words(3, 40)
    for spec, helps in (("suffix", False), ("suffix:shared=true", True)):
        desk = Desk(spec)
        desk.commit(0, [1], is_prompt=True)
        desk.commit(0, passage)
        desk.leave(0)
        desk.commit(1, [7, *passage[:6]], is_prompt=True)
        assert (desk.chain(1)[:3] == passage[6:9]) == helps
    desk.drafter.clear()
    assert desk.chain(1) == []


def test_prompts_are_not_shared():
    passage = words(4, 30)
    desk = Desk("suffix:shared=true")
    desk.commit(0, passage, is_prompt=True)
    desk.commit(0, [5])
    desk.leave(0)
    desk.commit(1, [7, *passage[:6]], is_prompt=True)
    assert desk.chain(1) == []


def test_the_store_is_bounded_and_keeps_the_latest():
    store = Store(1000)
    for seed in range(40):
        store.add(words(seed, 100))
    assert len(store.young.tokens) + len(store.old.tokens) <= 1000
    assert store.find(words(39, 100)[:8])[0] == 8
    assert store.find(words(0, 100)[:8])[0] < 8
    store.add(words(99, 5000))  # longer than the whole store
    assert len(store.young.tokens) + len(store.old.tokens) <= 1000


def test_no_guess_runs_from_one_stored_output_into_the_next():
    desk = Desk("suffix:shared=true")
    for text in ([11, 12, 13, 14], [21, 22, 23, 24]):
        desk.commit(0, [1], is_prompt=True)
        desk.commit(0, text)
        desk.leave(0)
    desk.commit(1, [99, 11, 12, 13], is_prompt=True)
    assert desk.chain(1) == [14]


def test_rows_are_forgotten():
    desk = Desk("suffix")
    desk.commit(0, [1, 2, 3, 1, 2], is_prompt=True)
    assert desk.chain()[0] == 3
    desk.leave(0)
    desk.commit(0, [8, 1, 2], is_prompt=True)
    assert desk.chain() == []


@settings(max_examples=60)
@given(tokens=st.lists(st.integers(0, 3), min_size=2, max_size=60), cut=st.integers(1, 60))
def test_finds_the_longest_match_of_a_scan(tokens, cut):
    text = SuffixText()
    text.extend(tokens[:cut])
    text.extend(tokens[cut:])
    length, places = text.find(tokens[-MAX_MATCH:])
    for place in places:
        assert tokens[place - length : place] == tokens[-length:]
    assert places == sorted(places, reverse=True)
    if not length:
        assert tokens[-1] not in tokens[:-1]


def test_rows_share_the_budget_by_chance():
    """Where every row costs, the sure guesses are checked and the doubtful are not."""
    desk = Desk("suffix", {1: 1.0, 2: 1.5, 4: 2.0, 8: 3.2, 16: 6.0, 32: 12.0})
    passage = words(5, 60)
    desk.commit(0, [*passage, 5, *passage[:20]], is_prompt=True)
    desk.commit(1, [*words(6, 40, 0, 6)], is_prompt=True)
    draft = desk.propose(0, 1)
    assert int(draft.num_nodes_R[0]) > int(draft.num_nodes_R[1])


def test_wrong_options_are_told():
    with pytest.raises(ConfigError, match="num_nodes"):
        Desk("suffix:num_nodes=0")
    with pytest.raises(ConfigError, match="did you mean"):
        Desk("suffix:num_node=4")


def test_adaptive_off_drafts_whatever_it_costs():
    desk = Desk("suffix:adaptive=false:num_nodes=4", {1: 1.0, 2: 2.0, 16: 16.0})
    desk.commit(0, [1, 2, 3, 4] * 20, is_prompt=True)
    assert desk.chain() == [1, 2, 3, 4]
