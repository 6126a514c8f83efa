"""DeepSeek's MTP layer as a head: its numbers are those of transformers' layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from builders import BLOCK_SIZE, Seq, pack, tables
from deepseek_files import LAYER, deepseek_config, make_deepseek
from head_files import Study, write
from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.kv_store import KVCache
from hunch.models.heads.files import detect
from hunch.models.heads.mtp import load_mtp

LENGTH, WIDTH = 21, 32
YARN = {
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "one query matrix": {"q_lora_rank": None},
    "longer context": {"rope_scaling": YARN},
    "pairs apart": {"rope_interleave": False},
    "weights not normed, one group": {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    "no experts": {"is_dense": True},
}


@pytest.fixture(scope="module")
def made_up() -> Study:
    return Study.random(LENGTH, WIDTH)


@pytest.mark.parametrize("chunk", [LENGTH, 8])
@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_the_published_one(
    form: str, chunk: int, made_up: Study, tmp_path: Path
) -> None:
    head = make_deepseek(made_up, tmp_path, **FORMS[form])
    net = load_mtp(tmp_path, made_up.target)
    # What is cached is the latent and one turned key, whatever the number of heads.
    assert (net.spec.num_kv_heads, net.spec.head_dim) == (1, 28)
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    size = (net.num_kv_layers, num_blocks * BLOCK_SIZE, 1, net.spec.head_dim)
    kv = KVCache(torch.full(size, torch.nan), torch.full(size, torch.nan))
    found = []
    for start in range(0, LENGTH - 1, chunk):
        stop = min(start + chunk, LENGTH - 1)
        token_T = made_up.tokens[0, start + 1 : stop + 1]
        _, attn = pack([Seq(token_T.tolist(), start=start)], tables(1, num_blocks))
        found.append(net.step(token_T, made_up.hidden[0, start:stop], attn, kv))
    state_TD = torch.cat(found)
    expected = head.states(made_up.hidden[:, :-1], made_up.tokens[:, 1:])[0]
    torch.testing.assert_close(state_TD, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net.logits(state_TD), head.logits(expected), rtol=1e-4, atol=1e-3)


def test_a_head_file_of_its_own_is_known_by_its_architecture(
    made_up: Study, tmp_path: Path
) -> None:
    make_deepseek(made_up, tmp_path, architectures=["DeepseekV3ForCausalLMNextN"])
    assert detect(tmp_path) == "mtp"


def test_fp8_block_scales_are_refused(made_up: Study, tmp_path: Path) -> None:
    head = make_deepseek(made_up, tmp_path)
    name = f"model.layers.{LAYER}.self_attn.o_proj.weight_scale_inv"
    write(tmp_path, head.c, {**head.p, name: torch.ones(1, 1)})
    with pytest.raises(UnsupportedModelError, match=r"o_proj\.weight_scale_inv .* fp8"):
        load_mtp(tmp_path, made_up.target)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"topk_group": 5}, ModelFormatError, "3 of 8 experts from 5 of 4 groups"),
        ({"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func='softmax'"),
        ({"kv_lora_rank": 22}, ModelFormatError, "was expected from config.json"),
        ({"kv_lora_rank": None}, ModelFormatError, "lacks kv_lora_rank"),
    ],
)
def test_a_config_that_does_not_fit(
    change: dict[str, Any], error: type[Exception], message: str, made_up: Study, tmp_path: Path
) -> None:
    head = make_deepseek(made_up, tmp_path)
    write(tmp_path, deepseek_config(made_up, **change), head.p)
    with pytest.raises(error, match=message):
        load_mtp(tmp_path, made_up.target)
