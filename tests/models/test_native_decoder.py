"""The native pass against the torch decoder, and its independence of company."""

from dataclasses import replace

import pytest
import torch

from builders import DictWeights, Seq, new_kv, pack, tables, tiny_config, tiny_weights
from hunch.config import say_once
from hunch.errors import ConfigError
from hunch.kernels import native_library, native_matrix
from hunch.kernels.kv_store import KVCache
from hunch.models.arrange import Arranged
from hunch.models.build import LLAMA_NAMES
from hunch.models.decoder import Decoder
from hunch.models.load import load_decoder, tensor_shapes
from hunch.models.native import NativeDecoder, activation_bits, is_supported, load_native
from hunch.models.native_layers import Reader
from hunch.models.source import FileSource
from hunch.models.spec import ModelSpec
from hunch.models.weights.base import Packed
from hunch.models.weights.dequant import FORMATS
from random_models import RandomSource

pytestmark = pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 80,  # not a multiple of a group
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
}
FAMILIES = {
    "llama": tiny_config(**SIZES),
    "tied": tiny_config(**SIZES, tie_word_embeddings=True),
    "biases": tiny_config(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": tiny_config("MistralForCausalLM", **SIZES, sliding_window=50),
    "qwen2": tiny_config("Qwen2ForCausalLM", **SIZES),
    "qwen3": tiny_config("Qwen3ForCausalLM", **SIZES),
}
GPT2 = {"vocab_size": 97, "n_embd": 192, "n_head": 6, "n_layer": 2, "n_inner": 80}
GPT2 |= {"n_positions": 512}
OPT = {**SIZES, "intermediate_size": None, "num_key_value_heads": None, "hidden_size": 192}
OPT |= {"head_dim": None, "ffn_dim": 80, "word_embed_proj_dim": 192}
HEADS_OF_80 = {**SIZES, "hidden_size": 240, "num_attention_heads": 3, "num_key_value_heads": 3}
HEADS_OF_80 |= {"head_dim": 80}
SCALES = {"embedding_multiplier": 12.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GEMMA = {**SIZES, "query_pre_attn_scalar": 24, "sliding_window": 50, "sliding_window_pattern": 2}
WINDOW, WHOLE = "sliding_attention", "full_attention"
GEMMA4 = {**SIZES, "sliding_window": 50, "global_head_dim": 64, "num_hidden_layers": 5}
GEMMA4 |= {"layer_types": [WINDOW, WHOLE, WINDOW, WHOLE, WHOLE], "hidden_size_per_layer_input": 48}
GEMMA4 |= {"rope_theta": None, "vocab_size_per_layer_input": 97}
OTHERS = {
    "granite": tiny_config("GraniteForCausalLM", **SIZES, **SCALES, logits_scaling=3.0),
    "phi-3": tiny_config("Phi3ForCausalLM", **SIZES, partial_rotary_factor=0.5),
    "phi-2": tiny_config("PhiForCausalLM", **HEADS_OF_80, partial_rotary_factor=0.4),
    "stablelm": tiny_config("StableLmForCausalLM", **HEADS_OF_80, partial_rotary_factor=0.25),
    "gpt-2": tiny_config("GPT2LMHeadModel", **GPT2),
    "gpt-bigcode": tiny_config("GPTBigCodeForCausalLM", **GPT2),
    "opt": tiny_config("OPTForCausalLM", **OPT),
    "opt, norms after": tiny_config("OPTForCausalLM", **OPT, do_layer_norm_before=False),
    "gemma 2": tiny_config("Gemma2ForCausalLM", **GEMMA, **CAPS),
    "gemma 3": tiny_config("Gemma3ForCausalLM", **GEMMA, rope_local_base_freq=300.0),
    "gemma 4": tiny_config(
        "Gemma4ForCausalLM", **GEMMA4, num_kv_shared_layers=2, use_double_wide_mlp=True
    ),
    "gemma 4, experts": tiny_config(
        "Gemma4ForCausalLM",
        **(GEMMA4 | {"hidden_size_per_layer_input": 0, "enable_moe_block": True}),
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "gemma 4, keys as values": tiny_config(
        "Gemma4ForCausalLM",
        **(GEMMA4 | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0}),
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
}
FAMILIES |= OTHERS
# Parts that no family above has.
PARTS = {
    "sinks": {"has_sinks": True},
    "attention beside the MLP": {"is_parallel": True, "norm": "layer", "has_norm_bias": False},
    "gelu": {"activation": "gelu"},
    "relu, no gate": {"activation": "relu", "is_gated": False, "has_mlp_bias": True},
    "clipped": {"activation": "clipped"},
    "neighbours are turned": {"is_rope_interleaved": True, "has_qk_norm": True},
}
BLOCKS = 128  # of 4 slots: 512 positions per sequence


def words(num, seed=0):
    return torch.randint(0, 97, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def empty_kv(model, num_seqs=1):
    """Unwritten slots hold what must never be read."""
    return new_kv(model, num_seqs, BLOCKS)


def copy_kv(kv):
    return KVCache(kv.k_LCMH.clone(), kv.v_LCMH.clone())


def run(model, seqs, kv, table=None, **options):
    ids_T, attn = pack(seqs, tables(len(seqs), BLOCKS) if table is None else table, **options)
    return model.forward(ids_T, attn, kv)


def both(family, dtype="float32", **options):
    weights = tiny_weights(FAMILIES[family])
    return load_native(weights, dtype=dtype, **options), load_decoder(weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_what_torch_computes(family):
    ours, theirs = both(family)
    our_kv, their_kv = empty_kv(ours), empty_kv(theirs)
    for seqs in (
        [Seq(words(300))],
        [Seq([5], start=300, draft=[6, 7, 8], parents=[-1, 0, 0])],
        [Seq(words(3), start=301, draft=[9, 9])],
    ):
        got, expected = run(ours, seqs, our_kv), run(theirs, seqs, their_kv)
        torch.testing.assert_close(got.last_TD, expected.last_TD, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(
            ours.logits(got.last_TD), theirs.logits(expected.last_TD), atol=1e-3, rtol=1e-3
        )


def test_a_long_context_is_what_torch_computes():
    """Tables of positions are filled as far as passes come."""
    weights = tiny_weights({**FAMILIES["llama"], "max_position_embeddings": 4096})
    ours, theirs = load_native(weights, dtype="float32"), load_decoder(weights)
    our_kv, their_kv = (new_kv(model, 1, 600) for model in (ours, theirs))
    for seq in (Seq(words(40)), Seq(words(1020), start=40), Seq([7], start=1060, draft=[1, 2])):
        ids_T, attn = pack([seq], tables(1, 600))
        got, expected = (m.forward(ids_T, attn, k) for m, k in ((ours, our_kv), (theirs, their_kv)))
        torch.testing.assert_close(got.last_TD, expected.last_TD, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_what_torch_computes(part):
    spec = replace(ModelSpec.from_config(FAMILIES["llama"]), **PARTS[part])
    source = RandomSource(1)
    shapes = tensor_shapes(spec)
    tensors = {name: source.read(name, shape) for name, shape in shapes.items()}
    weights = DictWeights(FAMILIES["llama"], tensors)
    arranged = FileSource(Arranged(weights, spec, LLAMA_NAMES), torch.float32)
    ours, theirs = NativeDecoder(spec, weights), Decoder(spec, arranged)
    seqs = [Seq(words(140)), Seq([5, 6, 7], draft=[6, 7, 8], parents=[-1, 0, 0])]
    got, expected = run(ours, seqs, empty_kv(ours, 2)), run(theirs, seqs, empty_kv(theirs, 2))
    torch.testing.assert_close(got.last_TD, expected.last_TD, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", OTHERS)
def test_no_chunks_and_no_company_change_a_bit_of_any_family(family):
    model, _ = both(family, "int8", num_threads=2)
    prompts = [words(150, seed) for seed in range(5)]
    whole = torch.cat([run(model, [Seq(ids)], empty_kv(model)).last_TD for ids in prompts[:1]])
    logits = model.logits(whole)
    for sizes in ([7] * 22, [64, 86], [149, 1]):
        kv, parts, done = empty_kv(model, 5), [], 0
        for size in sizes:
            seqs = [Seq(ids[done : done + size], start=done) for ids in prompts]
            hidden = run(model, seqs, kv).last_TD
            parts.append(hidden[: len(seqs[0].ids)])
            done += len(seqs[0].ids)
        assert torch.cat(parts).equal(whole), sizes[:2]
        assert model.logits(parts[-1]).equal(logits[-len(parts[-1]) :])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_bits_among_1_to_64(family, dtype):
    model, _ = both(family, dtype, num_threads=2)
    prompts = [words(9, seed) for seed in range(64)]

    def steps(count):
        """Logits of the rows' prompts and of a token after each."""
        kv, found = empty_kv(model, count), []
        for first, last in ((0, 8), (8, 9)):
            seqs = [Seq(ids[first:last], start=first) for ids in prompts[:count]]
            logits = model.logits(run(model, seqs, kv).last_TD)
            found.append(logits.view(count, last - first, -1))
        return torch.cat(found, dim=1)

    whole = steps(64)
    for count in (1, 2, 3, 4, 5, 7, 8, 12, 16, 31, 33, 48):
        assert steps(count).equal(whole[:count]), count


@pytest.mark.parametrize(("dtype", "limit"), [("int8", 0.05), ("int4", 0.5)])
def test_quantised_weights_stay_near(dtype, limit):
    ours, theirs = both("llama", dtype)
    seqs = [Seq(words(200))]
    got, expected = run(ours, seqs, empty_kv(ours)), run(theirs, seqs, empty_kv(theirs))
    error = (got.last_TD - expected.last_TD).norm() / expected.last_TD.norm()
    assert error < limit
    assert ours.weight_bytes < 0.4 * load_native(tiny_weights(FAMILIES["llama"])).weight_bytes


def test_features_are_the_stream_after_so_many_layers():
    ours, theirs = both("llama")
    ids_T, attn = pack([Seq(words(9))], tables(1, BLOCKS))
    got = ours.forward(ids_T, attn, empty_kv(ours), (2, 0, 1))
    expected = theirs.forward(ids_T, attn, empty_kv(theirs), (2, 0, 1))
    assert got.features[1].equal(ours.embed(ids_T))
    for ours_TD, theirs_TD in zip(got.features, expected.features, strict=True):
        torch.testing.assert_close(ours_TD, theirs_TD, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_no_chunking_of_a_prompt_changes_a_bit(family, dtype):
    model, _ = both(family, dtype, num_threads=2)
    prompt = words(290)
    whole_kv = empty_kv(model)
    whole = run(model, [Seq(prompt)], whole_kv).last_TD
    logits = model.logits(whole)
    for sizes in ([1] * 290, [7] * 42, [128, 162], [64, 65, 161], [289, 1], [200, 90]):
        kv, parts, done = empty_kv(model), [], 0
        for size in sizes:
            part = prompt[done : done + size]
            parts.append(run(model, [Seq(part, start=done)], kv).last_TD)
            done += len(part)
        assert torch.cat(parts).equal(whole), sizes[:2]
        assert model.logits(parts[-1]).equal(logits[-len(parts[-1]) :])
        written = ~whole_kv.k_LCMH.isnan()
        assert kv.k_LCMH[written].equal(whole_kv.k_LCMH[written])


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_neighbours_threads_and_padding_change_no_bit(dtype):
    weights = tiny_weights(FAMILIES["llama"])
    one = load_native(weights, dtype=dtype, num_threads=1)
    table = tables(4, BLOCKS)
    prompts = [words(n, seed=n) for n in (3, 130, 257, 140)]
    kv = empty_kv(one, 4)
    for index, prompt in enumerate(prompts):
        run(one, [Seq(prompt)], kv, table[index : index + 1])
    steps = [Seq([7], start=len(prompt)) for prompt in prompts]
    alone = [
        run(one, [step], copy_kv(kv), table[index : index + 1]).last_TD
        for index, step in enumerate(steps)
    ]
    for num_threads in (1, 2, 3):
        model = load_native(weights, dtype=dtype, num_threads=num_threads)
        together = run(model, steps, copy_kv(kv), table, num_padding=3).last_TD
        assert together[:4].equal(torch.cat(alone))
        assert model.logits(together[:4]).equal(torch.cat([one.logits(row) for row in alone]))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("start", [5, 126, 200])
def test_a_path_of_a_tree_is_the_same_bits_as_plain_decoding(dtype, start):
    model, _ = both("llama", dtype, num_threads=2)
    prompt, kv = words(start), empty_kv(model)
    run(model, [Seq(prompt)], kv)
    draft, parents = [11, 12, 13, 14, 15, 16], [-1, -1, 0, 2, 1, 3]
    tree = run(model, [Seq([7], start=start, draft=draft, parents=parents)], copy_kv(kv)).last_TD
    for path in ([0, 2, 3, 5], [1, 4]):
        plain_kv, at = copy_kv(kv), start
        hidden = run(model, [Seq([7], start=at)], plain_kv).last_TD
        assert hidden[0].equal(tree[0])
        for node in path:
            at += 1
            hidden = run(model, [Seq([draft[node]], start=at)], plain_kv).last_TD
            assert hidden[0].equal(tree[node + 1])
        chain = [draft[node] for node in path]
        verified = run(model, [Seq([7], start=start, draft=chain)], copy_kv(kv)).last_TD
        assert verified[-1].equal(hidden[0])


def test_an_answer_does_not_depend_on_where_blocks_lie():
    model, _ = both("llama", "int8")
    prompt = words(150)
    first = run(model, [Seq(prompt)], empty_kv(model)).last_TD
    straight = torch.arange(BLOCKS)[None]
    assert run(model, [Seq(prompt)], empty_kv(model), straight).last_TD.equal(first)


def test_models_it_does_not_compute_are_left_to_torch():
    spec = ModelSpec.from_config(FAMILIES["llama"])
    assert is_supported(spec)
    assert not is_supported(replace(spec, head_dim=24))
    assert not is_supported(ModelSpec.from_config(tiny_config("OPTForCausalLM")))
    assert load_native(tiny_weights(tiny_config("OPTForCausalLM"))) is None


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="int8"):
        load_native(tiny_weights(FAMILIES["llama"]), dtype="bfloat16")


def test_auto_keeps_a_gguf_as_it_is(default_files):
    from hunch.models.weights import open_weights

    model = load_native(open_weights(default_files.path))
    assert model is not None
    formats = {matrix.format for layer in model.network.layers for matrix in layer.matrices()}
    assert formats == {native_matrix.INT4}
    assert model.embedding.format == native_matrix.INT8
    assert model.weight_bytes < 1.01 * 96.5e6


@pytest.mark.parametrize(("width", "bits"), [(576, 14), (640, 14), (768, 14), (896, 8), (4096, 8)])
def test_only_small_models_take_fourteen_bits_of_themselves(width, bits):
    spec = replace(ModelSpec.from_config(FAMILIES["llama"]), width=width)
    assert activation_bits(spec, "auto") == bits
    assert [activation_bits(spec, asked) for asked in (8, 14)] == [8, 14]


class Blocks(DictWeights):
    """Matrices of random blocks, and nothing else."""

    def __init__(self, **formats: str) -> None:
        self._packed = {}
        for name, block_format in formats.items():
            size, num_bytes = FORMATS[block_format]
            blocks = torch.randint(0, 256, (16, 512 // size, num_bytes), dtype=torch.uint8)
            blocks[:, :, :2] = torch.rand(*blocks.shape[:2], 1).half().view(torch.uint8)
            packed = Packed(block_format, (16, 512), blocks.flatten(1), lambda: None)
            self._packed[f"{name}.weight"] = packed
        super().__init__({}, {name: p.numbers(0, 16) for name, p in self._packed.items()})

    def packed(self, name: str) -> Packed | None:
        return self._packed[name]


def test_levels_of_a_table_are_kept_in_four_bits(caplog: pytest.LogCaptureFixture) -> None:
    """A file of 2 bits had 8 in memory, and other numbers."""
    say_once.cache_clear()
    weights = Blocks(down="IQ2_XXS")
    matrix = Reader(FileSource(weights, torch.float32), "auto", 1).matrix("down.weight")
    assert matrix.rows(torch.arange(16)).equal(weights.tensors["down.weight"])
    assert matrix.nbytes < 4.6 / 8 * 16 * 512
    assert "do not hold" not in caplog.text


def test_two_formats_in_one_matrix_are_rounded_and_that_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nearly: half of a step of 8 bits, in groups of 32."""
    say_once.cache_clear()
    weights = Blocks(gate="IQ4_NL", up="Q4_0")
    numbers = torch.cat(list(weights.tensors.values()))
    for _ in range(2):
        reader = Reader(FileSource(weights, torch.float32), "auto", 1)
        matrix = reader.stack(["gate.weight", "up.weight"])
        away = (matrix.rows(torch.arange(32)) - numbers).view(32, 16, 32).abs().amax(dim=2)
        assert (away <= numbers.view(32, 16, 32).abs().amax(dim=2) / 253).all()
    assert caplog.text.count("do not hold IQ4_NL") == 1
