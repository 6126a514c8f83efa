"""Loading: files that do not fit are refused with the tensor's name."""

import pytest
import torch

from builders import plain_logits, tiny_config, tiny_model, tiny_spec, tiny_weights
from hunch.config import ModelConfig, say_once
from hunch.errors import ConfigError, ModelFormatError
from hunch.layers.linear import Linear
from hunch.models import load
from hunch.models.load import load_decoder
from hunch.models.load_target import load_target
from random_models import random_model

IDS = [5, 9, 2, 40, 41]


def test_missing_tensors_are_all_named():
    weights = tiny_weights()
    del weights.tensors["model.layers.1.mlp.up_proj.weight"]
    del weights.tensors["model.norm.weight"]
    with pytest.raises(ModelFormatError, match=r"layers\.1\.mlp\.up_proj\.weight.*model\.norm"):
        load_decoder(weights)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("lm_head.weight", (95, 32), r"lm_head\.weight \(95, 32\), expected \(96, 32\)"),
        ("model.layers.0.self_attn.q_proj.bias", (32,), r"q_proj\.bias"),
        ("model.layers.0.vision_mlp.up_proj.weight", (4,), "vision_mlp"),
    ],
)
def test_a_tensor_that_would_change_the_text_is_not_ignored(name, shape, words):
    """Not even one of pictures, where it stands inside a layer of the text."""
    weights = tiny_weights()
    weights.tensors[name] = torch.ones(shape)
    with pytest.raises(ModelFormatError, match=words):
        load_decoder(weights)


def test_harmless_leftovers_are_ignored():
    expected = plain_logits(tiny_model(), IDS)
    weights = tiny_weights()
    weights.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    weights.tensors["model.mtp_layers.0.input_proj.weight"] = torch.ones(4)
    weights.tensors["model.layers.3.eh_proj.weight"] = torch.ones(4)
    assert plain_logits(load_decoder(weights), IDS).equal(expected)
    tied = tiny_weights(tiny_config(tie_word_embeddings=True))
    tied.tensors["lm_head.weight"] = tied.tensors["model.embed_tokens.weight"]
    load_decoder(tied)


@pytest.mark.parametrize(
    "name",
    ["vision_tower.layers.0.q.bias", "model.visual.blocks.0.norm1.weight", "model.image_newline",
     "multi_modal_projector.linear_1.weight", "model.mm_projector.0.weight",
     "audio_tower.conv1.weight", "model.embed_vision.embedding.weight"],
)  # fmt: skip
def test_what_sees_or_hears_is_passed_by_with_a_word(name, caplog):
    say_once.cache_clear()
    weights = tiny_weights()
    weights.tensors[name] = torch.ones(4)
    assert plain_logits(load_decoder(weights), IDS).equal(plain_logits(tiny_model(), IDS))
    assert caplog.messages == [f"only text is read: {name} are passed by"]
    del weights.tensors["model.norm.weight"]
    with pytest.raises(ModelFormatError, match=r"lack model\.norm\.weight"):
        load_decoder(weights)


def test_names_without_the_model_prefix():
    weights = tiny_weights()
    weights.tensors = {n.removeprefix("model."): t for n, t in weights.tensors.items()}
    assert plain_logits(load_decoder(weights), IDS).equal(plain_logits(tiny_model(), IDS))


def test_dtypes():
    weights = tiny_weights()
    assert load_decoder(weights).dtype == torch.float32
    small = load_decoder(weights, dtype="bfloat16")
    assert small.kv_dtype == torch.bfloat16
    logits = plain_logits(small, IDS)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, plain_logits(tiny_model(), IDS), atol=0.15, rtol=0.1)
    with pytest.raises(ConfigError, match="int3"):
        load_decoder(weights, dtype="int3")


def test_a_tied_embedding_is_held_once():
    untied, tied = tiny_model(), tiny_model(tie_word_embeddings=True)
    assert untied.weight_bytes - tied.weight_bytes == 96 * 32 * 4


def test_progress_is_told_of_every_layer(monkeypatch):
    seen = []

    def watch(names):
        for name in names:
            seen.append(name)
            yield name

    monkeypatch.setattr(load, "iterate", watch)
    load_decoder(tiny_weights())
    assert seen == ["model.layers.0.", "model.layers.1.", "model.layers.2."]


def test_random_models_follow_their_seed():
    spec = tiny_spec()
    first, again, other = (plain_logits(random_model(spec, seed), IDS) for seed in (1, 1, 2))
    assert first.equal(again)
    assert not torch.allclose(first, other, atol=0.1)


def test_a_cpu_computes_fp8_by_torch_once_expanded_and_says_so(caplog):
    with caplog.at_level("WARNING"):
        target = load_target(ModelConfig(dtype="fp8"), tiny_weights(), torch.device("cpu"))
    assert caplog.messages == ["the CPU's kernels do not compute in fp8: torch does, slower"]
    held = [part.weight for part in target.parts() if isinstance(part, Linear)]
    assert held
    assert all(isinstance(weight, torch.Tensor) for weight in held)
