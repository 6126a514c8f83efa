"""What writes in models that see too, against transformers, as it saves them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from builders import DictWeights, plain_logits
from hunch.errors import UnsupportedModelError
from hunch.models.load import load_decoder
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.models.weights.configs import unified_config
from their_models import GATED, GEMMA4

IDS = torch.randint(3, 80, (41,), generator=torch.Generator().manual_seed(5)).tolist()
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 14}
EYES |= {"num_attention_heads": 2, "image_size": 28}
EARS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
EARS |= {"num_attention_heads": 2, "max_source_positions": 20, "num_mel_bins": 8}
SQUARE = EYES | {"image_size": [28, 28], "patch_size": [14, 14]}
EXPERTS = GATED | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 12}
AXES = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True}
GLM_AXES = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
GLM_AXES |= {"partial_rotary_factor": 0.5}
GLM_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
GLM_EYES |= {"out_hidden_size": 32, "image_size": 28}
SMALL_EARS = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2}
SMALL_EARS |= {"encoder_ffn_dim": 16, "num_mel_bins": 8, "output_dim": 32}
CASES: dict[str, Callable[[], Any]] = {
    "Llava": lambda: transformers.LlavaConfig(
        vision_config=EYES | {"model_type": "clip_vision_model"},
        text_config=GATED | {"model_type": "mistral", "sliding_window": 7},
        image_token_id=85,
    ),
    "SmolVLM": lambda: transformers.SmolVLMConfig(
        vision_config=EYES, text_config=GATED | {"model_type": "llama"}, image_token_id=85
    ),
    "InternVL": lambda: transformers.InternVLConfig(
        vision_config=SQUARE,
        text_config=GATED | {"model_type": "qwen3", "head_dim": 16},
        image_token_id=85,
    ),
    "GotOcr2": lambda: transformers.GotOcr2Config(
        vision_config=EYES | {"output_channels": 16, "mlp_dim": 16, "global_attn_indexes": [0]},
        text_config=GATED | {"model_type": "qwen2"},
    ),
    "Voxtral": lambda: transformers.VoxtralConfig(
        audio_config=EARS, text_config=GATED | {"model_type": "llama"}
    ),
    "Idefics2": lambda: transformers.Idefics2Config(
        vision_config=EYES, text_config=GATED | {"model_type": "mistral"}
    ),
    "VideoLlava": lambda: transformers.VideoLlavaConfig(
        vision_config=EYES | {"model_type": "clip_vision_model"},
        text_config=GATED | {"model_type": "llama"},
    ),
    "Ovis2": lambda: transformers.Ovis2Config(
        vision_config=EYES, text_config=GATED | {"model_type": "qwen2"}
    ),
    "Qwen3VLMoe": lambda: transformers.Qwen3VLMoeConfig(
        text_config=EXPERTS | {"rope_parameters": AXES | {"rope_theta": 1e4}},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
        | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    ),
    "Qwen2_5OmniThinker": lambda: transformers.Qwen2_5OmniThinkerConfig(
        text_config=GATED | {"rope_parameters": GLM_AXES | {"partial_rotary_factor": 1.0}},
        vision_config=GLM_EYES | {"fullatt_block_indexes": [0]},
        audio_config=SMALL_EARS,
    ),
    "Qwen3OmniMoeThinker": lambda: transformers.Qwen3OmniMoeThinkerConfig(
        text_config=EXPERTS | {"rope_parameters": AXES | {"rope_theta": 1e4}},
        vision_config=GLM_EYES | {"deepstack_visual_indexes": [0]},
        audio_config=SMALL_EARS | {"downsample_hidden_size": 16},
    ),
    "AyaVision": lambda: transformers.AyaVisionConfig(
        vision_config=EYES | {"model_type": "siglip_vision_model"},
        text_config=GATED | {"model_type": "cohere2", "sliding_window": 7},
    ),
    "Cohere2Vision": lambda: transformers.Cohere2VisionConfig(
        vision_config=EYES | {"model_type": "siglip_vision_model"},
        text_config=GATED | {"model_type": "cohere2"},
    ),
    "Lfm2Vl": lambda: transformers.Lfm2VlConfig(
        vision_config=EYES | {"model_type": "siglip2_vision_model", "num_patches": 16},
        text_config=GATED
        | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "DeepseekVL": lambda: transformers.DeepseekVLConfig(
        vision_config=EYES | {"model_type": "siglip_vision_model"},
        text_config=GATED | {"model_type": "llama"},
    ),
    "Janus": lambda: transformers.JanusConfig(
        vision_config=EYES | {"model_type": "janus_vision_model", "projection_dim": 16},
        text_config=GATED | {"model_type": "llama"},
        vq_config={"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1},
    ),
    "VideoLlama3": lambda: transformers.VideoLlama3Config(
        vision_config=EYES, text_config=GATED | {"model_type": "qwen2"}
    ),
    "Glm4v": lambda: transformers.Glm4vConfig(
        text_config=GATED | {"rope_parameters": GLM_AXES | {"mrope_section": [1, 1, 0]}},
        vision_config=GLM_EYES,
    ),
    "Glm4vMoe": lambda: transformers.Glm4vMoeConfig(
        text_config=GATED
        | {"head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
        | {"moe_intermediate_size": 12, "first_k_dense_replace": 1, "topk_group": 1}
        | {"rope_parameters": GLM_AXES, "n_shared_experts": 1},
        vision_config=GLM_EYES,
    ),
    "MiniCPMV4_6": lambda: transformers.MiniCPMV4_6Config(
        vision_config=EYES | {"insert_layer_id": 0},
        text_config=GATED
        | {"model_type": "qwen3_5_text", "head_dim": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "Gemma4Unified": lambda: transformers.Gemma4UnifiedConfig(
        text_config={key: value for key, value in GEMMA4.items() if "per_layer" not in key}
    ),
}


SLOW = ("Janus", "VideoLlava", "Ovis2", "Gemma4Unified")  # to build, in transformers


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in CASES]
)
@torch.no_grad()
def test_logits_of_text_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = getattr(transformers, f"{name}ForConditionalGeneration")(CASES[name]()).eval()
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(open_weights(tmp_path))
    expected = theirs(input_ids=torch.tensor([IDS])).logits[0]
    if name in ("AyaVision", "Cohere2Vision"):  # transformers leaves its scale out, Cohere 2 has it
        expected = expected * theirs.config.text_config.logit_scale
    torch.testing.assert_close(plain_logits(ours, IDS), expected, atol=1e-4, rtol=1e-4)


def test_experts_of_qwen_stand_either_way(tmp_path: Path) -> None:
    """As it was published, [expert, in, out], and as newer tools save it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = transformers.Qwen3VLMoeForConditionalGeneration(CASES["Qwen3VLMoe"]())
    theirs.save_pretrained(tmp_path / "new")
    weights = open_weights(tmp_path / "new")
    tensors = {name: weights.tensor(name) for name in weights.names()}
    turned = {
        name: value.transpose(1, 2).contiguous() if "experts.gate_up" in name else value
        for name, value in tensors.items()
    }
    turned |= {
        name: value.transpose(1, 2).contiguous()
        for name, value in tensors.items()
        if name.endswith("experts.down_proj")
    }
    assert any(turned[name].shape != tensors[name].shape for name in tensors)
    answers = [
        plain_logits(load_decoder(DictWeights(weights.config, some)), IDS)
        for some in (tensors, turned)
    ]
    assert answers[0].equal(answers[1])


def test_sizes_that_a_text_config_leaves_out() -> None:
    """As LLaVA 1.5 was published."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32_064}
    outer = {"architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100}
    config = unified_config({**outer, "vision_config": {}, "text_config": text})
    spec = ModelSpec.from_config(config)
    assert (spec.width, spec.num_layers, spec.ffn_width) == (4096, 32, 11_008)
    with pytest.raises(UnsupportedModelError, match="model_type 'mamba' is not one of"):
        unified_config({**outer, "text_config": {"model_type": "mamba"}})


@torch.no_grad()
def test_what_thinks_in_a_model_that_speaks(tmp_path: Path) -> None:
    """As Qwen2.5-Omni was published."""
    theirs = transformers.Qwen2_5OmniThinkerForConditionalGeneration(CASES["Qwen2_5OmniThinker"]())
    theirs.save_pretrained(tmp_path)
    stored = open_weights(tmp_path)
    tensors = {
        "thinker." + name.replace("model.language_model.", "model.", 1): stored.tensor(name)
        for name in stored.names()
    }
    tensors["talker.model.layers.0.mlp.up_proj.weight"] = torch.zeros(3)
    tensors["token2wav.code2wav.layer.weight"] = torch.zeros(3)
    thinker = json.loads((tmp_path / "config.json").read_text())
    outer = {"architectures": ["Qwen2_5OmniModel"], "talker_config": {"hidden_size": 8}}
    config = unified_config({**outer, "thinker_config": thinker, "token2wav_config": {}})
    expected = theirs(input_ids=torch.tensor([IDS])).logits[0]
    ours = plain_logits(load_decoder(DictWeights(config, tensors)), IDS)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
