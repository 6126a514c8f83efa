"""Families with experts against transformers, and the independence of their rows."""

from pathlib import Path

import pytest
import torch
import transformers

from builders import Seq, pack, plain_logits, tables
from hunch.kernels import native
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.models.weights import open_weights

COMMON = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
QWEN = COMMON | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
CASES = {
    "mixtral": ("Mixtral", COMMON | {"num_local_experts": 4, "sliding_window": 7}),
    "qwen3-moe": ("Qwen3Moe", QWEN | {"norm_topk_prob": True}),
    "qwen3-moe, some layers": (
        "Qwen3Moe",
        QWEN | {"decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        QWEN | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
}
OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}
CASES |= {
    "granite-moe": (
        "GraniteMoe",
        {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.3}
        | {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "logits_scaling": 3.0}
        | {"hidden_size": 64},
    ),
    "gpt-oss": ("GptOss", COMMON | OSS | {"initial_context_length": 4096}),
}
LATENT = COMMON | {
    "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 20, "num_key_value_heads": 2, "n_shared_experts": 2,
}  # fmt: skip
LATENT.pop("head_dim")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"rope_theta": 1000.0, "mscale": 0.8, "mscale_all_dim": 1.0}
TORCH_CASES = {
    "deepseek-v3": ("DeepseekV3", LATENT | {"n_group": 4, "topk_group": 2}),
    "deepseek-v3, yarn": (
        "DeepseekV3",
        LATENT | {"n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v2, groups": (
        "DeepseekV2",
        LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "glm-4.7-flash": (
        "Glm4MoeLite",
        {k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}
        | {"rms_norm_eps": 1e-5, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}
CASES["granite-moe"][1].pop("head_dim")
IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()


def make(name: str, folder: Path) -> torch.nn.Module:
    """A random model of transformers, saved as it saves."""
    family, settings = (CASES | TORCH_CASES)[name]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        config = getattr(transformers, f"{family}Config")(**settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # fresh norms are ones and biases zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make(request.param, folder), open_weights(folder)


@pytest.fixture(scope="module", params=CASES | TORCH_CASES)
def torch_pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make(request.param, folder), open_weights(folder)


@torch.no_grad()
def test_logits_are_those_of_transformers(torch_pair):
    theirs, weights = torch_pair
    expected = theirs(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(
        plain_logits(load_decoder(weights), IDS), expected, atol=2e-4, rtol=2e-4
    )


@pytest.mark.skipif(not native.is_available(), reason="no C++ compiler")
@torch.no_grad()
def test_native_kernels_compute_what_transformers_does(pair):
    theirs, weights = pair
    ours = load_native(weights, dtype="float32", num_threads=2)
    expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(plain_logits(ours, IDS), expected, atol=5e-4, rtol=5e-4)


@pytest.mark.skipif(not native.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_row_is_the_same_bits_in_any_batch_and_any_chunk(pair, dtype):
    check_rows(load_native(pair[1], dtype=dtype, num_threads=2))


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2, groups"])
def test_so_it_is_with_latent_attention(name, tmp_path):
    make(name, tmp_path)
    model = load_decoder(open_weights(tmp_path))
    check_rows(model)
    kv = model.new_kv(8)
    assert kv.v_LCMH is kv.k_LCMH  # one vector per token and layer
    assert kv.k_LCMH.shape == (3, 8, 1, 24)


def check_rows(model):
    ids = torch.randint(0, 90, (64, 3), generator=torch.Generator().manual_seed(1)).tolist()
    table_SB = tables(64, 2)

    def last_rows(seqs, kv):
        ids_T, attn = pack(seqs, table_SB[: len(seqs)])
        hidden_TD = model.forward(ids_T, attn, kv).last_TD
        return hidden_TD[[span.last - 1 for span in attn.spans]]

    expected = last_rows([Seq(prompt) for prompt in ids], model.new_kv(64 * 8))
    assert len(expected.unique(dim=0)) == 64
    for size in (1, 2, 7, 16, 33):
        kv = model.new_kv(64 * 8)
        last_rows([Seq(prompt[:2]) for prompt in ids[:size]], kv)
        rows = last_rows([Seq(prompt[2:], start=2) for prompt in ids[:size]], kv)
        assert rows.equal(expected[:size])
