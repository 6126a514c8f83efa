"""The default model in float32 writes what transformers writes, and no slower."""

from statistics import median
from time import perf_counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hunch import LLM, SamplingParams
from hunch.bench.workloads import PROMPTS
from hunch.hub import ModelFiles
from hunch.models.weights import open_weights

pytestmark = pytest.mark.slow
TOPICS = ("rivers", "bridges", "bread", "maps")
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def llm(default_files: ModelFiles) -> LLM:
    return LLM(str(default_files.path), dtype="float32", kernels="torch", speculate="suffix")


@pytest.fixture(scope="module")
def reference(default_files: ModelFiles) -> LlamaForCausalLM:
    weights = open_weights(default_files)
    config = LlamaConfig(**{k: v for k, v in weights.config.items() if k != "architectures"})
    model = LlamaForCausalLM(config).eval()
    state = {name: weights.tensor(name) for name in weights.names()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied
    return model


def prompts(llm: LLM) -> list[list[int]]:
    """32 of them: the built-in ones, each in four flavours."""
    texts = [record.get("prompt") or record["turns"][0] for record in PROMPTS]
    return [
        llm.encode_chat([{"role": "user", "content": f"{text} (Think of {topic}.)"}])
        for text in texts
        for topic in TOPICS
    ]


@torch.inference_mode()
def continue_with(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_greedy_tokens_are_equal_on_32_prompts(llm: LLM, reference: LlamaForCausalLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS)
    asked = prompts(llm)
    assert len(asked) == 32
    for prompt, output in zip(asked, llm.generate(asked, params), strict=True):
        assert output.outputs[0].token_ids == continue_with(reference, prompt, NUM_TOKENS)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_plain_decoding_is_no_slower(
    kernels: str, default_files: ModelFiles, reference: LlamaForCausalLM
) -> None:
    path = str(default_files.path)
    llm = LLM(path, dtype="float32", kernels=kernels, speculate="off", max_num_seqs=1)
    prompt = prompts(llm)[0]
    params = SamplingParams(temperature=0, max_tokens=32, min_tokens=32)
    ratios = []
    for _ in range(5):
        llm.reset_cache()
        began = perf_counter()
        llm.generate([prompt], params)
        ours = perf_counter() - began
        began = perf_counter()
        continue_with(reference, prompt, 32)
        ratios.append((perf_counter() - began) / ours)
    print(f"{kernels}: {median(ratios):.2f} times transformers' speed")
    assert median(ratios) >= 0.9
