"""Block drafters' networks beside the published formulas, in every form their files come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import head_files
from builders import DictWeights
from head_files import Study, TaughtBlocks, block_tensors, conv_tensors, layer_config, write
from hunch.errors import ModelError
from hunch.kernels.kv_store import KVCache
from hunch.layers.rope import Rope
from hunch.models.heads.block_files import load_block
from hunch.models.heads.block_net import BlockNet
from hunch.models.heads.files import detect
from plain_blocks import PlainBlocks
from tiny_models import write_llama

BLOCK = 5
FORMS: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash"},
    "dflash, sliding": {"method": "dflash", "window": 6},
    "dflash, sliding, both ways": {"method": "dflash", "window": 6, "is_causal": False},
    "dflash, reduced": {"method": "dflash", "columns": 90},
    "dflash, mask embedding": {"method": "dflash", "mask": True},
    "dspark": {"method": "dspark", "rank": 8},
    "dspark, gated": {"method": "dspark", "rank": 8, "is_gated": True},
    "dspark, speculators": {"method": "dspark", "rank": 8, "is_speculators": True},
    "dflash2": {"method": "dflash2", "is_causal": False, "window": 6},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    model = write_llama(tmp_path_factory.mktemp("target") / "model", layers=3)
    return head_files.study(model, num_texts=2, length=20)


def make(
    study: Study,
    path: Path,
    *,
    method: str,
    rank: int = 0,
    is_gated: bool = False,
    window: int | None = None,
    is_causal: bool = True,
    columns: int | None = None,
    mask: bool = False,
    is_speculators: bool = False,
) -> tuple[PlainBlocks, torch.Tensor]:
    """A random drafter written as its makers would; its plain form and the states it fuses."""
    taps = (0, 2)  # after the first and the third layer
    c = layer_config(study, num_hidden_layers=2, intermediate_size=96)
    own: dict[str, Any] = {"block_size": BLOCK, "mask_token_id": 7, "target_layer_ids": list(taps)}
    tensors = block_tensors(study, c, len(taps), rank=rank, is_gated=is_gated)
    if window:
        c |= {"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
        own["causal"] = is_causal
    if is_gated:
        own["markov_head_type"] = "gated"
    if columns:
        kept = torch.arange(columns) * 2
        tensors |= {
            "d2t": kept - torch.arange(columns),
            "lm_head.weight": study.lm_head[kept].clone(),
        }
        own["draft_vocab_size"] = columns
    if mask:
        tensors["mask_embedding"] = head_files.normal(study.width, seed=90)
        del own["mask_token_id"]
    if method == "dflash2":
        tensors |= conv_tensors(study, c, taps=2, group=16, rank=4)
        own |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4}
        own |= {"selector_top_k": 6, "input_embedding_scale": 1.5, "output_multiplier": 0.7}
        own |= {"final_logit_softcapping": 20.0}
    name = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}.get(method)
    config = {**c, "architectures": [name or "DFlash2DraftModel"], "dflash_config": own}
    plain = PlainBlocks(
        tensors, config, study.embedding, study.lm_head, method == "dspark", is_causal
    )
    if is_speculators:
        layers = [layer + 1 for layer in own.pop("target_layer_ids")]
        config = {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": method,
            "aux_hidden_state_layer_ids": layers,
            "transformer_layer_config": {"model_type": "qwen3", **c},
            **own,
        }
    write(path, config, tensors)
    return plain, torch.cat([study.features[tap + 1] for tap in taps], dim=-1)


def net_with_context(
    study: Study, path: Path, method: str, lengths: list[int]
) -> tuple[BlockNet, KVCache, list[torch.Tensor]]:
    """The network with the context of the study's texts in a cache without order."""
    net = load_block(path, study.target, method)
    spec = net.spec
    size = (net.num_kv_layers, 64, spec.num_kv_heads, spec.head_dim)
    kv = KVCache(torch.full(size, torch.nan), torch.full(size, torch.nan))
    slots = list(torch.randperm(64, generator=torch.Generator().manual_seed(1)).split(32))
    slots = [part[:length] for part, length in zip(slots, lengths, strict=True)]
    for text, (slots_K, length) in enumerate(zip(slots, lengths, strict=True)):
        for part in (slice(0, 4), slice(4, length)):  # as chunks of a prompt come
            states = tuple(study.features[layer][text][part] for layer in net.feature_layers)
            net.cover(states, torch.arange(length)[part], slots_K[part], kv)
    return net, kv, slots


@pytest.mark.parametrize("form", FORMS)
def test_a_pass_says_what_the_formulas_say(form: str, study: Study, tmp_path: Path) -> None:
    plain, taps = make(study, tmp_path / "head", **FORMS[form])
    method = FORMS[form]["method"]
    assert detect(tmp_path / "head") == method
    anchors = [11, 17]
    net, kv, slots = net_with_context(study, tmp_path / "head", method, anchors)
    tokens = [study.tokens[text].tolist() for text in range(2)]
    first = torch.tensor([tokens[text][anchor] for text, anchor in enumerate(anchors)])
    guess = net.guess(first, torch.tensor(anchors), slots, kv)
    assert net.shape.num_tokens == (BLOCK if method == "dspark" else BLOCK - 1)
    for text, anchor in enumerate(anchors):
        told = plain.told(taps[text], anchor, tokens[text][anchor])
        assert len(told) == net.shape.num_tokens
        for depth, state in enumerate(told):
            before = tokens[text][anchor + depth]
            row, token = torch.tensor([text]), torch.tensor([before])
            found = guess.scores(row, depth, token)[0]
            torch.testing.assert_close(found, plain.logits(state, before), rtol=2e-4, atol=2e-4)
            odds = guess.confidences(row, depth, token)
            assert (odds is None) is (FORMS[form].get("rank") is None)
            if odds is not None:
                expected = plain.confidence(state, before)
                torch.testing.assert_close(odds.sigmoid()[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["dspark", "dflash, sliding", "dflash2"])
def test_what_a_trainer_computes_is_what_is_served(form: str, study: Study, tmp_path: Path) -> None:
    """Blocks at many anchors in one pass, with gradients to every tensor."""
    plain, taps = make(study, tmp_path / "head", **FORMS[form])
    net = load_block(tmp_path / "head", study.target, FORMS[form]["method"])
    body, tokens, anchors = net.body, study.tokens[0], torch.tensor([3, 9, 16])
    learned = dict(body.named_tensors())
    for tensor in learned.values():
        tensor.requires_grad_()
    features = [study.features[layer][0] for layer in net.feature_layers]
    assert isinstance(net.rope, Rope)
    attend = TaughtBlocks(body, body.context(features), anchors, net.rope)
    states = body.states(body.inputs(study.embedding[tokens[anchors]], net.mask_D), attend)
    told = body.telling(states)
    for block, anchor in enumerate(anchors.tolist()):
        expected = plain.told(taps[0], anchor, int(tokens[anchor]))
        torch.testing.assert_close(told[block], expected, rtol=2e-4, atol=2e-4)
    before = (anchors[:, None] + torch.arange(told.shape[1])).flatten()
    flat = told.flatten(0, 1)
    logits = body.scores(body.scaled(flat @ study.lm_head.T), tokens[before], flat)
    loss = logits.masked_fill(logits == -torch.inf, 0).square().mean()
    odds = body.confidences(tokens[before], flat)
    (loss if odds is None else loss + odds.square().mean()).backward()
    assert all(tensor.grad is not None for tensor in learned.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": 10**6}, "mask_token_id"),
        ({"target_layer_ids": [0, 30]}, "for another model"),
        ({"target_hidden_size": 48}, "hidden size"),
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"draft_vocab_size": 40}, "d2t"),
    ],
)
def test_files_for_another_target_are_refused_in_words(
    change: dict[str, Any], words: str, study: Study, tmp_path: Path
) -> None:
    c = layer_config(study, num_hidden_layers=1)
    own = {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [0], **change}
    tensors = block_tensors(study, c, 1)
    write(tmp_path, {**c, "architectures": ["DFlashDraftModel"], **own}, tensors)
    with pytest.raises(ModelError, match=words):
        load_block(tmp_path, study.target, "dflash")


def test_tensors_that_nobody_reads_are_named(
    study: Study, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(study, tmp_path, **FORMS["dflash"])
    weights = DictWeights({}, {"layers.0.self_attn.gate.weight": torch.zeros(3)})
    config = {"block_size": 4, "mask_token_id": 3, "target_layer_ids": [0]}
    c = layer_config(study, num_hidden_layers=1)
    write(tmp_path, {**c, **config}, {**block_tensors(study, c, 1), **weights.tensors})
    load_block(tmp_path, study.target, "dflash")
    assert "layers.0.self_attn.gate.weight" in caplog.text
