"""Families with recurrent layers against transformers, and the independence of their rows."""

import copy
import json
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders import Seq, check_rows, pack, plain_logits, tables
from hunch.errors import ConfigError, UnsupportedModelError
from hunch.kernels import native_library
from hunch.models.cuda import check_supported
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.models.stage import Stage
from hunch.models.weights import open_weights
from hunch.step.batch import Batch
from hunch.train.attend import Packed
from hunch.train.packs import Spans
from recurrent_models import BY_TORCH, CASES, CLOSE, IDS, check_logits, make


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make(request.param, folder), open_weights(folder)


@pytest.fixture(scope="module", params=[name for name in CASES if name not in BY_TORCH])
def native_pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make(request.param, folder), open_weights(folder)


@torch.no_grad()
def test_logits_are_those_of_transformers(pair):
    theirs, weights = pair
    expected = theirs(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(plain_logits(load_decoder(weights), IDS), expected, **CLOSE)


@torch.no_grad()
def test_a_trainer_reads_texts_in_a_row(pair):
    model, texts = load_decoder(pair[1]), [IDS[:15], IDS[20:33], IDS[1:4]]
    spans = Spans.of([len(text) for text in texts], model.device)
    x_TD = model.start(torch.tensor([*texts[0], *texts[1], *texts[2]]), spans.pos_T)
    hidden_TD = model.run(x_TD, Packed(spans, model.ropes)).last_TD
    expected = torch.cat([plain_logits(model, ids) for ids in texts])
    torch.testing.assert_close(model.logits(hidden_TD), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@torch.no_grad()
def test_native_kernels_compute_what_transformers_does(native_pair):
    theirs, weights = native_pair
    expected = theirs(torch.tensor([IDS])).logits[0]
    ours = load_native(weights, dtype="float32", num_threads=2)
    torch.testing.assert_close(plain_logits(ours, IDS), expected, **CLOSE)


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@torch.no_grad()
def test_greedy_text_is_that_of_transformers(pair):
    """Token by token there, from its own states."""
    theirs, weights = pair
    expected = theirs.generate(torch.tensor([IDS[:9]]), max_new_tokens=6, do_sample=False)[0]
    ours, ids = load_native(weights, dtype="float32", num_threads=1), IDS[:9]
    ours = ours or load_decoder(weights)
    while len(ids) < len(expected):
        ids = [*ids, int(plain_logits(ours, ids)[-1].argmax())]
    assert ids == expected.tolist()


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_native_rows_are_the_same_bits(native_pair, dtype):
    model = load_native(native_pair[1], dtype=dtype, num_threads=2)
    check_rows(model)
    check_drafts(model)


def test_drafts_of_what_torch_computes_do_not_change_a_bit(tmp_path):
    make("falcon mamba", tmp_path)
    check_drafts(load_decoder(open_weights(tmp_path)))


@pytest.mark.slow
def test_chunks_drafts_and_company_do_not_change_a_bit(pair):
    check_drafts(load_decoder(pair[1]))


@pytest.mark.parametrize("case", CASES)
def test_what_runs_by_torch_alone_is_no_case_of_the_gpu_kernels(case, tmp_path):
    make(case, tmp_path)
    model, is_known = load_decoder(open_weights(tmp_path), dtype="bfloat16"), case not in BY_TORCH
    with nullcontext() if is_known else pytest.raises(UnsupportedModelError, match="do not know"):
        check_supported(model)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_so_it_is_on_a_gpu(native_pair, dtype):
    from hunch.models.cuda import CudaDecoder

    theirs, weights = native_pair
    if theirs.config.model_type == "mamba2" and not hasattr(
        theirs.backbone.layers[0].mixer.norm, "group_size"
    ):
        pytest.skip("this version of transformers norms all groups of Mamba 2 as one")
    model = CudaDecoder(load_decoder(weights, dtype=dtype, device="cuda"))
    check_drafts(model)
    half = copy.deepcopy(theirs).to(getattr(torch, dtype))
    ours, their = [], []  # one text's error is chance
    for seed in range(12):
        ids = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(seed)).tolist()
        ids_T, attn = pack([Seq(ids)])
        batch = Batch(ids_T, attn, []).to(model.device)
        logits = model.logits(model.forward(batch.ids_T, batch.attn, model.new_kv(64)).last_TD)
        with torch.no_grad():
            exact = theirs(torch.tensor([ids])).logits[0]
            rounded = half(torch.tensor([ids])).logits[0]
        for errors, found in ((ours, logits.cpu()), (their, rounded)):
            errors.append(float((found.float() - exact).norm() / exact.norm()))
    assert median(ours) < 1.5 * median(their)


def check_drafts(model):
    """Texts read in pieces, beside others, and through drafts that are mostly wrong."""

    def forward(ids_T, attn, kv):
        batch = Batch(ids_T, attn, []).to(model.device)
        return model.forward(batch.ids_T, batch.attn, kv).last_TD.cpu()

    texts = [IDS, IDS[7:30], IDS[20:]]
    table_SB = tables(4)
    kv = model.new_kv(4 * 64, num_rows=4)
    alone = []
    for seq, ids in enumerate(texts):  # one token at a time
        alone.append([])
        for pos, token in enumerate(ids):
            ids_T, attn = pack([Seq([token], start=pos)], table_SB[seq : seq + 1])
            alone[-1].append(forward(ids_T, attn, kv)[0].clone())
    ids_T, attn = pack([Seq(texts[0])], table_SB[3:])
    whole = forward(ids_T, attn, model.new_kv(4 * 64))
    assert torch.equal(whole, torch.stack(alone[0]))
    done, random = [0] * len(texts), torch.Generator().manual_seed(2)
    while any(at < len(ids) for at, ids in zip(done, texts, strict=True)):
        chosen, seqs, good = [], [], []
        for seq, ids in enumerate(texts):
            size, nodes, right = torch.randint(0, 6, (3,), generator=random).tolist()
            size = min(size, len(ids) - done[seq])
            if not size:
                continue
            after = ids[done[seq] + size : done[seq] + size + nodes]
            right = min(right, len(after))
            draft = [*after[:right], *(token + 1 for token in after[right:])]
            chosen.append(seq)
            seqs.append(Seq(ids[done[seq] : done[seq] + size], start=done[seq], draft=draft))
            good.append(size + right)
        if not seqs:
            continue
        ids_T, attn = pack(seqs, table_SB[chosen], num_padding=1)
        attn.row_S = torch.tensor(chosen)
        hidden_TD = forward(ids_T, attn, kv)
        for seq, span, count in zip(chosen, attn.spans, good, strict=True):
            expected = torch.stack(alone[seq][done[seq] : done[seq] + count])
            assert torch.equal(hidden_TD[span.first : span.first + count], expected)
            done[seq] += count


@pytest.mark.parametrize("count", [2, 3])
@torch.no_grad()
def test_stages_of_halves_are_the_whole(count, tmp_path):
    """One of them may have MLPs alone, or no layer that attends."""
    make("nemotron h, other order", tmp_path)
    weights, x_TD = open_weights(tmp_path), None
    ids_T, attn = pack([Seq(IDS)])
    for index in range(count):
        part = load_decoder(weights, stage=Stage(index, count))
        kv = part.new_kv(64)
        run = part.forward(ids_T, attn, kv) if x_TD is None else part.forward_stream(x_TD, attn, kv)
        x_TD = run.last_TD
    assert torch.equal(part.logits(x_TD), plain_logits(load_decoder(weights), IDS))


def test_layers_that_forget_by_their_number_are_not_in_stages(tmp_path):
    make("minimax", tmp_path)
    with pytest.raises(UnsupportedModelError, match="pipeline_parallel_size at 1"):
        load_decoder(open_weights(tmp_path), stage=Stage(0, 2))


@pytest.mark.parametrize("case", ["lfm2", "granite 4 h", "falcon h1", "nemotron h"])
def test_what_is_not_split_over_processes_says_so(case, tmp_path):
    make(case, tmp_path)
    group = SimpleNamespace(rank=0, size=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: the recurrent layers of"):
        load_decoder(open_weights(tmp_path), group=group)


@torch.no_grad()
def test_nemotron_h_with_biases_of_attention(tmp_path):
    """transformers has none whatever the config says: its products are given some here."""
    theirs = make("nemotron h", tmp_path)
    (tensors,) = (load_file(path) for path in tmp_path.glob("*.safetensors"))
    for number, layer in enumerate(theirs.model.layers):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if product := getattr(layer.mixer, part, None):
                product.bias = torch.nn.Parameter(torch.randn(product.out_features))
                root = next(name for name in tensors if f"layers.{number}.mixer.{part}" in name)
                tensors[root.replace("weight", "bias")] = product.bias.data.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    check_logits(tmp_path, theirs)
