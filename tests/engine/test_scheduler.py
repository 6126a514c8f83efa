"""The scheduler: order, budget, drafts, preemption and what is let go when."""

from __future__ import annotations

import pytest

from engine.fake_runner import FakeCodec, FakeRunner
from hunch.config import Config, ScheduleConfig, SpecConfig
from hunch.engine.engine import Engine
from hunch.engine.scheduler import SPARE_BLOCKS, Scheduler
from hunch.engine.snapshots import NO_SNAPSHOT
from hunch.types import SamplingParams, Speculation, StepPlan


class Watcher(FakeRunner):
    """Keeps the plans."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)

    def shares(self) -> list[list[tuple[int, int]]]:
        return [[(w.num_tokens, w.num_nodes) for w in plan.work] for plan in self.plans]


def make(*, budget: int = 100, max_batch: int | None = None, **options: int) -> Engine:
    config = Config(
        schedule=ScheduleConfig(max_num_batched_tokens=budget),
        spec=SpecConfig(max_batch=max_batch),
    )
    return Engine(config, Watcher(**options), FakeCodec())


def ask(engine: Engine, name: str, num_prompt: int, max_tokens: int, **rest: object) -> None:
    prompt = [1 + (i * i + ord(name[0])) % 27 for i in range(num_prompt)]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **rest)  # type: ignore[arg-type]
    engine.add(name, prompt, params)


def finish(engine: Engine) -> list[str]:
    """Runs to the end; the ids in the order they finished."""
    done = []
    while engine.has_work():
        done += [output.request_id for output in engine.step() if output.finished]
    return done


def test_a_long_prompt_comes_in_chunks_while_others_go_on():
    engine = make(budget=8)
    ask(engine, "a", 2, 6)
    ask(engine, "b", 20, 2)
    finish(engine)
    assert engine.runner.shares() == [
        [(2, 0), (6, 0)],
        [(1, 0), (7, 0)],
        [(1, 0), (7, 0)],
        [(1, 0), (1, 0)],
        [(1, 0)],
        [(1, 0)],
    ]


def test_prompts_leave_room_for_each_other_and_none_is_taken_from_rows_that_decode():
    engine = make(budget=100, max_prompt=8)
    ask(engine, "a", 2, 6)
    ask(engine, "b", 12, 2)
    ask(engine, "c", 5, 2)
    finish(engine)
    assert engine.runner.shares() == [
        [(2, 0), (6, 0)],
        [(1, 0), (6, 0), (2, 0)],
        [(1, 0), (1, 0), (3, 0)],
        [(1, 0), (1, 0)],
        [(1, 0)],
        [(1, 0)],
    ]


def test_every_running_row_gets_a_token_before_any_gets_more():
    engine = make(budget=8, max_nodes=6, num_blocks=100)
    for name in "abcd":
        ask(engine, name, 1, 12)
    finish(engine)
    for plan in engine.runner.plans[4:-12]:
        assert len(plan.work) == 4


def test_first_come_first_served():
    engine = make(max_rows=1)
    for name in "abc":
        ask(engine, name, 3, 3)
    assert finish(engine) == ["a", "b", "c"]


def test_the_last_arrived_is_preempted_and_comes_back_before_newer_ones():
    engine = make(num_blocks=7, block_size=2, max_rows=3)
    ask(engine, "a", 4, 8)
    ask(engine, "b", 4, 8)
    engine.step()
    engine.step()
    ask(engine, "c", 4, 8)
    assert finish(engine) == ["a", "b", "c"]
    assert engine.stats()["num_preemptions"] > 0
    restarts = [s for plan in engine.runner.plans for s in plan.starts if s.request.id == "b"]
    assert len(restarts) > 1
    assert len(restarts[-1].tokens) > 4, "a restart knows what was said before"


@pytest.mark.parametrize("depth", [0, 1])
def test_no_step_is_wasted_on_what_must_have_finished(depth):
    engine = make(depth=depth)
    ask(engine, "a", 3, 4)
    finish(engine)
    assert len(engine.runner.plans) == 4


def test_at_depth_1_a_step_is_submitted_before_the_last_one_was_read():
    engine = make(depth=1, max_nodes=4, is_late=True)
    ask(engine, "a", 3, 30)
    assert engine.step() == []
    assert [len(o.outputs[0].token_ids) for o in engine.step()] == [1]
    assert len(engine.runner.plans) == 2
    assert engine.runner.shares()[1] == [(1, 4)], "the draft's size is not known yet"


def test_a_first_token_that_is_there_goes_out_before_the_next_step_is_planned():
    engine = make(depth=1, budget=8)
    ask(engine, "a", 10, 30)
    assert engine.step() == engine.step() == [], "the prompt comes in two chunks"
    assert [len(o.outputs[0].token_ids) for o in engine.step()] == [1]
    assert len(engine.runner.plans) == 2
    assert engine.step() == [], "no step was pending"
    assert [len(o.outputs[0].token_ids) for o in engine.step()] == [2]
    assert len(engine.runner.plans) == 4


@pytest.mark.parametrize("is_waiting", [False, True])
def test_with_others_the_next_step_is_planned_before_a_first_token_goes_out(is_waiting):
    engine = make(depth=1, max_rows=2 - is_waiting)
    ask(engine, "a", 3, 30)
    ask(engine, "b", 3, 30)
    assert engine.step() == []
    assert [len(o.outputs[0].token_ids) for o in engine.step()] == [1] * (2 - is_waiting)
    assert len(engine.runner.plans) == 2


@pytest.mark.parametrize(
    ("wish", "most"),
    [
        (Speculation(), 5),
        (Speculation(mode="off"), 0),
        (Speculation(max_nodes=2), 2),
        (Speculation(max_nodes=0), 0),
        (Speculation(max_nodes=50), 5),
    ],
)
def test_a_request_may_lower_its_drafts(wish, most):
    engine = make(max_nodes=5)
    ask(engine, "a", 3, 40, speculation=wish)
    finish(engine)
    assert max(w.max_draft for plan in engine.runner.plans for w in plan.work) == most
    assert max(w.num_nodes for plan in engine.runner.plans for w in plan.work) <= most


def test_no_draft_reaches_past_the_last_token():
    engine = make(max_nodes=5)
    ask(engine, "a", 3, 4)
    finish(engine)
    for num_said, plan in enumerate(engine.runner.plans, start=1):
        assert plan.work[0].max_draft <= max(4 - num_said - 1, 0)


def test_nobody_drafts_or_checks_in_a_large_batch():
    """Neither rows that were just admitted, nor rows that drafted before the others came."""
    engine = make(max_nodes=5, max_batch=2)
    ask(engine, "a", 2, 30)
    engine.step()
    assert engine.runner.plans[0].work[0].max_draft > 0
    for name in "bc":
        ask(engine, name, 2, 6)
    finish(engine)
    for plan in engine.runner.plans:
        if len(plan.work) > 2:
            assert all(work.max_draft == work.num_nodes == 0 for work in plan.work)
    assert any(work.num_nodes for plan in engine.runner.plans for work in plan.work)


@pytest.mark.parametrize("is_brief", [False, True])
@pytest.mark.parametrize("max_nodes", [0, 3])
@pytest.mark.parametrize("budget", [4, 9, 100])
def test_a_steady_row_gets_what_a_full_look_would_give_it(budget, max_nodes, is_brief, monkeypatch):
    add_work, num_looks = Scheduler._add_work, 0

    def plans(is_restless: bool) -> list[StepPlan]:
        def look(self, sequence, *args, **options):
            nonlocal num_looks
            num_looks += 1
            member = add_work(self, sequence, *args, **options)
            sequence.steady_until *= not is_restless
            return member

        monkeypatch.setattr(Scheduler, "_add_work", look)
        options = {"max_nodes": max_nodes, "is_brief": is_brief, "max_draft_rows": 2}
        engine = make(budget=budget, depth=1, num_blocks=60, **options)
        for place, name in enumerate("abcd"):
            ask(engine, name, 3 + place, 12 + 9 * place)
            engine.step()
        finish(engine)
        return engine.runner.plans

    with_steady, few_looks, num_looks = plans(False), num_looks, 0
    assert plans(True) == with_steady
    assert num_looks == sum(len(plan.work) for plan in with_steady)
    assert few_looks < num_looks


def test_drafts_give_way_before_anyone_is_preempted():
    engine = make(num_blocks=8, block_size=2, max_nodes=6)
    ask(engine, "a", 2, 6)
    ask(engine, "b", 2, 6)
    finish(engine)
    assert engine.stats()["num_preemptions"] == 0


@pytest.mark.parametrize(
    ("depth", "num_blocks", "most"), [(1, 200, 1 + SPARE_BLOCKS), (1, 22, 1), (0, 200, 1)]
)
def test_rows_that_fly_take_blocks_ahead_while_there_are_plenty(depth, num_blocks, most):
    engine = make(num_blocks=num_blocks, block_size=2, depth=depth)
    ask(engine, "a", 20, 22)
    finish(engine)
    taken = [len(blocks) for plan in engine.runner.plans for blocks in plan.blocks.values()]
    assert max(taken) == most
    assert sum(taken) + 10 <= (20 + 22) // 2, "and none past its end"


def test_blocks_of_an_aborted_row_wait_for_the_step_in_flight():
    engine = make(depth=1, num_blocks=10, is_late=True)
    ask(engine, "a", 8, 20)
    engine.step()
    engine.step()
    engine.abort("a")
    assert engine.stats()["num_running"] == 0
    assert engine.stats()["kv_usage"] > 0
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort"
    while engine.has_work():
        engine.step()
    assert engine.stats()["kv_usage"] == 0


def test_rows_that_left_are_reported_with_the_next_work():
    engine = make(max_rows=1)
    ask(engine, "a", 2, 1)
    ask(engine, "b", 2, 1)
    finish(engine)
    assert [plan.freed_rows for plan in engine.runner.plans] == [[], [0]]


@pytest.mark.parametrize("depth", [0, 1])
def test_samples_share_the_prompt_of_the_first(depth):
    engine = make(budget=8, depth=depth)
    ask(engine, "a", 21, 3, n=4)
    finish(engine)
    starts = [start for plan in engine.runner.plans for start in plan.starts]
    assert [start.num_computed[0] for start in starts] == [0, 20, 20, 20]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_nodes", [0, 3])
def test_blocks_before_every_window_are_given_back_while_a_row_runs(depth, max_nodes):
    held = {}
    for window in (None, 6):
        engine = make(depth=depth, num_blocks=40, max_nodes=max_nodes, window=window)
        ask(engine, "a", 30, 60)
        pool, most = engine._scheduler.pool, 0
        while engine.has_work():
            engine.step()
            if engine._scheduler.running and len(engine._scheduler.running[0].tokens) > 60:
                most = max(most, pool.num_blocks - pool.num_free)
        held[window] = most
        assert pool.num_free == 40
    size, slots = 4, 6 + 2 * (max_nodes + 1) + 4 * 4  # the window, pending steps, blocks ahead
    assert held[None] > 15
    assert held[6] <= -(-slots // size) + 2


def test_what_was_given_back_is_found_by_others_until_it_is_needed():
    engine = make(num_blocks=40, window=6)
    ask(engine, "a", 40, 8)
    finish(engine)
    ask(engine, "a", 40, 8)
    finish(engine)
    starts = [start for plan in engine.runner.plans for start in plan.starts]
    assert [start.num_computed[0] for start in starts] == [0, 36]


@pytest.mark.parametrize("depth", [0, 1])
def test_recurrent_states_are_kept_at_the_end_of_a_prompt_and_where_texts_part(depth):
    engine = make(budget=200, depth=depth, num_blocks=200, num_snapshots=4)
    head = [1 + i % 27 for i in range(80)]
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
    for number, tail in enumerate((70, 71, 72, 72)):
        engine.add(str(number), head + [1 + (i * tail) % 27 for i in range(tail)], params)
        finish(engine)
    plans = engine.runner.plans
    starts = [start.num_computed[0] for plan in plans for start in plan.starts]
    kept = [work.num_tokens for plan in plans for work in plan.work if work.snapshot >= 0]
    # The second parts from the first after the head; there the third begins.
    assert starts == [0, 0, 80, 148]
    assert kept == [148, 80, 68, 68]


def test_the_state_whose_use_is_longest_ago_gives_way():
    engine = make(num_blocks=200, num_snapshots=2)
    for name in "abacb":
        ask(engine, name, 70, 2)
        finish(engine)
    starts = [start for plan in engine.runner.plans for start in plan.starts]
    assert [start.num_computed[0] for start in starts] == [0, 0, 68, 0, 0]


def test_no_slot_for_a_state_keeps_nobody_back(monkeypatch):
    """The row goes on, past the next place too at which its state would have been kept."""
    engine = make(budget=200, num_blocks=200, num_snapshots=4)
    head = [1 + i % 27 for i in range(80)]
    params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
    for number, tail in enumerate((70, 71)):
        engine.add(str(number), head + [1 + (i * tail) % 27 for i in range(tail)], params)
        finish(engine)
        reserve = iter([NO_SNAPSHOT, 3]).__next__
        monkeypatch.setattr(engine._scheduler.pool.snapshots, "reserve", reserve)
    works = [work for plan in engine.runner.plans for work in plan.work]
    assert [work.num_tokens for work in works if work.snapshot >= 0] == [148]
    assert [work.num_tokens for work in works if work.num_tokens > 1][-1] == 151
