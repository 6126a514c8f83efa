"""Text is the same with and without drafts, alone and in company, for every format of GGUF."""

import numpy as np
import pytest

from hunch import LLM, SamplingParams
from hunch.kernels import native_library
from hunch.models.weights import open_weights
from tiny_gguf import LAYERS, write_gguf
from tiny_models import write_llama

pytestmark = pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")

WIDTH, HEADS, HEAD_DIM, FFN, VOCAB = 256, 8, 32, 256, 300
FORMATS = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "MXFP4", "Q2_K", "TQ1_0", "TQ2_0"),
]
PROMPTS = [[5, 6, 7] * 5, [40, 41, 42, 43, 40, 41], [9], list(range(100, 130))]
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.7, seed=5, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("formats")
    write_llama(path / "tokenizer")
    return path


def write(path, block_format):
    rng = np.random.default_rng(1)

    def matrix(*shape, scale=1.0):
        return (rng.normal(size=shape) * scale / shape[-1] ** 0.5).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(VOCAB, WIDTH, scale=3.0),
        "model.norm.weight": np.ones(WIDTH, np.float32),
        "lm_head.weight": matrix(VOCAB, WIDTH, scale=4.0),
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),  # as wide as the stream
        "self_attn.k_proj": (2 * HEAD_DIM, WIDTH),
        "self_attn.v_proj": (2 * HEAD_DIM, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(WIDTH, np.float32)
    sizes = {
        "embedding_length": WIDTH, "feed_forward_length": FFN, "attention.head_count": HEADS,
        "attention.head_count_kv": 2, "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM, "vocab_size": VOCAB,
    }  # fmt: skip
    metadata = {f"qwen2.{key}": value for key, value in sizes.items()}
    return write_gguf(
        path, tensors, architecture="qwen2", block_format=block_format, metadata=metadata
    )


def texts(model, folder, speculate, *, together):
    tokenizer = str(folder / "tokenizer")
    how = {"max_num_seqs": 4, "max_model_len": 128, "threads": 2, "tokenizer": tokenizer}
    with LLM(str(model), speculate=speculate, always_draft=speculate != "off", **how) as llm:
        asked = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
        outputs = [
            output.outputs[0].token_ids
            for params in PARAMS
            for prompts in asked
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        return outputs, llm.stats()["drafted"]


@pytest.mark.parametrize("block_format", [*FORMATS, "mixed"])
def test_drafts_and_company_change_no_token(block_format, folder):
    formats = ["Q6_K", "Q5_0", "Q4_K", "Q8_0", "Q5_K"] if block_format == "mixed" else block_format
    model = write(folder / f"{block_format}.gguf", formats)
    plain, _ = texts(model, folder, "off", together=False)
    drafted, num_checked = texts(model, folder, "suffix", together=True)
    assert num_checked > 0
    assert drafted == plain


def test_what_is_held_is_no_larger_than_the_file(folder):
    from hunch.models.native import load_native

    for block_format in FORMATS:
        weights = open_weights(write(folder / f"{block_format}.gguf", block_format))
        model = load_native(weights)
        most = 1.23 if block_format == "TQ1_0" else 1.13
        assert model.weight_bytes < most * weights.nbytes, block_format
