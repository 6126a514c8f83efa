"""What a config.json may say, and what is refused by name."""

import pytest

from builders import tiny_config, tiny_spec
from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.models.load import tensor_shapes
from hunch.models.native import not_native
from hunch.models.spec import ModelSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_defaults_are_filled_in():
    spec = tiny_spec(num_key_value_heads=None)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_len) == (4, 8, 256)
    assert spec.rope is not None
    assert spec.rope.rope_type == "default"
    assert spec.windows == (None, None, None)


def test_old_and_new_rope_settings_mean_the_same():
    old = tiny_spec(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = tiny_spec(rope_theta=None, rope_parameters=LLAMA3 | {"rope_theta": 500000.0})
    oldest = tiny_spec(
        rope_theta=500000.0,
        rope_scaling={("type" if k == "rope_type" else k): v for k, v in LLAMA3.items()},
    )
    assert old == new == oldest
    assert old.rope is not None
    assert (old.rope.rope_type, old.rope.original_len, old.rope.theta) == ("llama3", 8192, 500000.0)


def test_windows_per_layer():
    assert tiny_spec("MistralForCausalLM", sliding_window=9).windows == (9, 9, 9)
    config = tiny_config("MistralForCausalLM")
    assert ModelSpec.from_config(config).windows == (4096,) * 3  # transformers' default
    assert ModelSpec.from_config(config | {"sliding_window": None}).windows == (None,) * 3
    qwen = {"sliding_window": 9, "max_window_layers": 2}
    assert tiny_spec("Qwen2ForCausalLM", **qwen).windows == (None, None, None)
    on = qwen | {"use_sliding_window": True}
    assert tiny_spec("Qwen2ForCausalLM", **on).windows == (None, None, 9)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert tiny_spec("Qwen3ForCausalLM", **on, layer_types=types).windows == (9, None, 9)


def test_opt_reads_its_own_keys():
    spec = tiny_spec("OPTForCausalLM", word_embed_proj_dim=16, do_layer_norm_before=False)
    assert (spec.embed_width, spec.is_post_norm, spec.has_final_norm) == (16, True, False)
    assert not spec.is_tied  # projected, the embedding is no longer the output matrix
    assert spec.rope is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more"),
        ({"vocab_size": 10**13}, "vocab_size=10000000000000 is more"),
        ({"max_position_embeddings": 10**18}, "max_position_embeddings=1000000000000000000"),
        ({"num_attention_heads": 3}, "num_attention_heads=3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope settings"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "1 rope factors"),
    ],
)
def test_wrong_values_are_named(changes, said):
    with pytest.raises(ModelFormatError, match=said):
        tiny_spec(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LamaForCausalLM"]}, "did you mean 'LlamaForCausalLM'"),
        ({"hidden_act": "sillu"}, "did you mean 'silu'"),
        ({"rope_scaling": {"rope_type": "unheard-of", "factor": 2.0}}, "unheard-of"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale": 3}}, "mscale=3"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"architectures": ["PlamoForCausalLM"], "new_rule": 8.0}, "has no new_rule=8.0"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_is_not_supported_is_named(changes, said):
    with pytest.raises(UnsupportedModelError, match=said):
        tiny_spec(**changes)


def test_a_layer_type_that_is_not_known_is_named():
    changes = {"use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        tiny_spec("Qwen2ForCausalLM", **changes, layer_types=["chunked_attention"] * 3)
    with pytest.raises(ModelFormatError, match="lists 2 layers"):
        tiny_spec("Qwen2ForCausalLM", **changes, layer_types=["full_attention"] * 2)


def test_a_config_without_architectures():
    config = tiny_config()
    del config["architectures"]
    with pytest.raises(ModelFormatError, match="architectures"):
        ModelSpec.from_config(config)


# As published, sizes included: other names of the Llama decoder.
COMMON_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
CODE_LLAMA = {
    "_name_or_path": "codellama/CodeLlama-7b-hf", "max_position_embeddings": 16384,
    "rope_theta": 1000000, "torch_dtype": "bfloat16", "vocab_size": 32016,
}  # fmt: skip
VICUNA = {
    "_name_or_path": "vicuna-7b-v1.5-16k", "max_position_embeddings": 4096, "pad_token_id": 0,
    "max_sequence_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"},
    "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "rope_type", "theta", "max_len"),
    [(CODE_LLAMA, "default", 1e6, 16384), (VICUNA, "linear", 1e4, 16384)],
    ids=["Code Llama", "Vicuna"],
)
def test_models_that_are_llamas_by_another_name(changes, rope_type, theta, max_len):
    spec = ModelSpec.from_config(COMMON_LLAMA | changes)
    assert spec.rope is not None
    assert (spec.rope.rope_type, spec.rope.theta, spec.max_len) == (rope_type, theta, max_len)
    assert tensor_shapes(spec)["lm_head.weight"] == (changes["vocab_size"], 4096)
    assert not_native(spec) == []


@pytest.mark.parametrize(
    ("given", "architecture"),
    [
        ({"architectures": None, "model_type": "llama"}, "LlamaForCausalLM"),
        ({"architectures": [], "model_type": "qwen3"}, "Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "gemma3_text"}, "Gemma3ForCausalLM"),
        ({"architectures": None, "model_type": "ernie4_5"}, "Ernie4_5ForCausalLM"),
        ({"architectures": ["MistralModel"]}, "MistralForCausalLM"),
    ],
)
def test_an_architecture_by_other_names(given, architecture):
    assert ModelSpec.from_config(tiny_config(head_dim=8) | given).architecture == architecture


def test_a_config_without_a_name():
    with pytest.raises(ModelFormatError, match="names no architectures"):
        ModelSpec.from_config(tiny_config() | {"architectures": None, "model_type": "unheard_of"})
    with pytest.raises(UnsupportedModelError, match=r"'ChatGLMModel' is not known$"):
        ModelSpec.from_config({"architectures": ["ChatGLMModel"], "num_layers": 28})
