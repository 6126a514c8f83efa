"""The default model against transformers filled with the same tensors."""

import pytest
import torch
import transformers

from builders import plain_logits
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights

# "The sea is a large body of salt water that covers about 71 percent of the surface ..."
IDS = [
    *(504, 3426, 314, 253, 1507, 1248, 282, 5420, 913, 338, 7725, 563, 216, 39, 33, 1870),
    *(282, 260, 2376, 282, 260, 2591, 30, 657, 314, 1478, 288, 800, 896, 5479, 282, 2109),
    *(284, 2355, 28, 284, 357, 4566, 354, 1070, 1791, 281, 260, 3947, 284, 260, 2412, 282),
    *(653, 3925, 30, 4228, 457, 804, 260, 3426, 327, 1114, 28, 327, 3735, 284, 327, 2827),
]


@pytest.fixture(scope="module")
def weights(default_files):
    return open_weights(default_files)


@torch.inference_mode()
def test_logits_are_those_of_transformers(weights):
    ours = load_decoder(weights)
    settings = {k: v for k, v in weights.config.items() if v is not None and k != "architectures"}
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    theirs.load_state_dict({n: weights.tensor(n) for n in weights.names()}, False, assign=True)
    theirs.tie_weights()
    # Its frequencies are no parameter and stayed without values on the meta device.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    expected = theirs.eval()(torch.tensor([IDS])).logits[0]
    given = plain_logits(ours, IDS)
    assert len(IDS) == 64
    torch.testing.assert_close(given, expected, atol=1e-3, rtol=0)
    assert given.argmax(-1).equal(expected.argmax(-1))
    # Rows of q and k in a wrong order, of both, would guess no better than chance.
    assert torch.nn.functional.cross_entropy(given[:-1], torch.tensor(IDS[1:])) < 3.0


def test_it_answers_a_simple_question_as_float32_does(default_files):
    """A model so small has activations of 14 bits; with 8 the default file speaks French."""
    from hunch import LLM, SamplingParams

    with LLM(default_files.name, speculate="off", max_num_seqs=1, max_model_len=256) as llm:
        assert llm.engine.capacity.activation_bits == 14
        question = {"role": "user", "content": "What is the capital of France?"}
        (output,) = llm.chat([question], SamplingParams(temperature=0.0, max_tokens=16))
    assert output.outputs[0].text == "The capital of France is Paris."
