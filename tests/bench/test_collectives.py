"""Bytes and seconds of what ranks exchange, against counting by hand."""

import pytest

from hunch.bench.collectives import LINKS, NETWORKS, Link, Network, Pipeline, fit, in_step, rows_of
from hunch.errors import ConfigError


def test_a_small_network_by_hand() -> None:
    network = Network("tiny", width=10, num_layers=3, vocab_size=40, read_bytes=1e6)
    link = Link("slow", bytes_per_second=1000.0, seconds=0.5)
    cost = network.exchange(num_rows=2, num_ranks=4, link=link)
    sums, states, logits = 2 * 10 * 4, 2 * 10 * 2, 2 * 40 * 4 / 4
    assert cost.num_messages == 8
    assert cost.num_bytes == 3 * (6 * sums + logits) + states
    assert cost.seconds == pytest.approx(
        6 * (0.5 + 3 * sums / 1000) + 0.5 + states / 1000 + 0.5 + 3 * logits / 1000
    )


def test_one_rank_says_nothing() -> None:
    cost = NETWORKS["70B"].exchange(64, 1, LINKS["nvlink4"])
    assert (cost.num_messages, cost.num_bytes, cost.seconds) == (0, 0.0, 0.0)
    with pytest.raises(ConfigError):
        NETWORKS["70B"].exchange(64, 0, LINKS["nvlink4"])


def test_a_link_is_found_again_from_its_own_times() -> None:
    link = Link("x", 2e9, 30e-6)
    times = [(size, link.gather_seconds(4, size)) for size in (1e3, 1e5, 1e6)]
    found = fit(times, 4)
    assert found.bytes_per_second == pytest.approx(2e9)
    assert found.seconds == pytest.approx(30e-6)
    with pytest.raises(ConfigError):
        fit([(1e3, 1.0)], 4)


def test_slower_links_take_a_larger_share() -> None:
    fast, slow = (rows_of(LINKS[name], 3.35e12, 4) for name in ("nvlink4", "pcie4"))
    assert len(fast) == 9
    assert all(a["share"] < b["share"] for a, b in zip(fast, slow, strict=True))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("stages", [(3.0, 3.0), (4.0, 1.0), (1.0, 2.0, 5.0)])
def test_a_pipeline_is_what_playing_it_through_gives(
    stages: tuple[float, ...], num_steps: int
) -> None:
    """Step after step through stages that serve one at a time; done, it comes back."""
    hop, rounds = 0.5, 60
    free, back, ends = [0.0] * len(stages), [0.0] * num_steps, []
    for turn in range(rounds * num_steps):
        at = back[turn % num_steps]
        for stage, seconds in enumerate(stages):
            at = max(at + (hop if stage else 0.0), free[stage]) + seconds
            free[stage] = at
        back[turn % num_steps] = at
        ends.append(at)
    played = (ends[-1] - ends[-1 - 20 * num_steps]) / 20
    line = Pipeline(stages, hop)
    assert line.period(num_steps) == pytest.approx(played)
    assert 0 <= line.bubble(num_steps) < 1


def test_one_row_gains_nothing_from_stages() -> None:
    one, two = (rows_of(LINKS["ndr"], 3.35e12, 4, sizes=(1,), num_stages=n) for n in (1, 2))
    for whole, staged in zip(one, two, strict=True):
        assert staged["pass_ms"] == pytest.approx(whole["pass_ms"] + staged["hop_ms"])
        assert staged["period_ms"] == staged["pass_ms"]
        assert 0.5 <= staged["idle"] < 0.6  # half of the stages wait, and the way between them


def test_ranks_in_step_wait_for_the_slowest_at_each_exchange() -> None:
    even = [[1.0, 2.0, 3.0]] * 2
    assert in_step([even, even]) == 6.0
    assert in_step([even, [[2.0, 1.0, 3.0]] * 2]) == 7.0
    # A delay of one pass in two meets the other rank's undelayed passes half of the time.
    assert in_step([[[1.0], [5.0]], [[1.0], [5.0]]]) == 4.0
