"""GGUF files of models with experts, as converters write them: one tensor for all experts."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from builders import plain_logits
from expert_models import IDS, make
from hunch.kernels import native
from hunch.models.load import load_decoder
from hunch.models.native import load_native
from hunch.models.weights import open_weights
from tiny_gguf import gguf_name, interleave

FAMILIES = {  # case of test_expert_families -> GGUF's architecture
    "mixtral": "llama",
    "qwen3-moe": "qwen3moe",
    "qwen2-moe": "qwen2moe",
    "granite-moe": "granitemoe",
}
OWN = {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip


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
        if inner == "block_sparse_moe.input_linear":
            gate, up = np.split(value, 2, axis=1)
            found |= {f"{layer}ffn_gate_exps.weight": gate, f"{layer}ffn_up_exps.weight": up}
        elif inner == "block_sparse_moe.output_linear":
            found[f"{layer}ffn_down_exps.weight"] = value
        elif inner in OWN:
            value = value[0] if inner == "mlp.shared_expert_gate" else value
            found[f"{layer}{OWN[inner]}.weight"] = value
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


def write(path: Path, weights, architecture: str, kind: str) -> Path:
    config, writer = weights.config, gguf.GGUFWriter(path, architecture)
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": inner,
        "expert_count": config.get("num_local_experts") or config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size", 0),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim") or 32,
        "attention.sliding_window": config.get("sliding_window") or 0,
    }
    reals = {
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
    quantised = gguf.GGMLQuantizationType[kind]
    for name, value in stacked(weights).items():
        is_matrix = value.ndim >= 2 and value.shape[-1] % 32 == 0 and "gate_inp" not in name
        if is_matrix and kind != "F32":
            writer.add_tensor(name, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", FAMILIES)
def test_numbers_are_those_of_the_hugging_face_file(case, tmp_path):
    make(case, tmp_path)
    weights = open_weights(tmp_path)
    file = open_weights(write(tmp_path / "model.gguf", weights, FAMILIES[case], "F32"))
    ours, theirs = load_decoder(file), load_decoder(weights)
    if case == "qwen2-moe":
        assert file.config["shared_expert_intermediate_size"] == 48
    assert torch.equal(plain_logits(ours, IDS), plain_logits(theirs, IDS))


@pytest.mark.skipif(not native.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize(("kind", "held"), [("Q8_0", native.INT8), ("Q4_0", native.INT4)])
def test_experts_stay_quantised_as_they_are(kind, held, tmp_path):
    make("mixtral", tmp_path)
    weights = open_weights(tmp_path)
    file = open_weights(write(tmp_path / "model.gguf", weights, "llama", kind))
    model = load_native(file, num_threads=1, bits=14)
    experts = [layer.experts for layer in model.network.layers]
    assert {each.up.kind for each in experts} == {held}
    assert {each.router.kind for each in experts} == {native.FLOAT}
    exact = plain_logits(load_decoder(file), IDS)  # of the same rounded weights
    error = (plain_logits(model, IDS) - exact).norm() / exact.norm()
    assert error < 0.05
