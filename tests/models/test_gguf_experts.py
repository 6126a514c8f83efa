"""GGUF files of models with experts, as converters write them: one tensor for all experts."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from builders import plain_logits
from expert_models import IDS, make
from hunch.kernels import native_library, native_matrix
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.models.weights import open_weights
from tiny_gguf import finish, gguf_name, interleave

FAMILIES = {  # case of test_expert_families -> GGUF's architecture
    "mixtral": "llama",
    "phi-moe, biases": "phimoe",
    "qwen3-moe": "qwen3moe",
    "qwen2-moe": "qwen2moe",
    "granite-moe": "granitemoe",
    "olmoe": "olmoe",
    "gpt-oss, 64": "gpt-oss",
    "deepseek-v3": "deepseek2",
    "deepseek-v2-lite": "deepseek2",
    "deepseek-v2, groups": "deepseek2",
    "glm-4.7-flash": "deepseek2",
    "glm-4.5": "glm4moe",
    "llama 4, as converted": "llama4",
    "dots1": "dots1",
    "ernie-4.5-moe": "ernie4_5-moe",
    "minimax-m2": "minimax-m2",
    "hunyuan-moe": "hunyuan-moe",
}
OWN = {
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate.wg": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "mlp.router": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp"
       for part in ("gate", "up", "down")},
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
}  # fmt: skip
USED = ("num_experts_per_tok", "moe_k", "moe_topk")
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


BARE = {"e_score_correction_bias": "exp_probs_b.bias", "sinks": "attn_sinks.weight"}


def stacked(weights) -> dict[str, np.ndarray]:
    """The tensors of a Hugging Face file under GGUF's names, experts one beneath the other."""
    config, found = weights.config, {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name in weights.names():
        value = weights.tensor(name).numpy()
        parts = name.split(".")
        if parts[-4:-3] == ["experts"]:
            stack = f"blk.{parts[2]}.{EXPERTS[parts[-2]]}.weight"
            stacks.setdefault(stack, {})[int(parts[-3])] = value
            continue
        layer = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        inner = ".".join(parts[3:-1])
        ending = parts[-1]
        if inner in ("mlp.experts", "feed_forward.experts"):  # [expert, in, out]
            ending = "bias" if ending.endswith("_bias") else "weight"
            value = value.swapaxes(1, 2) if ending == "weight" else value
            if parts[-1].startswith("gate_up"):  # of gpt-oss by turns
                half = value.shape[1] // 2
                by_turns = (slice(0, None, 2), slice(1, None, 2))
                halves = (slice(half), slice(half, None)) if "feed" in inner else by_turns
                for part, rows in zip(("gate", "up"), halves, strict=True):
                    found[f"{layer}ffn_{part}_exps.{ending}"] = value[:, rows].copy()
            else:
                found[f"{layer}ffn_down_exps.{ending}"] = value.copy()
            continue
        if parts[-1] in BARE:
            found[f"{layer}{BARE[parts[-1]]}"] = value.reshape(-1)
            continue
        is_after = config["model_type"] in ("gpt_oss", "glm4_moe")
        if is_after and inner == "post_attention_layernorm":
            found[f"{layer}post_attention_norm.weight"] = value
            continue
        if inner == "self_attn.kv_b_proj" and config["model_type"] == "deepseek_v3":
            value = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
            k_up, v_up = np.split(value, [config["qk_nope_head_dim"]], axis=1)
            found[f"{layer}attn_k_b.weight"] = k_up.swapaxes(1, 2).copy()
            found[f"{layer}attn_v_b.weight"] = v_up.copy()
            continue
        if inner == "block_sparse_moe.input_linear":
            gate, up = np.split(value, 2, axis=1)
            found |= {f"{layer}ffn_gate_exps.weight": gate, f"{layer}ffn_up_exps.weight": up}
        elif inner == "block_sparse_moe.output_linear":
            found[f"{layer}ffn_down_exps.weight"] = value
        elif inner in OWN:
            value = value[0] if inner == "mlp.shared_expert_gate" else value
            found[f"{layer}{OWN[inner]}.{ending}"] = value
        else:
            if config["model_type"] in ("mixtral", "granitemoe") and parts[-2] in (
                "q_proj",
                "k_proj",
            ):
                heads = "num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"
                value = interleave(value, config[heads])
            found[gguf_name(name)] = value
    return found | {
        name: np.stack([parts[e] for e in sorted(parts)]) for name, parts in stacks.items()
    }


def write(path: Path, weights, architecture: str, block_format: str) -> Path:
    config, writer = weights.config, gguf.GGUFWriter(path, architecture)
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": inner,
        "expert_count": next(config[key] for key in COUNTS if config.get(key)),
        "expert_used_count": next(config[key] for key in USED if config.get(key)),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size", 0),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or 32,
        "attention.sliding_window": config.get("sliding_window") or 0,
        "interleave_moe_layer_step": 1,
    }
    reals = {}
    if architecture == "llama4":
        numbers["attention.sliding_window"] = config["attention_chunk_size"]
        numbers["feed_forward_length"] = config["intermediate_size_mlp"]
    if architecture == "deepseek2":
        is_v3, rope = config["model_type"] != "deepseek_v2", config["qk_rope_head_dim"]
        numbers |= {
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.q_lora_rank": config["q_lora_rank"] or 0,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
            "attention.key_length": config["kv_lora_rank"] + rope,
            "attention.value_length_mla": config["v_head_dim"],
            "attention.value_length": config["kv_lora_rank"],
            "attention.head_count_kv": 1,
            "rope.dimension_count": rope,
            "expert_gating_func": 2 if is_v3 else 1,
        }
    if architecture == "minimax-m2":
        numbers["rope.dimension_count"] = 16
    if architecture == "ernie4_5-moe":
        numbers["leading_dense_block_count"] = config["moe_layer_start_index"]
        numbers["expert_shared_count"] = config["moe_num_shared_experts"]
        numbers["attention.key_length"] = config["hidden_size"] // config["num_attention_heads"]
    if architecture in ("deepseek2", "glm4moe", "dots1"):
        numbers |= {
            "expert_shared_count": config["n_shared_experts"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
            "leading_dense_block_count": 1,
        }
        writer.add_bool(f"{architecture}.expert_weights_norm", bool(config["norm_topk_prob"]))
        reals["expert_weights_scale"] = config["routed_scaling_factor"]
    if architecture == "glm4moe":
        share = config.get("partial_rotary_factor") or 0.5
        numbers["rope.dimension_count"] = int(config["head_dim"] * share)
    if scaling := config.get("rope_scaling"):
        writer.add_string(f"{architecture}.rope.scaling.type", "yarn")
        numbers["rope.scaling.original_context_length"] = scaling[
            "original_max_position_embeddings"
        ]
        reals["rope.scaling.factor"] = scaling["factor"]
        reals["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling.get("mscale_all_dim", 0.0)
    reals |= {
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "embedding_scale": config.get("embedding_multiplier", 1.0),
        "residual_scale": config.get("residual_multiplier", 1.0),
        "attention.scale": config.get("attention_multiplier", 1.0),
        "logit_scale": config.get("logits_scaling", 1.0),
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in reals.items():
        writer.add_float32(f"{architecture}.{key}", value)
    quantised = gguf.GGMLQuantizationType[block_format]
    for name, value in stacked(weights).items():
        is_matrix = value.ndim >= 2 and value.shape[-1] % 32 == 0 and "gate_inp" not in name
        is_matrix &= name.endswith("exps.weight") or block_format != "MXFP4"
        if is_matrix and block_format != "F32":
            writer.add_tensor(name, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, value)
    finish(writer)
    return path


@pytest.mark.parametrize(("case", "architecture"), [*FAMILIES.items(), ("qwen3-moe", "qwen3vlmoe")])
def test_numbers_are_those_of_the_hugging_face_file(case, architecture, tmp_path):
    make(case, tmp_path)
    weights = open_weights(tmp_path)
    file = open_weights(write(tmp_path / "model.gguf", weights, architecture, "F32"))
    ours, theirs = load_decoder(file), load_decoder(weights)
    if case == "qwen2-moe":
        assert file.config["shared_expert_intermediate_size"] == 48
    assert torch.equal(plain_logits(ours, IDS), plain_logits(theirs, IDS))


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize(
    ("block_format", "held"), [("Q8_0", native_matrix.INT8), ("Q4_0", native_matrix.INT4)]
)
def test_experts_stay_quantised_as_they_are(block_format, held, tmp_path):
    make("mixtral", tmp_path)
    weights = open_weights(tmp_path)
    file = open_weights(write(tmp_path / "model.gguf", weights, "llama", block_format))
    model = load_native(file, num_threads=1, bits=14)
    experts = [layer.values["experts"].values for layer in model.network.layers]
    assert {each["up"].format for each in experts} == {held}
    assert {each["router"].format for each in experts} == {native_matrix.FLOAT}
    exact = plain_logits(load_decoder(file), IDS)  # of the same rounded weights
    error = (plain_logits(model, IDS) - exact).norm() / exact.norm()
    assert error < 0.05


def test_gpt_oss_in_mxfp4_as_llama_cpp_holds_it(tmp_path):
    """Experts alone are in 4 bits: codes and a power of two per 32 numbers."""
    make("gpt-oss, 64", tmp_path)
    weights = open_weights(tmp_path)
    file = open_weights(write(tmp_path / "model.gguf", weights, "gpt-oss", "MXFP4"))
    packed = file.packed("model.layers.0.mlp.experts.up_proj.weight")
    assert packed is not None
    assert packed.format == "MXFP4"
    rounded, whole = (plain_logits(load_decoder(each), IDS) for each in (file, weights))
    assert 0.01 < (rounded - whole).norm() / whole.norm() < 0.6
    if native_library.is_available():
        ours = plain_logits(load_native(file, num_threads=1, bits=14), IDS)
        assert (ours - rounded).norm() / rounded.norm() < 0.1
