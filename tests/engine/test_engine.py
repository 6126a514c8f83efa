"""The engine's door: what is refused, what is filled in, what comes out."""

from __future__ import annotations

import pytest

from engine.fake_runner import EOS, VOCAB, FakeCodec, FakeRunner, expected_tokens
from hunch.config import Config, ModelConfig, ScheduleConfig
from hunch.engine.engine import Engine
from hunch.errors import CapacityError, QueueFullError, RequestError
from hunch.types import RequestOutput, SamplingParams, Speculation


def make(*, seed: int = 0, max_queue: int | None = None, **options: int) -> Engine:
    config = Config(
        model=ModelConfig(seed=seed),
        schedule=ScheduleConfig(max_queue=max_queue, max_num_batched_tokens=10),
    )
    return Engine(config, FakeRunner(**options), FakeCodec())


def generate(engine: Engine, prompt: list[int], **params: object) -> RequestOutput:
    engine.add("x", prompt, SamplingParams(**params))  # type: ignore[arg-type]
    last = None
    while engine.has_work():
        for output in engine.step():
            last = output
    assert last is not None
    assert last.finished
    return last


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], {}, "the prompt is empty"),
        ([1, VOCAB], {}, f"token id {VOCAB} must be from 0 to {VOCAB - 1}"),
        ([-1], {}, "token id -1"),
        ([1] * 200, {}, "the context of 200"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias: token id"),
        ([1], {"allowed_token_ids": [500]}, "allowed_token_ids: token id 500"),
        ([1], {"stop_token_ids": [999]}, "stop_token_ids: token id 999"),
        ([1], {"logprobs": VOCAB + 1}, "logprobs=30"),
        ([1], {"prompt_logprobs": VOCAB + 1}, "prompt_logprobs=30"),
        ([1], {"bad_words": ["  "]}, "nothing but spaces"),
    ],
)
def test_a_bad_request_is_refused_and_others_go_on(prompt, params, text):
    engine = make()
    engine.add("good", [1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(RequestError, match=text):
        engine.add("bad", prompt, SamplingParams(**params))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].finished
    assert {output.request_id for output in outputs} == {"good"}


def test_what_could_never_fit_is_refused_at_once():
    engine = make(num_blocks=4, block_size=4)
    with pytest.raises(CapacityError, match="room for"):
        engine.add("a", [1] * 10, SamplingParams(max_tokens=7))
    with pytest.raises(CapacityError):
        engine.add("a", [1] * 17, SamplingParams(max_tokens=None))
    assert len(generate(engine, [1] * 10, max_tokens=6, ignore_eos=True).outputs[0].token_ids) == 6


def test_max_tokens_ends_at_the_context_or_the_memory():
    engine = make(max_len=20)
    assert len(generate(engine, [1] * 5, max_tokens=50, ignore_eos=True).outputs[0].token_ids) == 15
    engine = make(num_blocks=4, block_size=4)
    answer = generate(engine, [1] * 5, max_tokens=None, ignore_eos=True).outputs[0]
    assert len(answer.token_ids) == 11
    assert answer.finish_reason == "length"


def test_an_id_in_use_is_refused():
    engine = make()
    engine.add("a", [1], SamplingParams())
    with pytest.raises(RequestError, match="in use"):
        engine.add("a", [1], SamplingParams())


def test_a_full_queue_is_said():
    engine = make(max_queue=2, max_rows=1)
    for name in "abc":  # one for the free row, two to wait
        engine.add(name, [1], SamplingParams(max_tokens=2))
    with pytest.raises(QueueFullError):
        engine.add("d", [1], SamplingParams())
    while engine.has_work():
        engine.step()
    engine.add("d", [1], SamplingParams())


def test_a_missing_seed_is_filled_in_reported_and_the_same_in_the_next_run():
    def run(seed: int) -> list[tuple[int, list[int]]]:
        engine = make(seed=seed)
        answers = [generate(engine, [1, 2], max_tokens=8).outputs[0] for _ in range(3)]
        return [(answer.seed, answer.token_ids) for answer in answers]

    first = run(0)
    assert len({seed for seed, _ in first}) == 3
    assert run(0) == first
    assert run(1) != first
    again = generate(make(), [1, 2], max_tokens=8, seed=first[1][0]).outputs[0]
    assert again.token_ids == first[1][1]


def test_samples_differ_and_come_in_order():
    engine = make(max_rows=2)
    output = generate(engine, [4, 5], n=4, seed=3, max_tokens=10)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
    requests = engine.check("x", [4, 5], SamplingParams(n=4, seed=3, max_tokens=10)).requests
    assert [a.token_ids for a in output.outputs] == [expected_tokens(r) for r in requests]
    assert output.stats["steps"] == sum(a.stats["steps"] for a in output.outputs)


def test_bad_words_are_banned_at_the_start_and_after_a_space():
    class Spaced(FakeCodec):
        words = ("", "cat", " cat", " dog")  # "dog" alone takes two tokens

        def encode(self, text, *, add_special_tokens=True):
            if text == "dog":
                return [4, 5]
            return [self.words.index(text)]

    engine = Engine(Config(), FakeRunner(), Spaced())
    asked = engine.check("x", [1], SamplingParams(bad_words=["cat", " dog"]))
    assert asked.requests[0].bad_word_ids == ((1,), (2,), (4, 5), (3,))


def test_end_of_text_and_stop_tokens():
    engine = make()
    request = engine.check("x", [9], SamplingParams(max_tokens=150, seed=2)).requests[0]
    tokens = expected_tokens(request)
    assert tokens[-1] == EOS
    answer = generate(engine, [9], max_tokens=150, seed=2).outputs[0]
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (tokens, "stop", None)
    assert answer.text == FakeCodec().decode(tokens)
    stop = tokens[3]
    assert stop not in tokens[:3]
    answer = generate(engine, [9], max_tokens=150, seed=2, stop_token_ids=[stop]).outputs[0]
    assert (answer.token_ids, answer.stop_reason) == (tokens[:4], stop)
    assert answer.text == FakeCodec().decode(tokens[:3])


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_blocks", [7, 60])
def test_prompt_scores_are_whole_whatever_was_cached_or_preempted(depth, num_blocks):
    engine = make(depth=depth, num_blocks=num_blocks)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
    plain = SamplingParams(max_tokens=12, ignore_eos=True)
    engine.add("first", prompt, plain)
    engine.step()
    engine.step()
    scored = SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=0, n=2)
    engine.add("second", prompt, scored)
    done = {}
    while engine.has_work():
        done |= {output.request_id: output for output in engine.step()}
    assert done["first"].prompt_logprobs is None
    scores = done["second"].prompt_logprobs
    assert scores[0] is None
    assert [list(score) for score in scores[1:]] == [[token] for token in prompt[1:]]
    assert scores[1][1].decoded_token == "a"


def test_logprobs_come_with_their_tokens():
    answer = generate(make(max_nodes=4), [1, 2], max_tokens=9, ignore_eos=True, logprobs=0)
    answer = answer.outputs[0]
    assert [list(scores) for scores in answer.logprobs] == [[token] for token in answer.token_ids]
    assert answer.cumulative_logprob == pytest.approx(-0.5 * 9)
    assert all(s[t].decoded_token for s, t in zip(answer.logprobs, answer.token_ids, strict=True))


def test_a_trace_tells_every_draft_and_its_fate():
    wish = Speculation(trace=True)
    engine = make(max_nodes=4, width=2)
    answer = generate(engine, [1, 2], max_tokens=30, ignore_eos=True, speculation=wish).outputs[0]
    said = []
    for draft in answer.trace:
        said += [draft.tokens[node] for node in draft.accepted]
        said.append(answer.token_ids[len(said)])
    assert said == answer.token_ids
    assert generate(make(), [1, 2], max_tokens=3).outputs[0].trace is None


def test_without_streaming_only_the_end_is_told():
    engine = make()
    engine.add("a", [1], SamplingParams(max_tokens=5, n=2, ignore_eos=True), stream=False)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert len(outputs) == 1
    assert outputs[0].finished


def test_outputs_already_handed_out_do_not_change():
    engine = make()
    engine.add("a", [1, 2], SamplingParams(max_tokens=6, ignore_eos=True))
    seen = []
    while engine.has_work():
        seen += engine.step()
    assert [len(output.outputs[0].token_ids) for output in seen] == [1, 2, 3, 4, 5, 6]


def test_abort_before_during_and_after():
    engine = make(max_rows=1)
    for name in "ab":
        engine.add(name, [1, 2], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort("b")  # waiting
    (output, *rest) = [o for o in engine.step() if o.request_id == "b"]
    assert not rest
    assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
    assert output.outputs[0].token_ids == []
    engine.abort("a")  # running
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 2
    engine.abort("a")  # gone
    assert not engine.has_work()


def test_an_id_is_free_once_its_last_output_was_told_or_is_not_to_be_told():
    engine = make()
    for is_told in (True, False):
        engine.add("a", [1, 2], SamplingParams(max_tokens=50, ignore_eos=True))
        engine.step()
        engine.abort("a", is_told=is_told)
        if is_told:
            with pytest.raises(RequestError, match="in use"):
                engine.add("a", [3], SamplingParams())
            assert [output.prompt_token_ids for output in engine.step()] == [[1, 2]]
    assert generate(engine, [3], max_tokens=4, ignore_eos=True).prompt_token_ids == [3]


def test_closing_closes_the_runner():
    engine = make()
    engine.close()
    assert engine.runner.is_closed


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_nodes", [0, 4])
def test_tokens_under_a_handle_add_up_to_the_output(depth, max_nodes):
    engine = Engine(
        Config(schedule=ScheduleConfig(max_num_batched_tokens=12)),
        FakeRunner(depth=depth, max_nodes=max_nodes, is_brief=True),
        FakeCodec(),
    )
    for number in range(3):
        params = SamplingParams(max_tokens=9, ignore_eos=True, seed=number)
        engine.admit(engine.check(str(number), [number + 1] * 5, params, handle=number))
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    done = {}
    while engine.has_work():
        outputs = engine.step()
        said = iter(engine.take_tokens())
        for handle, tokens in zip(said, said, strict=True):
            told[handle] += tokens
        for output in outputs:
            assert output.finished
            done[int(output.request_id)] = output.outputs[0].token_ids
    assert len(done) == 3
    for number, tokens in done.items():
        assert told[number]
        assert tokens[: len(told[number])] == told[number]
        assert len(tokens) == 9
