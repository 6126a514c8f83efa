"""The block pool: who may use which block again, and for which KV group."""

from __future__ import annotations

import contextlib

import pytest

from hunch.engine.blocks import BlockPool, BlockTable
from hunch.types import GroupInfo

GROUPS = (
    GroupInfo(name="target"),
    GroupInfo(name="draft"),
    GroupInfo(name="eagle", sees_next=True),
)


def fill(pool: BlockPool, tokens: list[int], computed: tuple[int, ...]) -> BlockTable:
    """A sequence that enters, computes and publishes."""
    table = BlockTable()
    pool.open(table, pool.find(table, tokens, len(tokens) - 1), len(tokens))
    pool.publish(table, tokens, computed)
    return table


def found(pool: BlockPool, tokens: list[int]) -> tuple[int, ...]:
    return pool.find(BlockTable(), tokens, len(tokens) - 1).num_computed


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(8, 4, GROUPS)


def test_only_full_and_written_blocks_are_found(pool):
    fill(pool, list(range(11)), (7, 0, 0))
    assert found(pool, list(range(11))) == (4, 0, 0)


def test_a_salt_that_reads_like_a_key_finds_nothing(pool):
    """Else a request could read, or write, KV of texts that begin otherwise."""
    for first in range(1 << 20):
        table = BlockTable()
        pool.find(table, [first, 1, 2, 3, 4], 4)
        with contextlib.suppress(UnicodeDecodeError):
            text = table.keys[0].decode()
            break
    fill(pool, [first, 1, 2, 3, 4, 5, 6, 7, 8], (8, 8, 8))
    hit = pool.find(BlockTable(salt=text.encode()), [4, 5, 6, 7, 8], 4)
    assert hit.num_computed == (0, 0, 0)


def test_each_group_is_valid_as_far_as_it_was_written(pool):
    fill(pool, list(range(13)), (12, 8, 4))
    assert found(pool, list(range(13))) == (12, 8, 4)


def test_the_last_token_is_never_a_hit(pool):
    fill(pool, list(range(9)), (9, 9, 8))
    assert found(pool, list(range(8))) == (4, 4, 4)


def test_a_group_that_looks_ahead_needs_the_same_following_token(pool):
    fill(pool, list(range(9)), (9, 9, 8))
    assert found(pool, [*range(8), 99]) == (8, 8, 4)
    assert found(pool, [*range(8), 8]) == (8, 8, 8)


def test_a_group_that_must_be_whole_has_its_last_block_computed_again():
    groups = (GROUPS[0], GroupInfo(name="eagle", sees_next=True, has_no_holes=True))
    pool = BlockPool(8, 4, groups)
    fill(pool, list(range(11)), (10, 9))
    assert found(pool, list(range(11))) == (8, 8)
    assert found(pool, [*range(8), 99, 98]) == (4, 4)
    fill(pool, [*range(50, 61)], (10, 3))
    assert found(pool, [*range(50, 61)]) == (8, 0), "of two blocks none: not worth it"


def test_the_last_writer_of_an_ahead_group_is_remembered(pool):
    fill(pool, list(range(9)), (9, 9, 8))
    fill(pool, [*range(8), 99], (9, 9, 8))
    assert found(pool, [*range(8), 99]) == (8, 8, 8)
    assert found(pool, [*range(8), 8]) == (8, 8, 4)


def test_an_ahead_group_waits_for_the_following_token(pool):
    tokens = list(range(8))
    table = fill(pool, tokens, (8, 8, 8))
    assert found(pool, [*tokens, 8]) == (8, 8, 4)
    tokens.append(8)
    pool.publish(table, tokens, (8, 8, 8))
    assert found(pool, tokens) == (8, 8, 8)


def test_equal_tokens_after_another_beginning_are_not_a_hit(pool):
    fill(pool, [1, 1, 1, 1, 5, 6, 7, 8, 9], (9, 0, 0))
    assert found(pool, [2, 2, 2, 2, 5, 6, 7, 8, 9]) == (0, 0, 0)
    assert found(pool, [5, 6, 7, 8, 9]) == (0, 0, 0)


def test_a_prefix_outlives_its_owner_and_is_shared(pool):
    table = fill(pool, list(range(9)), (9, 0, 0))
    first = table.blocks[:2]
    pool.release(table)
    assert pool.num_free == 8
    again = fill(pool, list(range(9)), (8, 0, 0))
    other = fill(pool, list(range(9)), (8, 0, 0))
    assert again.blocks[:2] == other.blocks[:2] == first
    assert again.blocks[2] != other.blocks[2]
    pool.release(again)
    assert pool.num_free == 8 - 3
    pool.release(other)
    assert pool.num_free == 8


def test_empty_blocks_go_first_then_the_oldest_then_tails_before_heads():
    pool = BlockPool(6, 2)
    old, new = fill(pool, [1, 2, 3, 4, 5], (4,)), fill(pool, [6, 7, 8], (2,))
    pool.release(old)
    pool.release(new)
    table = BlockTable()
    pool.take(table, 3)  # one never used, and the two that were not full
    assert found(pool, [1, 2, 3, 4, 5]) == (4,)
    assert found(pool, [6, 7, 8]) == (2,)
    pool.take(table, 1)
    assert found(pool, [1, 2, 3, 4, 5]) == (2,)
    pool.take(table, 1)
    assert found(pool, [1, 2, 3, 4, 5]) == (0,)
    assert found(pool, [6, 7, 8]) == (2,)


def test_a_block_given_away_is_forgotten_in_every_group():
    pool = BlockPool(2, 2, GROUPS)
    pool.release(fill(pool, [1, 2, 3], (3, 3, 2)))
    pool.release(fill(pool, [7, 8, 9], (2, 0, 0)))
    assert found(pool, [7, 8, 9]) == (2, 0, 0)
    pool.release(fill(pool, [4, 5, 6], (2, 0, 0)))
    pool.release(fill(pool, [5, 5, 6], (2, 0, 0)))
    assert found(pool, [1, 2, 3]) == (0, 0, 0)


def test_two_that_compute_the_same_block_at_once_keep_their_own(pool):
    tokens = list(range(5))
    tables = [BlockTable(), BlockTable()]
    for table in tables:
        pool.open(table, pool.find(table, tokens, 4), 5)
    for table in tables:
        pool.publish(table, tokens, (4, 4, 0))
    assert found(pool, tokens) == (4, 4, 0)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 8
    assert found(pool, tokens) == (4, 4, 0)


def test_without_caching_nothing_is_found():
    pool = BlockPool(8, 4, GROUPS, is_caching=False)
    pool.release(fill(pool, list(range(9)), (9, 9, 8)))
    assert found(pool, list(range(9))) == (0, 0, 0)
