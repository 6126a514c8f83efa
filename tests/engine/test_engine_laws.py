"""Text depends on the request and its seed alone: not on depth, chunks, blocks or drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fake_runner import VOCAB, FakeCodec, FakeRunner, expected_tokens, is_end
from hunch.config import CacheConfig, Config, ScheduleConfig
from hunch.engine import blocks
from hunch.engine.engine import Engine
from hunch.errors import CapacityError
from hunch.types import Request, RequestOutput, SamplingParams, Speculation


@dataclass
class Ask:
    """A request of a workload: when it comes, and when it is given up (in steps after that)."""

    prompt_ids: list[int]
    params: SamplingParams
    step: int = 0
    abort_after: int | None = None


@dataclass
class Setting:
    """One way to run a workload."""

    depth: int = 0
    budget: int = 64
    max_rows: int = 4
    num_blocks: int | None = None  # None: just enough for the largest request
    spare_blocks: int = 0
    block_size: int = 4
    max_nodes: int = 0
    width: int = 1
    is_caching: bool = True
    is_brief: bool = False
    is_late: bool = True
    max_draft_rows: int | None = None
    window: int | None = None
    num_snapshots: int | None = None  # None: rows have no recurrent states
    num_groups: int = 2
    loses: int = 0  # steps run out of memory now and then, and one row in so many starts again


@dataclass
class Run:
    """What a workload gave."""

    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    runner: FakeRunner | None = None
    engine: Engine | None = None


def run(asks: list[Ask], setting: Setting) -> Run:
    size = setting.block_size
    longest = max(len(a.prompt_ids) + (a.params.max_tokens or 0) for a in asks)
    if setting.window is not None and setting.num_groups == 1 and setting.num_snapshots is None:
        longest = min(longest, setting.window + 4 + 3 * size)
    need = -(-longest // size)
    runner = FakeRunner(
        num_blocks=setting.num_blocks or need + setting.spare_blocks,
        block_size=size,
        max_rows=setting.max_rows,
        max_nodes=setting.max_nodes,
        depth=setting.depth,
        width=setting.width,
        is_brief=setting.is_brief,
        is_late=setting.is_late,
        max_draft_rows=setting.max_draft_rows,
        window=setting.window,
        num_snapshots=setting.num_snapshots,
        num_groups=setting.num_groups,
        loses=setting.loses if setting.num_snapshots is not None else 0,
    )
    config = Config(
        schedule=ScheduleConfig(max_num_batched_tokens=setting.budget),
        cache=CacheConfig(enable_prefix_caching=setting.is_caching),
    )
    engine = Engine(config, runner, FakeCodec())
    result = Run(runner=runner, engine=engine)
    step = 0
    while engine.has_work() or any(ask.step >= step for ask in asks):
        for number, ask in enumerate(asks):
            if ask.step == step:
                engine.add(str(number), ask.prompt_ids, ask.params)
            if ask.abort_after is not None and step == ask.step + ask.abort_after:
                engine.abort(str(number))
        for output in engine.step():
            check_growth(result.outputs.get(output.request_id), output)
            result.outputs[output.request_id] = output
        step += 1
        assert step < 20_000, "no progress"
    pool = engine._scheduler.pool
    assert pool.num_free == pool.num_blocks, "leaked blocks"
    assert not any(pool._num_refs)
    if pool.snapshots is not None:
        pool.reset()
        assert len(pool.snapshots._free) == setting.num_snapshots, "leaked states"
    assert runner.max_plan_tokens <= setting.budget
    return result


def check_growth(before: RequestOutput | None, after: RequestOutput) -> None:
    for index, now in enumerate(after.outputs):
        then = before.outputs[index] if before else None
        assert then is None or now.text.startswith(then.text)
        assert then is None or now.token_ids[: len(then.token_ids)] == then.token_ids


def expected_answer(request: Request) -> tuple[list[int], str, str, int | str | None]:
    """Token ids, text, finish reason and stop reason, decided without an engine."""
    said = expected_tokens(request)
    finish = is_end(request, said)
    detokenizer, text = FakeCodec().detokenizer([]), ""
    for count, token in enumerate(said, start=1):
        if count == len(said) and finish == "stop":
            stop_reason = None if token in request.eos_ids else token
            text += detokenizer.flush()
            break
        text += detokenizer.push(token)
        if count == len(said):
            text += detokenizer.flush()
            stop_reason = None
        found = [(text.index(stop), stop) for stop in request.params.stop if stop in text]
        if found:
            place, stop = min(found)
            return said[:count], text[:place], "stop", stop
    found = [(text.index(stop), stop) for stop in request.params.stop if stop in text]
    if found:
        return said, text[: min(found)[0]], "stop", min(found)[1]
    return said, text, finish, stop_reason


def check_answers(asks: list[Ask], done: Run) -> None:
    assert done.engine is not None
    for number, ask in enumerate(asks):
        output = done.outputs[str(number)]
        assert output.finished
        asked = done.engine.check(str(number), ask.prompt_ids, ask.params)
        for request, answer in zip(asked.requests, output.outputs, strict=True):
            said, text, finish, stop_reason = expected_answer(request)
            if answer.finish_reason == "abort":
                assert ask.abort_after is not None
                assert said[: len(answer.token_ids)] == answer.token_ids
                continue
            assert answer.token_ids == said
            assert answer.text == text
            assert (answer.finish_reason, answer.stop_reason) == (finish, stop_reason)


tokens = st.integers(1, VOCAB - 1)
prefixes = st.sampled_from([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8] * 2, [7] * 9, [2, 7, 1, 8]])
prompts = st.builds(
    lambda head, cut, tail: head[:cut] + tail,
    prefixes,
    st.integers(1, 24),
    st.lists(tokens, max_size=6),
)
params = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 2, 3]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 24),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([None, None, "ab", ["e", "qu"]]),
    stop_token_ids=st.sampled_from([(), (5, 6)]),
    speculation=st.builds(
        Speculation,
        mode=st.sampled_from(["default", "default", "off"]),
        max_nodes=st.sampled_from([None, 0, 2]),
    ),
)
workloads = st.lists(
    st.builds(
        Ask,
        prompt_ids=prompts,
        params=params,
        step=st.integers(0, 12),
        abort_after=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    ),
    min_size=1,
    max_size=7,
)
settings_of_a_run = st.builds(
    Setting,
    depth=st.integers(0, 1),
    budget=st.sampled_from([1, 2, 3, 7, 16, 200]),
    max_rows=st.integers(1, 6),
    spare_blocks=st.sampled_from([0, 1, 3, 10, 100]),
    block_size=st.sampled_from([1, 2, 4, 16]),
    max_nodes=st.sampled_from([0, 1, 4, 9]),
    width=st.integers(1, 3),
    is_caching=st.booleans(),
    is_brief=st.booleans(),
    is_late=st.booleans(),
    max_draft_rows=st.sampled_from([None, 1, 3]),
    window=st.sampled_from([None, None, 1, 6, 13]),
    num_snapshots=st.sampled_from([None, None, 0, 1, 2, 9]),
    num_groups=st.sampled_from([1, 2]),
    loses=st.sampled_from([0, 1, 4]),
)


@pytest.fixture(autouse=True, scope="module")
def short_prefixes() -> Iterator[None]:
    """Recurrent states are kept of prompts as short as these, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LEAST_SHARED", 4)
        yield


@settings(max_examples=250, deadline=None)
@given(workloads, settings_of_a_run)
def test_answers_depend_on_the_request_alone(asks, setting):
    check_answers(asks, run(asks, setting))


def story() -> list[Ask]:
    """Several requests that share beginnings, some with samples, some arriving late."""
    head = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    asks = [
        Ask([*head, i], SamplingParams(max_tokens=20, ignore_eos=True, seed=i), step=i)
        for i in range(5)
    ]
    asks.append(Ask(head * 2, SamplingParams(n=3, max_tokens=12, ignore_eos=True, seed=9), step=2))
    asks.append(Ask([7], SamplingParams(max_tokens=30, ignore_eos=True, seed=1), step=3))
    return asks


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        {"budget": 1},
        {"budget": 5},
        {"max_rows": 1},
        {"max_rows": 16},
        {"block_size": 1, "spare_blocks": 50},
        {"block_size": 16},
        {"is_caching": False},
        {"is_brief": True, "num_blocks": 40, "max_rows": 8},
        {"is_brief": True, "max_nodes": 5, "num_blocks": 40},
        {"max_nodes": 5},
        {"max_nodes": 5, "max_draft_rows": 2, "num_blocks": 40},
        {"max_nodes": 9, "width": 3, "spare_blocks": 30},
        {"max_nodes": 5, "num_blocks": 10, "max_rows": 8},
        {"max_nodes": 3, "num_blocks": 12, "max_rows": 8, "window": 5},
        {"max_nodes": 3, "num_blocks": 12, "max_rows": 8, "num_snapshots": 2},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items()),
)
def test_one_setting_at_a_time(depth, change):
    asks = story()
    check_answers(asks, run(asks, Setting(depth=depth, **change)))


@pytest.mark.parametrize("depth", [0, 1])
def test_few_blocks_force_preemption_and_nothing_is_lost(depth):
    asks = story()
    done = run(asks, Setting(depth=depth, spare_blocks=2, max_rows=8, max_nodes=3))
    check_answers(asks, done)
    assert done.engine.stats()["num_preemptions"] > 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("loses", [1, 3])
def test_rows_that_lose_their_state_start_again_and_then_run_apart(depth, loses):
    asks = story()
    done = run(asks, Setting(depth=depth, spare_blocks=20, num_snapshots=2, loses=loses))
    check_answers(asks, done)
    num_sequences = sum(ask.params.n for ask in asks)
    assert 0 < done.runner.num_lost <= num_sequences
    assert done.engine.stats()["num_preemptions"] >= done.runner.num_lost


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_snapshots", [None, 4])
def test_later_requests_find_the_prefix_of_earlier_ones(depth, num_snapshots):
    asks = story()
    done = run(asks, Setting(depth=depth, spare_blocks=40, num_snapshots=num_snapshots))
    assert done.runner.num_shared > 0
    assert done.engine.stats()["prefix_hits"] == done.runner.num_shared
    without = run(asks, Setting(depth=depth, spare_blocks=40, is_caching=False))
    assert without.runner.num_shared == 0
    assert {k: o.outputs[0].token_ids for k, o in done.outputs.items()} == {
        k: o.outputs[0].token_ids for k, o in without.outputs.items()
    }


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("max_nodes", [0, 3])
def test_texts_longer_than_all_blocks_are_read_where_every_layer_has_a_window(
    depth, is_caching, max_nodes
):
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    asks = [Ask([1 + (i * j) % 27 for i in range(150)], params, step=j) for j in range(1, 6)]
    asks += [Ask([3] * 9, params, step=2), Ask(asks[0].prompt_ids, params, step=130)]
    setting = Setting(
        depth=depth, budget=20, num_blocks=12, max_nodes=max_nodes, is_caching=is_caching,
        window=6, num_groups=1,
    )  # fmt: skip
    check_answers(asks, run(asks, setting))  # 180 tokens each, in room for 48
    with pytest.raises(CapacityError):
        run(asks, replace(setting, window=40))


def test_drafts_save_steps():
    asks = [Ask([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True, seed=1))]
    setting = {"spare_blocks": 40}
    plain = run(asks, Setting(**setting)).outputs["0"].outputs[0]
    drafted = run(asks, Setting(**setting, max_nodes=6)).outputs["0"].outputs[0]
    assert drafted.token_ids == plain.token_ids
    assert plain.stats["steps"] == 60
    assert drafted.stats["steps"] < 45
