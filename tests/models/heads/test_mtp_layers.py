"""Several MTP layers: known positions and drafts compute what the paper's formula says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from builders import BLOCK_SIZE, Seq, pack, tables
from head_files import Study
from hunch.errors import ModelFormatError
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.models.heads.files import detect
from hunch.models.heads.mtp import MtpNet, load_mtp
from mtp_files import make_stages

LENGTH, WIDTH, CHUNK = 19, 32, 7
FORMS = [("mimo", 3), ("qwen", 2), ("deepseek", 3)]


@pytest.fixture(scope="module")
def made_up() -> Study:
    return Study.random(LENGTH, WIDTH)


def new_kv(net: MtpNet, num_blocks: int) -> KVCache:
    size = (net.num_kv_layers, num_blocks * BLOCK_SIZE, net.spec.num_kv_heads, net.spec.head_dim)
    return KVCache(torch.full(size, torch.nan), torch.full(size, torch.nan))


def inputs(start: int, stop: int, num_blocks: int) -> AttnInputs:
    seq = Seq([0] * (stop - start), start=start)
    return pack([seq], tables(1, num_blocks))[1]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
@pytest.mark.parametrize("chunk", [LENGTH, CHUNK, 1])
def test_known_positions(form: tuple[str, int], chunk: int, made_up: Study, tmp_path: Path) -> None:
    """In one piece or in several; what precedes a layer's first position is never seen."""
    head = make_stages(made_up, tmp_path, *form, num_steps=0)
    assert detect(tmp_path) == "mtp"
    net = load_mtp(tmp_path, made_up.target)
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    kv, before = new_kv(net, num_blocks), None
    found: list[Tensor] = []
    for start in range(0, LENGTH - 1, chunk):
        stop = min(start + chunk, LENGTH - 1)
        token_T = made_up.tokens[0, start + 1 : stop + 1]
        attn = inputs(start, stop, num_blocks)
        state_TS = net.cover(token_T, made_up.hidden[0, start:stop], attn, kv, [before])
        before = state_TS[-1]
        found.append(state_TS)
    parts = torch.cat(found).chunk(form[1], dim=-1)
    for k, expected in enumerate(head.states(made_up.hidden, made_up.tokens)):
        torch.testing.assert_close(parts[k][k:], expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
def test_a_draft_goes_from_layer_to_layer_and_on_with_the_last(
    form: tuple[str, int], made_up: Study, tmp_path: Path
) -> None:
    head = make_stages(made_up, tmp_path, *form, num_steps=0)
    net = load_mtp(tmp_path, made_up.target)
    depth, known = form[1] + 2, LENGTH
    num_blocks = -(-(LENGTH + depth) // BLOCK_SIZE)
    kv = new_kv(net, num_blocks)
    attn = inputs(0, known - 1, num_blocks)
    state_TS = net.cover(made_up.tokens[0, 1:], made_up.hidden[0, :-1], attn, kv, [None])[-1:]
    tokens: list[int] = []
    for level in range(depth):
        tokens.append(int(net.logits(state_TS).argmax()))
        place = inputs(known - 1 + level, known + level, num_blocks)
        state_TS = net.step(torch.tensor(tokens[-1:]), state_TS, place, kv)
    expected = head.replay(made_up.hidden[0], made_up.tokens[0].tolist(), known, depth)
    assert tokens == expected


def test_fewer_layers_than_the_config_says(made_up: Study, tmp_path: Path) -> None:
    make_stages(made_up, tmp_path, "mimo", 2, num_steps=0)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelFormatError, match=r"predict_layers=3, but the files hold 2 MTP layers"
    ):
        load_mtp(tmp_path, made_up.target)
