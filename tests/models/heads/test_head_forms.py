"""Every published file form loads, and its numbers are those of the papers' formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import head_files
from builders import BLOCK_SIZE, Seq, pack, tables
from head_files import Study
from hunch.errors import (
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
    VocabMismatchError,
)
from hunch.kernels.kv_store import KVCache
from hunch.models.heads.eagle import load_eagle, load_eagle3
from hunch.models.heads.files import detect, speculative_tokens
from hunch.models.heads.medusa import load_medusa
from hunch.models.heads.mlp import load_mlp
from hunch.models.heads.mtp import load_mtp
from hunch.models.heads.step import StepNet
from hunch.models.spec import ModelSpec
from random_models import random_model

LENGTH = 9
WIDTH = 32


@pytest.fixture(scope="module")
def made_up() -> Study:
    """A random target and states it never had: enough to compare numbers."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 60,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    target = random_model(ModelSpec.from_config(config))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(60, (1, LENGTH), generator=generator)
    states = torch.randn(6, 1, LENGTH, WIDTH, generator=generator)
    return Study(target, tokens, states[0], list(states[1:]))


def run(net: StepNet, s: Study, h: Tensor) -> Tensor:
    """The network's states over the whole sequence, through the paged cache."""
    following = s.tokens[0, 1:]
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    size = (net.num_kv_layers, num_blocks * BLOCK_SIZE, net.spec.num_kv_heads, net.spec.head_dim)
    kv = KVCache(torch.full(size, torch.nan), torch.full(size, torch.nan))
    _, attn = pack([Seq(following.tolist())], tables(1, num_blocks))
    return net.step(following, h[: LENGTH - 1], attn, kv)


def assert_same(net: StepNet, head: Any, s: Study, features: list[Tensor] | None = None) -> None:
    features = features or []
    h = net.fuse(s.hidden[0], tuple(x[0] for x in features))
    expected = head.fuse(s.hidden, features)
    torch.testing.assert_close(h, expected[0], rtol=1e-4, atol=1e-5)
    states = head.states(expected[:, : LENGTH - 1], s.tokens[:, 1:])
    found = run(net, s, h)
    torch.testing.assert_close(found, states[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net.logits(found), head.logits(states[0]), rtol=1e-4, atol=1e-3)


def test_eagle(made_up: Study, tmp_path: Path) -> None:
    head = head_files.make_eagle(made_up, tmp_path, num_steps=0)
    assert detect(tmp_path) == "eagle"
    assert_same(load_eagle(tmp_path, made_up.target), head, made_up)


def test_eagle_as_converted_for_vllm(made_up: Study, tmp_path: Path) -> None:
    head = head_files.make_eagle(made_up, tmp_path, num_steps=0)
    inner = json.loads((tmp_path / "config.json").read_text())
    wrapped = {"model_type": "eagle", "model": inner, "eagle_fc_bias": True}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    assert detect(tmp_path) == "eagle"
    assert_same(load_eagle(tmp_path, made_up.target), head, made_up)


EAGLE3_FORMS = {
    "published": {},
    "reduced vocabulary": {"draft_vocab": 20},
    "speculators": {"is_speculators": True},
    "speculators, normed residual": {"is_speculators": True, "norm_before_residual": True},
    "two layers": {"num_layers": 2},
    "features named": {"layers": (0, 4)},
    "3.1 input norm": {"norm_before_fc": True},
    "3.1 norm per feature, normed output": {"fc_norm": True, "norm_output": True},
}


@pytest.mark.parametrize("form", EAGLE3_FORMS)
def test_eagle3(form: str, made_up: Study, tmp_path: Path) -> None:
    arguments: dict[str, Any] = EAGLE3_FORMS[form]
    head, features = head_files.make_eagle3(made_up, tmp_path, num_steps=0, **arguments)
    assert detect(tmp_path) == "eagle3"
    net = load_eagle3(tmp_path, made_up.target)
    assert net.feature_layers == arguments.get("layers", (2, 2, 1))
    assert net.num_tokens == (3 if arguments.get("is_speculators") else None)
    assert_same(net, head, made_up, features)
    assert torch.equal(net.ids_C, head.ids) if net.ids_C is not None else len(head.ids) == 60


@pytest.mark.parametrize("form", ["mimo", "qwen", "deepseek"])
def test_mtp(form: str, made_up: Study, tmp_path: Path) -> None:
    head = head_files.make_mtp(made_up, tmp_path, form, num_steps=0)
    assert detect(tmp_path) == "mtp"
    assert_same(load_mtp(tmp_path, made_up.target), head, made_up)


def test_mtp_of_a_family_that_stores_norms_minus_one(made_up: Study, tmp_path: Path) -> None:
    head = head_files.make_mtp(made_up, tmp_path, "qwen", num_steps=0)
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "qwen3_next"}
    shifted = {k: v - 1 if "norm" in k else v for k, v in head.p.items()}
    head_files.write(tmp_path, config, shifted)
    assert_same(load_mtp(tmp_path, made_up.target), head, made_up)


MLP_FORMS = {
    "plain": {},
    "tied and scaled": {"tie_weights": True, "scale_input": True},
    "as wide as the target": {"inner_dim": WIDTH},
}


@pytest.mark.parametrize("form", MLP_FORMS)
def test_mlp_speculator(form: str, made_up: Study, tmp_path: Path) -> None:
    head = head_files.make_mlp(made_up, tmp_path, num_steps=0, **MLP_FORMS[form])
    assert detect(tmp_path) == "mlp"
    assert speculative_tokens(tmp_path) == 3
    net, ids_C = load_mlp(tmp_path, made_up.target)
    assert ids_C is None
    hidden, tokens = made_up.hidden[0], [made_up.tokens[0].roll(-i) for i in range(3)]
    state = net.start(hidden)
    for stage, expected in enumerate(head.logits(hidden, tokens)):
        state, logits = net.step(stage, state, tokens[stage])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["new", "old"])
def test_medusa(form: str, made_up: Study, tmp_path: Path) -> None:
    head = head_files.make_medusa(made_up, tmp_path, form, num_steps=0)
    assert detect(tmp_path) == "medusa"
    net, ids_C = load_medusa(tmp_path, made_up.target)
    assert ids_C is None
    assert len(net.heads) == 3  # the old form's config says 2
    for number, expected in enumerate(head.logits(made_up.hidden[0])):
        found = net.logits(number, made_up.hidden[0])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_medusa_with_fewer_tokens_and_with_the_targets_output(
    made_up: Study, tmp_path: Path
) -> None:
    head = head_files.make_medusa(made_up, tmp_path, num_steps=0)
    config = json.loads((tmp_path / "config.json").read_text())
    kept = torch.tensor([3, 50, 7, 8])
    tensors = {k: v[kept] if "lm_heads" in k else v for k, v in head.p.items()}
    few = config | {"truncated_vocab_size": 4}
    head_files.write(tmp_path / "few", few, tensors | {"token_map": kept})
    net, ids_C = load_medusa(tmp_path / "few", made_up.target)
    assert ids_C.tolist() == kept.tolist()
    torch.testing.assert_close(
        net.logits(1, made_up.hidden[0]), head.logits(made_up.hidden[0])[1][:, kept]
    )
    blocks = {k: v for k, v in head.p.items() if k.startswith("blocks")}
    head_files.write(tmp_path / "own", config | {"original_lm_head": True}, blocks)
    net, _ = load_medusa(tmp_path / "own", made_up.target)
    torch.testing.assert_close(
        net.logits(0, made_up.hidden[0]), head.logits(made_up.hidden[0])[0], rtol=1e-4, atol=1e-4
    )


# --- what cannot work says so --------------------------------------------------------------------


def rewrite(path: Path, change: Any, drop: str = "", **config: Any) -> None:
    """The same files with changed tensors and config."""
    from safetensors.torch import load_file

    tensors = load_file(path / "model.safetensors")
    kept = {name: change(name, t) for name, t in tensors.items() if name != drop}
    known = json.loads((path / "config.json").read_text())
    head_files.write(path, known | config, kept)


def test_a_head_for_another_width(made_up: Study, tmp_path: Path) -> None:
    head_files.make_mlp(made_up, tmp_path, num_steps=0)
    other = random_model(
        ModelSpec.from_config(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 60,
                "hidden_size": 48,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
            }
        )
    )
    with pytest.raises(ModelFormatError, match="hidden size 32, this target has 48"):
        load_mlp(tmp_path, other)


def test_a_head_for_another_vocabulary(made_up: Study, tmp_path: Path) -> None:
    head_files.make_mlp(made_up, tmp_path, num_steps=0, vocab_size=60)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(VocabMismatchError, match="vocabulary of 50 tokens, this target has 60"):
        load_mlp(tmp_path, made_up.target)


def test_a_missing_tensor_and_a_wrong_shape(made_up: Study, tmp_path: Path) -> None:
    head_files.make_eagle3(made_up, tmp_path, num_steps=0)
    rewrite(tmp_path, lambda name, t: t[:-1] if name == "norm.weight" else t)
    with pytest.raises(ModelFormatError, match=r"norm.weight has shape \[31\], \[32\] was exp"):
        load_eagle3(tmp_path, made_up.target)
    rewrite(tmp_path, lambda name, t: t, drop="fc.weight")
    with pytest.raises(ModelFormatError, match=r"'fc\.weight' is missing"):
        load_eagle3(tmp_path, made_up.target)


def test_features_the_target_does_not_have(made_up: Study, tmp_path: Path) -> None:
    head_files.make_eagle3(made_up, tmp_path, num_steps=0)
    rewrite(tmp_path, lambda name, t: t, eagle_aux_hidden_state_layer_ids=[2, 4, 29])
    with pytest.raises(ModelFormatError, match=r"\[2, 4, 29\], this target has 4"):
        load_eagle3(tmp_path, made_up.target)


def test_a_token_map_that_points_outside(made_up: Study, tmp_path: Path) -> None:
    head_files.make_eagle3(made_up, tmp_path, num_steps=0, draft_vocab=20)
    rewrite(tmp_path, lambda name, t: t + 100 if name == "d2t" else t)
    with pytest.raises(ModelFormatError, match=r"the target has 0\.\.59"):
        load_eagle3(tmp_path, made_up.target)


def test_a_config_without_a_size(made_up: Study, tmp_path: Path) -> None:
    head_files.make_mlp(made_up, tmp_path, num_steps=0)
    (tmp_path / "config.json").write_text('{"architectures": ["MLPSpeculatorPreTrainedModel"]}')
    with pytest.raises(ModelFormatError, match="no 'emb_dim'"):
        load_mlp(tmp_path, made_up.target)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must never run",))


def test_a_pickle_with_code_in_it_is_refused(
    made_up: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    torch.save({"0.0.linear.weight": Evil()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelFormatError, match="run code"):
        load_medusa(tmp_path, made_up.target)
    assert "must never run" not in capsys.readouterr().out


def test_paths_that_hold_no_drafter(made_up: Study, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such directory"):
        detect(tmp_path / "nowhere")
    with pytest.raises(ModelFormatError, match=r"no config\.json"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match="not JSON"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text('{"speculators_model_type": "hydra"}')
    with pytest.raises(UnsupportedModelError, match="hydra"):
        detect(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"num_nextn_predict_layers": 1, "hidden_size": 4})
    )
    torch.save({"x": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="no MTP layer found"):
        load_mtp(tmp_path, made_up.target)


def test_a_plain_model_is_a_draft_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}'
    )
    assert detect(tmp_path) == "draft"
    assert detect(tmp_path / "model.gguf") == "draft"
