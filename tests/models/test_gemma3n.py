"""Gemma 3n's files: as text alone, and as the text of a model that sees and hears."""

from pathlib import Path
from typing import Any

import pytest
import torch

from builders import DictWeights, plain_logits, tiny_spec
from hunch import LLM, SamplingParams
from hunch.errors import ModelFormatError
from hunch.models.load import load_decoder
from hunch.models.native import not_native
from hunch.models.spec import ModelSpec
from hunch.models.weights.configs import unified_config
from their_models import make
from tiny_families import GEMMA3N, write_family

IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()
NAME = "Gemma3nForCausalLM"
E4B = {  # as it was published
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "altup_active_idx": 0,
    "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_lr_multiplier": 1.0,
    "altup_num_inputs": 4, "attention_bias": False, "attention_dropout": 0.0,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048, "hidden_size_per_layer_input": 256, "initializer_range": 0.02,
    "intermediate_size": [16384] * 35, "laurel_rank": 64, "max_position_embeddings": 32768,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 35,
    "num_key_value_heads": 2, "num_kv_shared_layers": 15, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None,
    "rope_theta": 1000000.0, "sliding_window": 512, "use_cache": True, "vocab_size": 262400,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip


def wrapped(config: dict[str, Any]) -> dict[str, Any]:
    outer = {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n",
        "audio_config": {"hidden_size": 8}, "vision_config": {"architecture": "mobilenet"},
        "audio_soft_tokens_per_image": 188, "vision_soft_tokens_per_image": 256,
        "audio_token_id": 262273, "image_token_id": 262145, "eos_token_id": [1, 106],
        "transformers_version": "4.53.0",
    }  # fmt: skip
    return unified_config({**outer, "text_config": config})


@torch.no_grad()
def test_text_of_a_model_that_sees_and_hears() -> None:
    """Its files also hold products of layers that read the keys and values of others."""
    theirs, saved, tensors = make("gemma 3n")
    expected = plain_logits(load_decoder(DictWeights(saved, tensors)), IDS)
    torch.testing.assert_close(
        expected, theirs(torch.tensor([IDS])).logits[0], atol=1e-4, rtol=1e-4
    )
    tensors.pop("lm_head.weight")
    inside = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    inside |= {
        "model.vision_tower.timm_model.conv_stem.weight": torch.zeros(3),
        "model.audio_tower.conformer.0.norm.weight": torch.zeros(3),
        "model.embed_vision.embedding.weight": torch.zeros(3),
        "model.embed_audio.embedding.weight": torch.zeros(3),
    }
    for layer in (3, 4):
        at = f"model.language_model.layers.{layer}.self_attn"
        inside |= {f"{at}.{name}_proj.weight": torch.zeros(32, 32) for name in "kv"}
        inside[f"{at}.k_norm.weight"] = torch.zeros(16)
    config = wrapped(saved)
    assert plain_logits(load_decoder(DictWeights(config, inside)), IDS).equal(expected)
    at = "model.language_model.layers.2.self_attn.k_proj"
    with pytest.raises(ModelFormatError, match=r"layers\.2\.self_attn\.k_proj\.bias"):
        load_decoder(DictWeights(config, {**inside, f"{at}.bias": torch.zeros(32)}))


def test_the_published_config_is_read() -> None:
    spec = ModelSpec.from_config(wrapped(E4B))
    assert spec.streams is not None
    assert (spec.streams.count, sum(share > 0 for share in spec.streams.sparsity)) == (4, 10)
    assert spec.kv_of[19:22] == (19, 18, 18)
    assert [spec.ropes[index].theta for index in spec.rope_of[3:5]] == [1e4, 1e6]
    few = {"model_type": "gemma3n_text", "architectures": [NAME]}
    left_out = ModelSpec.from_config(unified_config(few))
    assert left_out == ModelSpec.from_config(
        unified_config({**E4B, "architectures": [NAME], "query_pre_attn_scalar": None})
        | {"altup_lr_multiplier": None}
    )


def test_what_is_not_computed_is_said() -> None:
    assert not_native(tiny_spec(NAME, **GEMMA3N)) == ["several streams side by side"]
    for key, value in (
        ("altup_active_idx", 4),
        ("activation_sparsity_pattern", [0.9]),
        ("activation_sparsity_pattern", [1.0] * 4),
        ("intermediate_size", [96] * 3),
    ):
        with pytest.raises(ModelFormatError, match=key):
            tiny_spec(NAME, **{**GEMMA3N, key: value})


def test_text_depends_on_neither_drafts_nor_batches(tmp_path: Path) -> None:
    model, prompts = write_family(tmp_path, "gemma 3n"), ["fast token " * 4, "the model", "a"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = []
    for speculate, num_rows in (("off", 1), ("suffix", 1), ("suffix", 3)):
        with LLM(
            str(model), speculate=speculate, max_num_seqs=num_rows, always_draft=True,
            max_model_len=64, kv_bytes=4_000_000, threads=1,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert (llm.stats()["drafted"] > 0) == (speculate == "suffix")
    assert all(answer == answers[0] for answer in answers)
