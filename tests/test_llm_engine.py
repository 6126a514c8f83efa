"""LLMEngine: a program's own steps give the answers that LLM.generate gives."""

from collections.abc import Iterator

import pytest

from hunch import LLM, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from hunch.errors import ConfigError, RequestError
from tiny_models import write_llama

PROMPTS = ["the model", "a b a b a b", "one two three"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"max_num_seqs": 2, "kv_bytes": 4_000_000, "threads": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_llama(tmp_path_factory.mktemp("engine") / "model")
    with LLM(str(model), **SMALL) as made:
        yield made


def test_requests_added_between_steps_get_the_answers_of_generate(llm: LLM) -> None:
    args = EngineArgs(llm.config.model.model, **SMALL)
    engine, waiting, done = LLMEngine.from_engine_args(args), list(enumerate(PROMPTS)), {}
    while waiting or engine.has_unfinished_requests():
        if waiting:
            number, prompt = waiting.pop(0)
            engine.add_request(str(number), prompt, GREEDY)
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].token_ids
    engine.shutdown()
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    assert [done[str(number)] for number in range(len(PROMPTS))] == expected


def test_outputs_hold_what_is_new_or_come_at_the_end(llm: LLM) -> None:
    engine, kinds = llm.llm_engine, RequestOutputKind
    asked = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "n": 2}
    for kind in kinds:
        engine.add_request(kind.name, PROMPTS[0], {**asked, "output_kind": kind})
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    found = {kind: [o.outputs for o in outputs if o.request_id == kind.name] for kind in kinds}
    assert len(found[kinds.FINAL_ONLY]) == 1 < len(found[kinds.CUMULATIVE])
    (whole,) = found[kinds.FINAL_ONLY]
    for at in range(2):
        ids = [token for news in found[kinds.DELTA] for token in news[at].token_ids]
        assert ids == whole[at].token_ids == found[kinds.CUMULATIVE][-1][at].token_ids


def test_aborted_requests_say_nothing_more_and_others_go_on(llm: LLM) -> None:
    engine = llm.llm_engine
    for name in ("a", "b", "c"):
        engine.add_request(name, PROMPTS[1], sampling_params=GREEDY)
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", PROMPTS[1], GREEDY)
    assert engine.get_num_unfinished_requests() == 3
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["b", "gone"])
    between = llm.generate(PROMPTS[1], GREEDY)[0].outputs[0].token_ids  # shares the steps
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {"c"}
    assert outputs[-1].outputs[0].token_ids == between
    assert engine.step() == []


def test_an_id_may_be_used_again_once_its_request_has_ended(llm: LLM) -> None:
    engine, others = llm.llm_engine, {"temperature": 0, "max_tokens": 3, "ignore_eos": True, "n": 2}
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", PROMPTS[1], {**others, "output_kind": RequestOutputKind.FINAL_ONLY})
    llm.generate(PROMPTS[2], GREEDY)  # its steps bring the other request to its end
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.add_request("a", PROMPTS[2], GREEDY)
    (output,) = engine.step()
    assert (output.prompt, output.outputs[1].finish_reason) == (PROMPTS[1], "length")
    assert not engine.has_unfinished_requests()


def test_prefixes_are_forgotten_beside_a_request_that_goes_on(llm: LLM) -> None:
    engine, prompt = llm.llm_engine, {"prompt_token_ids": list(range(3, 43))}
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    def num_cached() -> int:
        return llm.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens

    expected = llm.generate(prompt, long)[0].outputs[0].token_ids
    assert engine.reset_prefix_cache()
    engine.add_request("runs", prompt, long)
    engine.step()
    assert not engine.reset_prefix_cache()  # what runs can be found
    assert num_cached() > 0
    assert engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert num_cached() == 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == expected
    assert llm.reset_prefix_cache(reset_running_requests=True)


def test_what_an_engine_says_of_itself(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine.model_config.max_model_len == llm.engine.capacity.max_len
    assert engine.get_tokenizer() is llm.get_tokenizer()
    assert "vllm:generation_tokens" in {metric.name for metric in engine.get_metrics()}
    with pytest.raises(ConfigError, match="get_metrics"):
        LLMEngine.from_engine_args(EngineArgs("m"), stat_loggers=[object()])
