"""Configs as they are published: odd keys, keys left out, and what transformers reads of them."""

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from builders import plain_logits, tiny_config, tiny_spec, tiny_weights
from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.models.load import load_decoder, spec_of
from hunch.models.native import load_native
from hunch.models.reading import READ_VERSION, Recorded
from hunch.models.spec import ModelSpec
from hunch.models.weights import for_length, open_weights
from hunch.models.weights.configs import unified_config
from hunch.registry import MODELS, resolve
from their_models import GATED

OF_TRAINING = {"router_jitter_noise", "text_config", "vision_config", "audio_config"}
THEIRS = {  # transformers' name of the config of each architecture
    name: kind
    for table in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")
    for kind, name in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items()
    if name in MODELS
}
ATTENDING = {"layer_types": ["attention"] * 2, "num_hidden_layers": 2, "num_local_experts": 0}
GEMMA4 = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
GEMMA4 |= {"enable_moe_block": True, "num_kv_shared_layers": 2}
CHANGES = {  # where defaults are no model that is published
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": ATTENDING,
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
}


def settings_of(architecture: str) -> tuple[set[str], dict[str, Any]]:
    """Names of all settings transformers' class has, and a config of its defaults."""
    kind = CONFIG_MAPPING[THEIRS[architecture]]
    inner = kind.sub_configs.get("text_config", kind)  # of a model of more than text
    text = inner() if dataclasses.is_dataclass(inner) else kind().get_text_config()
    names = {field.name for some in (kind, text) for field in dataclasses.fields(some)}
    saved = text.to_dict() | {"architectures": [architecture]}
    return names, unified_config(saved | CHANGES.get(architecture, {}))


@pytest.mark.parametrize(
    "architecture",
    [  # transformers takes 15 s to import what Gemma 4's settings stand in
        pytest.param(name, marks=pytest.mark.slow) if "Gemma4" in name else name
        for name in sorted(THEIRS)
    ],
)
def test_every_setting_of_transformers_is_read_or_harmless(architecture):
    names, config = settings_of(architecture)
    recorded = Recorded(config)
    resolve(MODELS, architecture).read_config(recorded, architecture)
    unread = Recorded(dict.fromkeys(names - recorded.read - OF_TRAINING, "on")).unread()
    assert not unread, f"{READ_VERSION} in models/reading.py says they are"


def test_a_key_that_transformers_does_not_read_is_passed_by(caplog):
    written = {"transformers_version": "4.52.3", "activation": "swiglu"}
    assert tiny_spec(**written) == tiny_spec()
    assert "activation=swiglu" in caplog.text
    rope = {"rope_type": "yarn", "factor": 2.0, "attn_factor": 0.87}
    spec = tiny_spec(transformers_version="4.51.0", rope_scaling=rope)
    assert spec.rope == tiny_spec(rope_scaling={"rope_type": "yarn", "factor": 2.0}).rope
    assert "attn_factor=0.87" in caplog.text


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"transformers_version": "6.1.0"},
        {"transformers_version": None},
        {"transformers_version": "4.52.3", "auto_map": {"AutoConfig": "configuration_mine.Mine"}},
    ],
    ids=["no version", "a newer version", "none", "code of its own"],
)
def test_others_are_refused_with_what_to_do(how):
    with pytest.raises(UnsupportedModelError, match=r"clip_qkv=8.0.*take it out of config.json"):
        tiny_spec(clip_qkv=8.0, **how)
    rope = {"rope_type": "linear", "factor": 2.0, "unheard_of": 1.0}
    with pytest.raises(UnsupportedModelError, match=r"unheard_of=1.0"):
        tiny_spec(rope_scaling=rope, **how)


@pytest.mark.parametrize(
    ("family", "left_out", "given"),
    [  # what transformers takes where a file does not say it
        ("Cohere", "rope_parameters", {}),
        ("Ernie4_5", "rope_parameters", {}),
        ("SmolLM3", "rope_parameters", {}),
        ("Cohere2", "sliding_window", {"num_hidden_layers": 4}),
        ("Mistral", "sliding_window", {}),
        ("DeepseekV3", "routed_scaling_factor", {}),
        ("DeepseekV3", "topk_group", {}),
        ("Glm4MoeLite", "routed_scaling_factor", {}),
        ("GptOss", "layer_types", {}),
        ("GptOss", "rope_parameters", {"max_position_embeddings": 131_072}),
        ("Gemma2", "sliding_window", {"head_dim": 16}),
        ("Olmo3", "sliding_window", {"num_hidden_layers": 4}),
        ("Olmo3", "rope_parameters", {}),
        ("Exaone4", "sliding_window", {"num_hidden_layers": 4}),
        ("Gemma2", "attn_logit_softcapping", {"head_dim": 16}),
        ("Gemma2", "final_logit_softcapping", {"head_dim": 16}),
    ],
)
def test_values_that_a_file_leaves_out_are_those_of_transformers(family, left_out, given):
    saved = json.loads(getattr(transformers, f"{family}Config")(**GATED | given).to_json_string())
    saved = unified_config(saved | {"architectures": [f"{family}ForCausalLM"]})
    ropes = {"rope_parameters", "rope_theta", "rope_scaling"}
    keys = ropes if left_out in ropes else {left_out}
    cut = {key: value for key, value in saved.items() if key not in keys}
    assert cut != saved
    assert ModelSpec.from_config(cut) == ModelSpec.from_config(saved)


# What a file must say: sizes, and which config it is.
_SIZES = re.compile(
    r"(vocab|hidden|.*intermediate|ffn|n_embd|n_inner|word_embed).*|.*_(dim|rank|rank_size)"
    r"|(num|n|moe)_.*|max_position_embeddings|.*_token_id|model_type|first_k_dense_replace"
    r"|top_k_experts"
)


@pytest.mark.parametrize(
    "architecture",
    [  # of models of more than text, others' files differ more
        name
        for name in sorted(THEIRS)
        if "text_config" not in CONFIG_MAPPING[THEIRS[name]].sub_configs and "Gemma4" not in name
    ],
)
def test_a_file_of_sizes_alone_is_read_as_transformers_reads_it(architecture):
    """Or with a word of what it lacks."""
    kind = CONFIG_MAPPING[THEIRS[architecture]]
    saved = json.loads(kind(**CHANGES.get(architecture, {})).to_json_string(use_diff=False))
    types = ("layer_types", "layers_block_type") if "mamba" in str(saved.keys()) else ()
    layers = {key: saved[key] for key in types if key in saved}
    cut = {key: value for key, value in saved.items() if _SIZES.fullmatch(key)} | layers
    whole = json.loads(kind(**{**cut, "model_type": None}).to_json_string(use_diff=False))

    def spec(config: dict[str, Any]) -> ModelSpec:
        return ModelSpec.from_config(unified_config(config | {"architectures": [architecture]}))

    expected = spec(whole)
    try:
        read = spec(cut)
    except ModelFormatError as error:
        if "lacks" not in str(error):
            raise
    else:
        assert read == expected


def test_a_part_of_each_head_is_turned_by_those_families_alone_that_do():
    assert tiny_spec("NemotronForCausalLM", partial_rotary_factor=0.25).rope.dim == 2
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor.*whole heads"):
        tiny_spec(partial_rotary_factor=0.5)
    granite = {"partial_rotary_factor": 0.5, "layer_rope_theta": [0, 99.0, 99.0]}
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor.*whole heads"):
        tiny_spec("GraniteSWAForCausalLM", **granite)
    config = transformers.DeepseekV3Config().to_dict() | {
        "architectures": ["DeepseekV3ForCausalLM"]
    }
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedModelError, match="proportional"):
        ModelSpec.from_config(unified_config(config | {"rope_parameters": rope}))


def test_a_floor_of_weights_that_counts_is_refused():
    sizes = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    assert tiny_spec("Ernie4_5_MoeForCausalLM", **sizes, moe_norm_min=1e-12).experts is not None
    with pytest.raises(UnsupportedModelError, match=r"moe_norm_min=0.1"):  # with a bias, it may
        tiny_spec("Ernie4_5_MoeForCausalLM", **sizes, moe_norm_min=0.1)


def test_recurrent_layers_have_one_activation():
    config = transformers.Qwen3_5TextConfig().to_dict() | {"architectures": ["Qwen3_5ForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match="hidden_act='relu'"):
        ModelSpec.from_config(unified_config(config | {"hidden_act": "relu"}))


def test_settings_of_gemma():
    assert tiny_spec("GemmaForCausalLM", hidden_act="gelu").activation == "gelu_pytorch_tanh"
    assert tiny_spec("GemmaForCausalLM", hidden_act="relu").activation == "relu"
    with pytest.raises(UnsupportedModelError, match="attn_logit_softcapping"):
        tiny_spec("Gemma3ForCausalLM", attn_logit_softcapping=20.0)


def test_windows_of_smollm_are_those_of_its_layer_types():
    given = {"sliding_window": 8, "no_rope_layer_interval": 3}
    types = ["sliding_attention", "full_attention", "full_attention"]
    spec = tiny_spec("SmolLM3ForCausalLM", layer_types=types, **given)
    assert spec.windows == (8, None, None)
    assert tiny_spec("SmolLM3ForCausalLM", **given).windows == (None,) * 3
    spec = tiny_spec("SmolLM3ForCausalLM", use_sliding_window=True, **given)
    assert spec.windows == (None, None, 8)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("Qwen2", {"num_hidden_layers": 30}),
        ("Qwen3", {"num_hidden_layers": 30, "sliding_window": 9}),
        ("Qwen2Moe", {"num_hidden_layers": 5, "max_window_layers": 3}),
        ("Qwen3Moe", {"num_hidden_layers": 3, "max_window_layers": 2}),
    ],
)
def test_windows_of_qwen_that_a_file_does_not_list_are_those_of_transformers(family, given):
    given = GATED | given | {"use_sliding_window": True}
    theirs = getattr(transformers, f"{family}Config")(**given)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    expected = tuple(theirs.sliding_window if t == "sliding_attention" else None for t in types)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16} if family == "Qwen2Moe" else {}
    given |= experts if "Moe" in family else {}
    assert ModelSpec.from_config(given | {"architectures": [f"{family}ForCausalLM"]}).windows == (
        expected
    )


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3VLMoe"])
def test_windows_that_transformers_does_not_read_are_refused(family):
    with pytest.raises(UnsupportedModelError, match="use_sliding_window=True is not supported"):
        tiny_spec(f"{family}ForConditionalGeneration", use_sliding_window=True)


def test_windows_of_zero_are_refused():
    """As transformers has them where Qwen2-MoE's are listed and switched off."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes |= {"shared_expert_intermediate_size": 16, "layer_types": ["sliding_attention"] * 3}
    with pytest.raises(UnsupportedModelError, match="use_sliding_window switches off"):
        tiny_spec("Qwen2MoeForCausalLM", **sizes)


def test_settings_of_qwen():
    coder = {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    spec = tiny_spec("Qwen3MoeForCausalLM", **sizes, **coder)
    assert spec.has_qk_norm
    with pytest.raises(UnsupportedModelError, match="use_qk_norm=False"):
        tiny_spec("Qwen3ForCausalLM", use_qk_norm=False)
    chunks = {"chunk_size": 96, "local_size": 16, "original_max_position_embeddings": 96}
    assert tiny_spec("Qwen2ForCausalLM", dual_chunk_attention_config=chunks).max_len == 80


def test_yarn_stretches_a_context_that_was_not_stretched_yet():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert tiny_spec(rope_scaling=yarn).max_len == 1024
    assert tiny_spec(rope_scaling=yarn, max_position_embeddings=320).max_len == 1024
    assert tiny_spec(rope_scaling=yarn, max_position_embeddings=2048).max_len == 2048


def test_whether_the_embedding_is_the_output_matrix_is_told_by_the_files():
    weights = tiny_weights(tiny_config(tie_word_embeddings=None, head_dim=32))
    assert not spec_of(weights).is_tied
    expected = plain_logits(load_decoder(weights), [5, 6, 7])
    weights.tensors["model.embed_tokens.weight"] = weights.tensors.pop("lm_head.weight")
    assert spec_of(weights).is_tied
    assert load_native(weights).spec.is_tied
    assert not plain_logits(load_decoder(weights), [5, 6, 7]).equal(expected)
    weights.config["tie_word_embeddings"] = False
    with pytest.raises(ModelFormatError, match=r"lm_head.weight"):
        load_decoder(weights)


def test_an_output_matrix_of_its_own_counts_whatever_the_config_says():
    weights = tiny_weights(tiny_config(tie_word_embeddings=False))
    expected = plain_logits(load_decoder(weights), [5, 6, 7])
    weights.config["tie_word_embeddings"] = True
    assert plain_logits(load_decoder(weights), [5, 6, 7]).equal(expected)
    weights.tensors["lm_head.weight"] = weights.tensors["model.embed_tokens.weight"].clone()
    assert spec_of(weights).is_tied


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 3.0}


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": None, "rope_theta": 99.0, "rope_parameters": YARN | {"rope_theta": 77.0}},
        {"rope_scaling": None, "rope_theta": 99.0, "rope_parameters": YARN},
        {"rope_scaling": LINEAR, "rope_theta": 99.0, "rope_parameters": YARN},
        {"rope_parameters": {"type": "linear", "factor": 3.0, "rope_theta": 99.0}},
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
    ],
)
def test_rope_settings_in_several_places_are_those_that_transformers_takes(given, tmp_path):
    config = tiny_config(rope_theta=None, head_dim=8, tie_word_embeddings=False)
    weights = tiny_weights(config)
    save_file(weights.tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llama"} | given))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = list(range(5, 45))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    ours = plain_logits(load_decoder(open_weights(tmp_path)), ids)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


BY_TYPE = {"sliding_attention": {"rope_theta": 99.0}, "full_attention": YARN}


def test_rope_settings_by_type_of_layer_may_stand_under_their_older_name():
    config = tiny_config("Gemma3ForCausalLM", rope_theta=None, sliding_window=8, head_dim=8)
    spec = ModelSpec.from_config(unified_config(config | {"rope_scaling": BY_TYPE}))
    assert spec == ModelSpec.from_config(unified_config(config | {"rope_parameters": BY_TYPE}))
    assert spec.more_ropes[0].theta == 99.0


def test_yarn_that_ends_between_dimensions_by_type_of_layer_is_refused():
    """transformers reads `truncate` where settings are not nested."""
    given = {"rope_theta": None, "sliding_window": 8, "head_dim": 8}
    given["rope_parameters"] = BY_TYPE | {"full_attention": YARN | {"truncate": False}}
    with pytest.raises(UnsupportedModelError, match=r"truncate=false.*by type of layer"):
        tiny_spec("Gemma3ForCausalLM", **given)
    assert not tiny_spec(rope_scaling=YARN | {"truncate": False}).rope.is_truncated


def test_rope_factors_by_type_of_layer_are_those_of_the_context_that_is_served(caplog):
    long = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long["original_max_position_embeddings"] = 64
    given = {"rope_parameters": BY_TYPE | {"full_attention": long}, "rope_theta": None}
    config = tiny_config("Gemma3ForCausalLM", sliding_window=8, head_dim=8, **given)
    for max_len, first in ((None, 2.0), (64, 1.0)):
        spec = spec_of(for_length(tiny_weights(config), max_len))
        assert spec.rope.factors[0] == first
    assert "max_model_len=64 uses the former" in caplog.text


def test_ropes_of_command_a_plus_are_not_stretched():
    """transformers passes `rope_scaling` by, for this family alone."""
    given = {"num_experts": 4, "num_experts_per_tok": 2, "logit_scale": 0.5, "head_dim": 8}
    assert tiny_spec("Cohere2MoeForCausalLM", **given).experts is not None
    with pytest.raises(UnsupportedModelError, match="rope_scaling"):
        tiny_spec("Cohere2MoeForCausalLM", **given, rope_scaling=LINEAR)


def test_layers_of_gemma4_are_counted_with_leading_zeros():
    sizes = {"head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
    sizes |= {"num_hidden_layers": 12, "vocab_size_per_layer_input": 96, "sliding_window": 8}
    changed = {"per_layer_config": {"05": {"head_dim": 24}, "11": {"head_dim": 24}}}
    heads = tiny_spec("Gemma4ForCausalLM", **sizes, **changed).other_heads
    assert heads is not None
    assert heads.head_dim == 24
