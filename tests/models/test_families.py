"""Every family against transformers, in float32, on small random models."""

import json

import pytest
import torch
import transformers

from builders import DictWeights, Seq, new_kv, pack, plain_logits, tables
from hunch.models.load import load_decoder

# transformers compiles some of GPTBigCode when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
COMMON = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GATED = COMMON | {"intermediate_size": 56, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 1000.0,
}
GPT2 = {"vocab_size": 90, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 4.0],
    "original_max_position_embeddings": 32,
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
}
GEMMA = GATED | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
CASES = {
    "granite": (
        "Granite",
        GATED
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "logits_scaling": 3.0,
        },
    ),
    "phi-3, part of a head turned": (
        "Phi3",
        GATED
        | {
            "pad_token_id": 0,
            "sliding_window": 9,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi-3, long": (
        "Phi3",
        GATED
        | {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": LONG},
    ),
    "gpt-2": ("GPT2", GPT2),
    "gpt-bigcode": ("GPTBigCode", GPT2 | {"n_inner": 72}),
    "gemma": ("Gemma", GATED | {"head_dim": 16}),
    "gemma 2": (
        "Gemma2",
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma 3": (
        "Gemma3",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "llama": ("Llama", GATED | {"num_key_value_heads": 4}),
    "llama, grouped heads, tied": ("Llama", GATED | {"tie_word_embeddings": True}),
    "llama, one kv head, wide heads": ("Llama", GATED | {"num_key_value_heads": 1, "head_dim": 12}),
    "llama, biases": ("Llama", GATED | {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", GATED | {"rope_parameters": LLAMA3}),
    "llama, linear": (
        "Llama",
        GATED | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}},
    ),
    "llama, yarn": ("Llama", GATED | {"rope_parameters": YARN}),
    "mistral": ("Mistral", GATED | {"sliding_window": 7}),
    "mistral, no window": ("Mistral", GATED | {"sliding_window": None}),
    "qwen2": ("Qwen2", GATED | {"tie_word_embeddings": True}),
    "qwen2, windows above": (
        "Qwen2",
        GATED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", GATED | {"head_dim": 16}),
    "qwen3, biases": ("Qwen3", GATED | {"head_dim": 8, "attention_bias": True}),
    "opt": ("OPT", COMMON | {"ffn_dim": 56, "word_embed_proj_dim": 32}),
    "opt, norms after": (
        "OPT",
        COMMON | {"ffn_dim": 56, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "opt, no biases": (
        "OPT",
        COMMON | {"ffn_dim": 56, "word_embed_proj_dim": 32, "enable_bias": False},
    ),
}
IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module", params=CASES)
def pair(request):
    """transformers' model, and ours with its tensors and its config as it would be saved."""
    family, settings = CASES[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(11)
        names = family + ("TextConfig" if family == "Gemma3" else "Config")
        config = getattr(transformers, names)(**settings)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = "eager"  # others leave caps out
        kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        theirs = getattr(transformers, kind)(config).eval()
        with torch.no_grad():
            for parameter in theirs.parameters():  # fresh norms are ones and biases zeros
                parameter.add_(torch.randn_like(parameter) * 0.2)
    saved = json.loads(theirs.config.to_json_string())
    saved["architectures"] = [kind]
    tensors = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    return theirs, load_decoder(DictWeights(saved, tensors))


@torch.no_grad()
def test_logits_are_those_of_transformers(pair):
    theirs, ours = pair
    expected = theirs(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(plain_logits(ours, IDS), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_features_are_the_hidden_states_of_transformers(pair):
    theirs, ours = pair
    expected = theirs(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    ids_T, attn = pack([Seq(IDS)])
    hidden = ours.forward(ids_T, attn, new_kv(ours), feature_layers=(2, 0, 1))
    for layer, feature in zip((2, 0, 1), hidden.features, strict=True):
        torch.testing.assert_close(feature, expected[layer][0], atol=1e-4, rtol=1e-4)


def test_chunks_and_single_tokens_give_the_same_logits(pair):
    _, ours = pair
    expected = plain_logits(ours, IDS)
    for sizes in ([17, 5, 19], [30, *[1] * 11]):
        kv, done, parts = new_kv(ours), 0, []
        for size in sizes:
            ids_T, attn = pack([Seq(IDS[done : done + size], start=done)])
            parts.append(ours.logits(ours.forward(ids_T, attn, kv).last_TD))
            done += size
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_a_node_of_a_tree_sees_its_own_path(pair):
    """Also beside another sequence, and after padding was added to the step."""
    _, ours = pair
    draft, parents = [7, 8, 9, 7, 11, 12], [-1, -1, 0, 1, 2, 2]
    table_SB, kv = tables(2), new_kv(ours, 2)
    before, other = IDS[:13], IDS[20:29]
    ids_T, attn = pack([Seq(before[:-1]), Seq(other[:-2])], table_SB)
    ours.forward(ids_T, attn, kv)
    step = [
        Seq(before[-1:], start=len(before) - 1, draft=draft, parents=parents),
        Seq(other[-2:], start=len(other) - 2),
    ]
    ids_T, attn = pack(step, table_SB, num_padding=2)
    logits = ours.logits(ours.forward(ids_T, attn, kv).last_TD)
    for node in range(len(draft)):
        path, at = [], node
        while at >= 0:
            path.insert(0, draft[at])
            at = parents[at]
        expected = plain_logits(ours, [*before, *path])[-1]
        torch.testing.assert_close(logits[1 + node], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        logits[len(draft) + 2], plain_logits(ours, other)[-1], atol=1e-4, rtol=1e-4
    )
