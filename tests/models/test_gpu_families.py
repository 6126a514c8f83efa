"""Every family on a GPU in bfloat16: as near to the exact logits as transformers on the device."""

import json

import pytest
import torch
import transformers

pytest.importorskip("triton")

from builders import DictWeights, Seq, pack, tables
from hunch.models.cuda import CudaDecoder
from hunch.models.load import load_decoder
from hunch.step.batch import Batch

pytestmark = pytest.mark.gpu
COMMON = {
    "vocab_size": 384,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
GATED = COMMON | {"intermediate_size": 448, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 384, "n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 512}
GEMMA = GATED | {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 50}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 = GATED | {"head_dim": 64, "global_head_dim": 128, "sliding_window": 50}
GEMMA4 |= {"layer_types": GEMMA["layer_types"], "hidden_size_per_layer_input": 32}
GEMMA4 |= {"vocab_size_per_layer_input": 384, "pad_token_id": 0}
CASES = {
    "llama": ("Llama", GATED),
    "llama, biases": ("Llama", GATED | {"attention_bias": True}),
    "mistral": ("Mistral", GATED | {"sliding_window": 50}),
    "qwen2": ("Qwen2", GATED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", GATED | {"head_dim": 64}),
    "opt": ("OPT", COMMON | {"ffn_dim": 448, "word_embed_proj_dim": 256}),
    "opt, norms after": (
        "OPT",
        COMMON | {"ffn_dim": 448, "word_embed_proj_dim": 128, "do_layer_norm_before": False},
    ),
    "granite": (
        "Granite",
        GATED | {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 3.0},
    ),
    "phi-3": (
        "Phi3",
        GATED
        | {
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt-2": ("GPT2", GPT2),
    "gpt-bigcode": ("GPTBigCode", GPT2),
    "gemma 2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 4.0}),
    "gemma 3": ("Gemma3", GEMMA),
    "gemma 4": ("Gemma4", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma 4, keys as values": (
        "Gemma4",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
        | {"num_global_key_value_heads": 1},
    ),
}
CASES |= {
    "gpt-neox": ("GPTNeoX", COMMON | {"intermediate_size": 448}),
    "falcon": ("Falcon", COMMON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "phi": ("Phi", COMMON | {"intermediate_size": 448}),
    "nemotron": ("Nemotron", GATED | {"head_dim": 32}),
    "olmo 3": ("Olmo3", GATED | {"sliding_window": 50}),
    "exaone 4": ("Exaone4", GATED | {"sliding_window": 50}),
}
KINDS = {"GPT2": "GPT2LMHeadModel"}
IDS = torch.randint(3, 384, (301,), generator=torch.Generator().manual_seed(5)).tolist()


def _converted(model, dtype):
    """But for rotary frequencies, which transformers computes in float32 when it loads a model."""
    kept = {name: b.clone() for name, b in model.named_buffers() if "inv_freq" in name}
    model = model.to(dtype)
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.data = kept[name]
    return model


# transformers' GPTBigCode is scripted when it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_are_as_exact_as_those_of_transformers(name):
    family, settings = CASES[name]
    torch.manual_seed(11)
    names = family + ("TextConfig" if family in ("Gemma3", "Gemma4") else "Config")
    config = getattr(transformers, names)(**settings)
    config._attn_implementation = "eager"  # others leave caps out
    kind = KINDS.get(family, f"{family}ForCausalLM")
    theirs = getattr(transformers, kind)(config).eval()
    for part, parameter in theirs.named_parameters():  # fresh norms are ones and biases zeros
        parameter.add_(torch.randn_like(parameter) * 0.05)
        if family == "Gemma4" and part.endswith("q_norm.weight"):
            parameter.mul_(0.1)  # where trained ones have the scale of the scores
    theirs = _converted(theirs.cuda(), torch.bfloat16)
    saved = json.loads(theirs.config.to_json_string())
    saved["architectures"] = [kind]
    tensors = {name: tensor.detach().cpu() for name, tensor in theirs.state_dict().items()}
    if family == "GPTNeoX":  # its files have another name than its code
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
    ours = CudaDecoder(load_decoder(DictWeights(saved, tensors), dtype="bfloat16", device="cuda"))
    ids = torch.tensor([IDS], device="cuda")
    their_logits = theirs(ids).logits[0].double()
    exact = _converted(theirs, torch.float64)(ids).logits[0]

    num_blocks = -(-len(IDS) // 4)
    kv, done, parts = ours.new_kv(4 * num_blocks), 0, []
    for size in (150, 100, 40, *[1] * 11):  # chunks, then one by one
        ids_T, attn = pack([Seq(IDS[done : done + size], start=done)], tables(1, num_blocks))
        batch = Batch(ids_T, attn, []).to(torch.device("cuda"))
        hidden = ours.forward(batch.ids_T, batch.attn, kv)
        parts.append(ours.logits(hidden.last_TD))
        done += size
    our_error = (torch.cat(parts).double() - exact).norm() / exact.norm()
    their_error = (their_logits - exact).norm() / exact.norm()
    assert 0 < their_error < 0.1
    assert our_error < 1.25 * their_error
