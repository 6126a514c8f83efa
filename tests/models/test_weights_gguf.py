"""GGUF files read as if they were Hugging Face's: names, order of rows, config."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from hunch import hub
from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.models.weights.base import read_ahead
from hunch.models.weights.dequant import dequantise
from tiny_gguf import HEADS, VOCAB, WIDTH, interleave, random_tensors, write_gguf, write_parts


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tensors_come_back_under_their_names(tmp_path, architecture, has_bias):
    tensors = random_tensors(has_bias=has_bias)
    weights = open_weights(write_gguf(tmp_path / "m.gguf", tensors, architecture=architecture))
    assert sorted(weights.names()) == sorted(tensors)
    for name, expected in tensors.items():
        assert weights.shape(name) == expected.shape
        assert np.array_equal(weights.tensor(name).numpy(), expected), name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_metadata_is_a_config_its_family_reads(tmp_path, architecture, has_bias):
    tensors = random_tensors(has_bias=has_bias)
    weights = open_weights(write_gguf(tmp_path / "m.gguf", tensors, architecture=architecture))
    spec = ModelSpec.from_config(weights.config)
    assert spec.has_qkv_bias is has_bias
    assert spec.width == WIDTH


@pytest.mark.parametrize("block_format", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_matrices(tmp_path, block_format):
    tensors = random_tensors()
    weights = open_weights(write_gguf(tmp_path / "m.gguf", tensors, block_format=block_format))
    form = gguf.GGMLQuantizationType[block_format]
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        # Rows are quantised one by one, so their order does not touch the numbers.
        expected = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], form), form)
        assert np.array_equal(weights.tensor(name).numpy(), expected)


def test_packed_rows_are_in_the_order_of_the_tensor(tmp_path):
    weights = open_weights(write_gguf(tmp_path / "m.gguf", random_tensors(), block_format="Q4_1"))
    for name in weights.names():
        packed = weights.packed(name)
        if len(weights.shape(name)) == 1:
            assert packed is None
            continue
        assert packed is not None
        assert packed.format == "Q4_1"
        assert packed.data.dtype == torch.uint8
        assert packed.shape == weights.shape(name)
        again = dequantise(packed.format, packed.data, packed.shape[1])
        assert torch.equal(again, weights.tensor(name))


def test_plain_numbers_are_not_packed(tmp_path):
    weights = open_weights(write_gguf(tmp_path / "m.gguf", random_tensors(), block_format="F16"))
    assert all(weights.packed(name) is None for name in weights.names())


def test_tensors_can_be_asked_for_in_16_bits(tmp_path):
    weights = open_weights(write_gguf(tmp_path / "m.gguf", random_tensors(), block_format="Q8_0"))
    name = "model.embed_tokens.weight"
    assert torch.equal(weights.tensor(name, torch.bfloat16), weights.tensor(name).bfloat16())


@pytest.mark.parametrize("is_first_empty", [False, True])
def test_a_model_in_parts(tmp_path, is_first_empty):
    tensors = random_tensors()
    metadata = {"tokenizer.ggml.model": "gpt2"}
    whole = open_weights(write_gguf(tmp_path / "m.gguf", tensors, metadata=metadata))
    named = {"": None} | tensors if is_first_empty else tensors
    first, *_ = write_parts(tmp_path, named, len(named) if is_first_empty else 3, metadata=metadata)
    weights = open_weights(first)
    assert sorted(weights.names()) == sorted(tensors)
    assert weights.config == whole.config
    assert weights.metadata["tokenizer.ggml.model"] == "gpt2"
    assert weights.nbytes == whole.nbytes
    for name in tensors:
        assert torch.equal(weights.tensor(name), whole.tensor(name)), name
    assert read_ahead(first) in (0, sum(p.stat().st_size for p in tmp_path.glob("model-*.gguf")))


def test_the_file_never_changes(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_tensors())
    before = path.read_bytes()
    open_weights(path).tensor("model.norm.weight").zero_()
    assert path.read_bytes() == before


def test_config_speaks_hugging_face(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_tensors())
    config = open_weights(path).config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == VOCAB
    assert config["hidden_size"] == WIDTH
    assert config["num_attention_heads"] == HEADS
    assert config["head_dim"] == 16
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 50000.0
    assert config["rope_scaling"] is None
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 256


def test_an_output_matrix_of_its_own(tmp_path):
    tensors = random_tensors(is_tied=False)
    weights = open_weights(write_gguf(tmp_path / "m.gguf", tensors))
    assert weights.config["tie_word_embeddings"] is False
    assert np.array_equal(weights.tensor("lm_head.weight").numpy(), tensors["lm_head.weight"])


def test_a_window_makes_it_mistral(tmp_path):
    metadata = {"llama.attention.sliding_window": 128}
    config = open_weights(
        write_gguf(tmp_path / "m.gguf", random_tensors(), metadata=metadata)
    ).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 128


def test_rope_factors_of_llama_3(tmp_path):
    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), extra={"rope_freqs.weight": factors})
    weights = open_weights(path)
    assert weights.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
    assert weights.tensor("rope_freqs.weight").tolist() == factors.tolist()


def test_linear_rope_scaling(tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), metadata=metadata)
    assert open_weights(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_interleaving_is_what_rotary_files_do() -> None:
    rows = np.arange(8)  # one head: halves 0-3 and 4-7
    assert interleave(rows, 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_an_unknown_architecture_names_the_known_ones(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), architecture="unheard")
    with pytest.raises(UnsupportedModelError, match=r"'unheard'.*llama, mistral, qwen2, qwen3"):
        open_weights(path)


def test_tensors_of_another_design_are_named(tmp_path):
    latent = {"blk.0.attn_kv_a_mqa.weight": np.zeros((32, 32), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), extra=latent)
    with pytest.raises(UnsupportedModelError, match="attn_kv_a_mqa"):
        open_weights(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.block_count": 3}, "claims 3 layers"),
        ({"llama.block_count": 10**9}, "claims 1000000000 layers"),
        ({"llama.embedding_length": 128}, "claims width 128"),
        ({"llama.attention.head_count": 0}, "head_count"),
        ({"llama.attention.head_count": "many"}, "head_count"),
        ({"llama.attention.head_count_kv": 3}, "key-value heads"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
    ],
)
def test_metadata_that_contradicts_the_tensors(tmp_path, metadata, message):
    path = write_gguf(tmp_path / "m.gguf", random_tensors(), metadata=metadata)
    with pytest.raises(ModelFormatError, match=message):
        open_weights(path)


def test_a_missing_tensor_is_named(tmp_path):
    weights = open_weights(write_gguf(tmp_path / "m.gguf", random_tensors()))
    with pytest.raises(ModelFormatError, match=r"lm_head\.weight"):
        weights.tensor("lm_head.weight")


def test_the_default_model(default_files: hub.ModelFiles) -> None:
    weights = open_weights(default_files)
    assert weights.config["num_hidden_layers"] == 30
    assert weights.config["vocab_size"] == 49152
    assert weights.config["tie_word_embeddings"] is True
    assert len(weights.names()) == 272
    packed = weights.packed("model.layers.29.self_attn.k_proj.weight")
    assert packed is not None
    assert (packed.format, packed.shape) == ("Q4_1", (192, 576))
    embedding = weights.tensor("model.embed_tokens.weight")
    assert embedding.shape == (49152, 576)
    assert 0.05 < float(embedding[:1000].std()) < 0.5
