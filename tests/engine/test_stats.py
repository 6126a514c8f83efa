"""The numbers: what they count, and that they agree with each other."""

from __future__ import annotations

import pytest

from engine.fake_runner import FakeCodec, FakeRunner
from hunch.advice import AcceptanceWatch, advice_for
from hunch.config import Config, ScheduleConfig
from hunch.engine.engine import Engine
from hunch.engine.stats import EngineStats, Histogram, Share, Tally, percentiles_ms
from hunch.train.diagnose import Seen
from hunch.types import Capacity, DraftTrace, RowResult, SamplingParams, Speculation

KEYS = [
    "tokens_per_second", "steps", "drafted", "accepted", "acceptance_rate", "tokens_per_pass",
    "per_position", "draft_seconds", "target_seconds", "draft_overhead", "memory_bound_speedup",
    "speedup", "cost_per_token", "drafter_bytes", "latency_ms",
]  # fmt: skip


def row(num_tokens: int, *, drafted: int = 0, processed: int = 1, levels: int | None = None):
    return RowResult(
        row=0,
        tokens=[5] * num_tokens,
        num_processed=processed,
        num_checked=drafted,
        num_accepted=max(num_tokens - 1, 0),
        num_levels=levels,
    )


def test_a_sequence_adds_up():
    tally = Tally(arrived=10.0)
    tally.start(11.0)
    share = Share(target=0.1, draft=0.05, plain=0.1)
    tally.add(row(0, processed=20), share, 12.0)  # a chunk of the prompt
    tally.add(row(1, processed=9), share, 13.0)
    tally.add(row(3, drafted=4), share, 13.6)
    tally.add(row(1, drafted=4), share, 13.8)
    tally.add(row(2, drafted=1), share, 14.0)
    stats = tally.stats()
    assert stats["steps"] == 4
    assert (stats["drafted"], stats["accepted"]) == (9, 3)
    assert stats["acceptance_rate"] == pytest.approx(3 / 9)
    assert stats["tokens_per_pass"] == pytest.approx(7 / 4)
    assert stats["tokens_per_second"] == pytest.approx(7 / 3)
    assert stats["per_position"] == [pytest.approx(2 / 3), 0.5, 0, 0]
    assert stats["target_seconds"] == pytest.approx(0.1 * (20 + 9 + 5 + 5 + 2))
    assert stats["draft_seconds"] == pytest.approx(0.05 * 4)
    assert stats["draft_overhead"] == pytest.approx(0.15 / 1.2)
    assert stats["memory_bound_speedup"] == pytest.approx(7 / 4 / (1 + 0.15 / 1.2))
    assert stats["speedup"] == pytest.approx(0.1 * 6 / 1.35)
    assert stats["cost_per_token"] == pytest.approx(1.35 / 0.6)
    assert stats["queue_seconds"] == pytest.approx(1.0)
    assert stats["latency_ms"]["p50"] == pytest.approx(200)


@pytest.mark.parametrize(("num_tokens", "drafted"), [(1, 0), (1, 4), (3, 4)])
def test_tokens_in_columns_count_as_a_row_that_says_them(num_tokens, drafted):
    one, other, share = Tally(), Tally(), Share(target=0.1, draft=0.05, plain=0.1)
    for tally in (one, other):
        tally.add(row(1, processed=9), share, 13.0)
    one.add(row(num_tokens, drafted=drafted), share, 13.75)
    gap = other.add_tokens(num_tokens, ("", drafted, drafted, num_tokens - 1), share, 13.75)
    assert gap == 0.75 / num_tokens
    assert one.stats() == other.stats()


def test_positions_of_a_tree_are_its_levels():
    tally = Tally()
    tally.add(row(3, drafted=9, levels=3), Share(0, 0, 0), 1.0)
    assert tally.stats()["per_position"] == [1, 1, 0]


def test_what_was_not_measured_is_not_claimed():
    stats = Tally().stats()
    assert stats["speedup"] is None
    assert stats["cost_per_token"] is None
    assert stats["latency_ms"] == {"p50": None, "p95": None, "p99": None}
    assert stats["tokens_per_second"] == 0


def test_percentiles():
    assert percentiles_ms([i / 1000 for i in range(101)]) == {"p50": 50, "p95": 95, "p99": 99}


def test_a_histogram_counts_by_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.add(value)
    histogram.add(2.0, times=3)
    shown = histogram.snapshot()
    assert shown["counts"] == [2, 4, 1]
    assert (shown["count"], shown["sum"]) == (7, 16.0)


@pytest.mark.parametrize("is_brief", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_totals_are_the_sum_of_the_requests(depth, is_brief):
    ticks = iter(range(10**6))
    engine = Engine(
        Config(schedule=ScheduleConfig(max_num_batched_tokens=12)),
        FakeRunner(max_nodes=4, depth=depth, is_brief=is_brief),
        FakeCodec(),
        clock=lambda: float(next(ticks)),
    )
    for number in range(4):
        engine.add(
            str(number),
            [number + 1] * 9,
            SamplingParams(max_tokens=10, n=2, ignore_eos=True, seed=number),
        )
    results, collect = [], engine.runner.collect
    engine.runner.collect = lambda: results.append(collect()) or results[-1]
    done = {}
    while engine.has_work():
        done |= {output.request_id: output for output in engine.step()}
    total = engine.stats()
    for key in ("steps", "drafted", "accepted", "draft_seconds"):
        assert total[key] == pytest.approx(sum(output.stats[key] for output in done.values()))
    assert total["drafted"] > total["accepted"] > 0
    assert total["accepted_per_position"][0] <= total["num_drafts"]
    assert total["generation_tokens"] == 4 * 2 * 10
    assert total["prompt_tokens"] == 36
    assert total["num_steps"] == len(results)
    # A step ahead of its results may find nobody.
    num_useful = sum(
        any(r.decoded.tokens if r.decoded else []) or any(row.computed for row in r.rows)
        for r in results
    )
    assert len(results) - depth <= num_useful <= len(results)
    assert total["target_seconds"] == pytest.approx(2.0 * num_useful)
    assert total["finished"] == {"length": 8}
    assert total["histograms"]["ttft"]["count"] == 4  # requests, of two answers each
    assert total["histograms"]["inter_token"]["count"] == 8 * 9
    for name in ("e2e", "queue", "prefill", "decode", "inference"):
        assert total["histograms"][name]["count"] == 4
    assert total["busy_seconds"] > 0
    assert list(total)[: len(KEYS)] == KEYS
    assert list(done["0"].outputs[0].stats)[: len(KEYS)] == KEYS


@pytest.mark.parametrize("is_brief", [False, True])
def test_tokens_after_a_stop_string_are_counted_nowhere(is_brief):
    engine = Engine(Config(), FakeRunner(max_nodes=4, is_brief=is_brief), FakeCodec())
    trace, texts, done = Speculation(trace=not is_brief), [""] * 12, []
    for _ in range(2):  # the second time, each stops at what it said in its middle
        for number, text in enumerate(texts):
            asked = {"max_tokens": 30, "ignore_eos": True, "seed": number, "speculation": trace}
            asked["stop"] = text[11:13] or None
            engine.add(str(number), [number + 1] * 3, SamplingParams(**asked))
        while engine.has_work():
            done += [output for output in engine.step() if output.finished]
        texts = [output.outputs[0].text for output in done]
    assert any(output.outputs[0].finish_reason == "stop" for output in done)
    for output in done:
        (answer,) = output.outputs
        assert answer.stats["steps"] + answer.stats["accepted"] == len(answer.token_ids)
        assert output.metrics.num_generation_tokens == len(answer.token_ids)
        if trace.trace:
            assert sum(len(one.accepted) for one in answer.trace) == answer.stats["accepted"]
    total = engine.stats()["generation_tokens"]
    assert total == sum(len(output.outputs[0].token_ids) for output in done)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_pause_between_requests_is_no_busy_time(depth):
    """The caller stops at the last answer; a step that was begun for it may still be open."""
    now = [0.0]
    engine = Engine(
        Config(), FakeRunner(max_nodes=4, depth=depth), FakeCodec(), clock=lambda: now[0]
    )
    for number in range(3):
        engine.add(str(number), [5, 6], SamplingParams(max_tokens=12, ignore_eos=True))
        is_over = False
        while not is_over:
            now[0] += 0.125
            is_over = any(output.finished for output in engine.step())
        now[0] += 1000.0
    assert engine.stats()["busy_seconds"] < 10.0


def test_a_trees_levels_count_and_what_it_could_have_brought():
    tally = Tally(0.0, 0, 0.25)
    tally.add(row(1, processed=9), Share(0, 0, 0), 1.0)
    tally.add(row(4, drafted=20, levels=5), Share(0, 0, 0), 2.0)
    tally.add(row(4, drafted=20, levels=3), Share(0, 0, 0), 3.0)
    stats = tally.stats()
    assert stats["acceptance_rate"] == pytest.approx(6 / 40)
    assert stats["level_acceptance"] == pytest.approx(6 / 8)
    assert stats["max_tokens_per_pass"] == pytest.approx(1 + 8 / 3)
    # tau / (c * gamma + 1): 3 tokens per pass, a drafter a quarter as large, 8 / 3 levels.
    assert stats["memory_bound_speedup_by_size"] == pytest.approx(3 / (0.25 * 8 / 3 + 1))


def test_one_requests_latency_is_the_engines():
    """Tokens of one step waited equally long; each of them counts, in both reports."""
    tally, stats, share = Tally(), EngineStats(), Share(0, 0, 0)
    tally.add(row(1, processed=9), share, 1.0)
    for seconds, num_tokens in ((0.2, 1), (0.3, 6), (0.1, 5), (0.9, 1), (0.4, 8)):
        stats.add(tally, row(num_tokens, drafted=8), share, tally.last_token + seconds)
    total = stats.report([tally], Capacity(num_blocks=1, block_size=1, max_rows=1, max_len=1,
                                           max_nodes=8))  # fmt: skip
    assert total["latency_ms"] == tally.stats()["latency_ms"]
    assert total["latency_ms"]["p50"] == pytest.approx(1e3 * 0.4 / 8)


def test_acceptance_by_position_means_one_thing_everywhere():
    """Of the drafts that had a guess there, the share whose guess was accepted."""
    fates = [(4, 2), (4, 0), (2, 2), (3, 1), (4, 4)]  # a chain's length, and how much of it held
    tally = Tally()
    for length, held in fates:
        tally.add(row(held + 1, drafted=length), Share(0, 0, 0), 1.0)
    expected = [4 / 5, 3 / 5, 1 / 4, 1 / 3]
    assert tally.stats()["per_position"] == pytest.approx(expected)

    seen = Seen()
    text = list(range(100))
    trace = [DraftTrace(tokens=[], parents=[], accepted=[])]
    for length, held in fates:
        parents = list(range(-1, length - 1))
        trace.append(DraftTrace(tokens=[0] * length, parents=parents, accepted=[*range(held)]))
    seen.add(text, trace)
    assert seen.per_position == pytest.approx(expected)


def test_advice_follows_the_guides(caplog):
    assert advice_for("draft", 0.5) is None
    assert "shorter drafts" in advice_for("draft", 0.39)
    assert "another drafter" in advice_for("eagle3", 0.1)
    assert "lookup" not in advice_for("draft", 0.1, prompt_len=200)
    assert "lookup (ngram, suffix)" in advice_for("draft", 0.1, prompt_len=4000)
    assert "repeat their prompt" in advice_for("ngram", 0.1)
    assert "longer drafts" in advice_for("draft", 0.81)
    assert "drafts where it pays" in advice_for("auto", 0.1)


@pytest.mark.parametrize("name", ["ngram", "recycling", "draft", "mlp", "mtp"])
def test_low_acceptance_is_said_once_of_every_drafter(name, caplog):
    watch = AcceptanceWatch(name)
    for _ in range(5):
        watch.add({(name, 5, 5, 1): 100})  # a fifth of 500 guesses
    assert [message.partition(":")[0] for message in caplog.messages] == [name]
    assert "only 20%" in caplog.text


def test_a_tree_of_which_most_levels_are_accepted_is_not_called_bad(caplog):
    watch = AcceptanceWatch("eagle")
    watch.add({("eagle", 32, 5, 3): 500})  # 3 of 32 nodes, and 3 of 5 levels
    assert caplog.messages == []
