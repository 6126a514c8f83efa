"""Every family: what is said of its exactness, what its files have, what they may not have."""

from pathlib import Path

import pytest
import transformers

from builders import check_rows, tiny_config, tiny_spec, tiny_weights
from hunch.errors import UnsupportedModelError
from hunch.kernels import native_library
from hunch.models.load import load_decoder
from hunch.models.load_target import exactness
from hunch.models.native import load_native
from hunch.models.refused import REFUSED
from hunch.models.spec import ModelSpec
from hunch.models.weights.configs import unified_config
from hunch.registry import MODELS
from tiny_families import BY_TORCH, FAMILIES

ROOT = Path(__file__).parents[2]

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 100_352,
    "torch_dtype": "bfloat16",
    "transformers_version": "6.0.0",  # none that is known: every key must be
    "use_cache": True,
}
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_routed_experts": 64, "num_experts_per_tok": 6, "pretraining_tp": 1, "hidden_act": "silu",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"},
}  # fmt: skip
PUBLISHED = {
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], **LATENT, "aux_loss_alpha": 0.001,
        "n_group": 1, "n_shared_experts": 2, "norm_topk_prob": False, "q_lora_rank": None,
        "scoring_func": "softmax", "seq_aux": True, "topk_group": 1, "topk_method": "greedy",
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], **LATENT, "ep_size": 1, "n_group": 8,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "max_window_layers": 28, "pretraining_tp": 2,
        "layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 1, 0],
        "use_sliding_window": False, "sliding_window": None,
    },
    "StableLM-2-1.6B": {
        "architectures": ["StableLmForCausalLM"], "rotary_scaling_factor": 1.0,
        "partial_rotary_factor": 0.25, "use_qkv_bias": True, "layer_norm_eps": 1e-5,
    },
    "StableLM-2-12B": {
        "architectures": ["StableLmForCausalLM"], "rotary_scaling_factor": 1.0,
        "partial_rotary_factor": 0.25, "qk_layernorm": True, "use_parallel_residual": True,
    },
    "Command-R+": {
        "architectures": ["CohereForCausalLM"], "use_qk_norm": True, "logit_scale": 0.8333333,
        "layer_norm_eps": 1e-5, "model_max_length": 131_072,
    },
    "BLOOM-560m": {
        "architectures": ["BloomForCausalLM"], "n_layer": 4, "num_attention_heads": 16,
        "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "masked_softmax_fusion": True, "offset_alibi": 100,
        "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "n_inner": None,
        "slow_but_exact": False, "unk_token_id": 0, "layer_norm_epsilon": 1e-5,
    },
    "MPT-7B": {
        "architectures": ["MPTForCausalLM"], "d_model": 4096, "n_heads": 32, "n_layers": 4,
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
            "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
        },
        "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_device": "cpu",
        "init_config": {"name": "kaiming_normal_"}, "learned_pos_emb": True, "logit_scale": None,
        "max_seq_len": 2048, "no_bias": True, "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0, "verbose": 0, "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"},
    },
    "StarCoder2-3B": {
        "architectures": ["Starcoder2ForCausalLM"], "activation_function": "gelu",
        "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5, "mlp_type": "default",
        "norm_epsilon": 1e-5, "norm_type": "layer_norm", "embedding_dropout": 0.1,
        "sliding_window": 4096, "use_bias": True,
    },
    "Granite-4.0-Micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "init_method": "mup",
        "layer_types": ["attention"] * 4, "mamba_chunk_size": 256, "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 64, "num_local_experts": 0,
        "num_experts_per_tok": 0, "normalization_function": "rmsnorm",
        "position_embedding_type": "rope", "shared_intermediate_size": 8192,
    },
    "Granite-4.0-H-Micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "init_method": "mup", "head_dim": None,
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_chunk_size": 256,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 64, "mamba_proj_bias": False,
        "num_local_experts": 0, "num_experts_per_tok": 0, "hidden_size": 2048,
        "normalization_function": "rmsnorm", "position_embedding_type": "nope",
        "rope_theta": 10000, "rope_scaling": None, "shared_intermediate_size": 8192,
    },
    "Falcon-H1-0.5B": {
        "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "head_dim": 64,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "hidden_size": 1024,
        "embedding_multiplier": 5.656854249492381, "key_multiplier": 0.390625,
        "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_rms_norm": False,
        "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_use_mlp": True,
        "mlp_bias": False, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "num_logits_to_keep": 1, "projectors_bias": False, "rope_theta": 1e11,
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.23570226039551587,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    },
    "Falcon-Mamba-7B": {
        "architectures": ["FalconMambaForCausalLM"], "num_attention_heads": None,
        "num_key_value_heads": None, "conv_kernel": 4, "expand": 16,
        "hidden_act": "silu", "intermediate_size": 8192, "layer_norm_epsilon": 1e-5,
        "hidden_size": 512, "rescale_prenorm_residual": False, "residual_in_fp32": True,
        "state_size": 16, "time_step_floor": 1e-4, "time_step_init_scheme": "random",
        "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
        "time_step_scale": 1.0, "use_bias": False, "use_conv_bias": True, "use_mambapy": False,
    },
    "Codestral-Mamba-7B": {
        "architectures": ["Mamba2ForCausalLM"], "num_attention_heads": None,
        "num_key_value_heads": None, "chunk_size": 256, "conv_kernel": 4, "expand": 2,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1,
        "intermediate_size": 8192, "layer_norm_epsilon": 1e-5, "n_groups": 8, "norm_before_gate":
        True, "num_heads": 128, "rescale_prenorm_residual": False, "residual_in_fp32": True,
        "rms_norm": True, "state_size": 128, "tie_word_embeddings": False,
        "time_step_floor": 1e-4, "time_step_init_scheme": "random", "time_step_limit":
        [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
        "time_step_scale": 1.0, "use_bias": False, "use_conv_bias": True,
    },
    "Nemotron-3-Nano-30B-A3B": {
        "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "norm_eps": 1e-5,
        "head_dim": 128, "chunk_size": 128, "conv_kernel": 4, "expand": 2, "n_groups": 8,
        "hybrid_override_pattern": "ME*E", "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64,
        "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32", "mlp_bias": False, "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_experts_per_tok": 6, "num_logits_to_keep": 1, "partial_rotary_factor": 1.0,
        "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000,
        "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128,
        "time_step_floor": 1e-4, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1,
        "time_step_min": 0.001, "topk_group": 1, "use_bias": False, "use_conv_bias": True,
        "use_mamba_kernels": True,
    },
    "Nemotron-H-8B": {
        "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "norm_eps": 1e-5,
        "attention_head_dim": 128, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
        "hidden_dropout": 0.0, "hybrid_override_pattern": "M-M*", "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
        "mamba_proj_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8,
        "num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False,
        "rms_norm_eps": 1e-5, "sliding_window": None, "ssm_state_size": 128,
        "time_step_floor": 1e-4, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_rank": 256, "use_bias": False, "use_conv_bias": True,
        "use_mamba_kernels": True,
    },
    "Kimi-Linear-48B-A3B": {
        "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72,
        "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"}, "hidden_size": 2304,
        "kv_lora_rank": 512, "mla_use_nope": True, "model_max_length": 1_048_576,
        "linear_attn_config": {
            "full_attn_layers": [4], "head_dim": 128, "kda_layers": [1, 2, 3], "num_heads": 32,
            "short_conv_kernel_size": 4,
        },
        "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "num_experts": 256,
        "num_experts_per_token": 8, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_theta": 10000,
        "rope_scaling": None, "routed_scaling_factor": 2.446, "topk_group": 1,
        "topk_method": "noaux_tc", "use_grouped_topk": True, "v_head_dim": 128,
    },
    "Jamba-v0.1": {
        "architectures": ["JambaForCausalLM"], "attn_layer_offset": 2, "attn_layer_period": 4,
        "calc_logits_for_entire_prompt": False, "expert_layer_offset": 1, "hidden_act": "silu",
        "expert_layer_period": 2, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True,
        "mamba_proj_bias": False, "num_experts": 16, "num_experts_per_tok": 2,
        "sliding_window": None, "use_mamba_kernels": True,
    },
    "LFM2-1.2B": {
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
        "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
        "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
        "full_attn_idxs": [2], "norm_eps": 1e-5, "num_heads": 32, "use_pos_enc": True,
    },
    "Qwen3.5-9B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "attn_output_gate": True,
        "head_dim": 256, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
        "layer_types": [*["linear_attention"] * 3, "full_attention"], "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default",
            "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        },
    },
    "Falcon-11B": {
        "architectures": ["FalconForCausalLM"], "alibi": False, "ff_factor": 4, "bias": False,
        "apply_residual_connection_post_layernorm": False, "multi_query": True,
        "parallel_attn": True, "new_decoder_architecture": True, "num_kv_heads": 16,
        "num_ln_in_parallel_attn": 1,
        "layer_norm_epsilon": 1e-5,
    },
    "EXAONE-4.0-32B": {
        "architectures": ["Exaone4ForCausalLM"], "sliding_window": 4096, "head_dim": None,
        "sliding_window_pattern": "LLLG", "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "MiniCPM4-0.5B": {
        "architectures": ["MiniCPMForCausalLM"], "dim_model_base": 256, "mup_denominator": 32,
        "scale_depth": 1.4, "scale_emb": 12, "quantization_config": None,
    },
    "InternLM2.5-7B": {
        "architectures": ["InternLM2ForCausalLM"], "bias": False, "attn_implementation": "eager",
        "rope_scaling": {"type": "dynamic", "factor": 2.0}, "pretraining_tp": 1,
        "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
    },
    "InternLM3-8B": {
        "architectures": ["InternLM3ForCausalLM"], "bias": False, "qkv_bias": False,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    },
    "OLMo-7B": {
        "architectures": ["OlmoForCausalLM"], "attention_bias": False, "clip_qkv": 8.0,
        "pretraining_tp": 1, "hidden_act": "silu",
    },
    "Apertus-8B": {
        "architectures": ["ApertusForCausalLM"], "attention_bias": False, "hidden_act": "xielu",
        "mlp_bias": False, "post_norm": False, "qk_norm": True, "rope_theta": 12_000_000,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3",
        },
    },
    "Hunyuan-1.8B": {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_head_dim": 128,
        "use_qk_norm": True, "use_cla": False,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "type": "dynamic",
        },
    },
    "dots.llm1": {
        "architectures": ["Dots1ForCausalLM"], "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc", "sliding_window": None, "use_sliding_window": False,
        "max_window_layers": 62, "n_group": 1, "topk_group": 1,
    },
    "MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 4, "head_dim": 128,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1,
        "num_local_experts": 256, "num_experts_per_tok": 8, "num_mtp_modules": 3,
        "qk_norm_type": "per_layer", "rotary_dim": 64, "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
        "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
    },
    "Phi-3.5-MoE": {
        "architectures": ["PhimoeForCausalLM"], "attention_bias": True, "hidden_act": "silu",
        "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"}, "hidden_dropout": 0.0,
        "input_jitter_noise": 0.01, "lm_head_bias": True, "max_position_embeddings": 131_072,
        "num_experts_per_tok": 2, "num_local_experts": 16, "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096, "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01, "sliding_window": 131_072,
        "rope_scaling": {
            "long_factor": [2.0] * 64, "long_mscale": 1.243163121016122,
            "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64,
            "short_mscale": 1.243163121016122, "type": "longrope",
        },
    },
    "ERNIE-4.5-21B-A3B": {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "moe_capacity": [64] * 3, "moe_k": 6,
        "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_layer_start_index": 1,
        "moe_layer_end_index": 3, "moe_layer_interval": 1, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_use_aux_free": True, "use_bias": False,
        "num_nextn_predict_layers": 1,
    },
    "Hunyuan-A13B": {
        "architectures": ["HunYuanMoEV1ForCausalLM"], "moe_intermediate_size": [8192] * 4,
        "moe_layer_num_skipped": 0, "moe_topk": [8] * 4, "num_experts": 64,
        "num_shared_expert": [1] * 4,
    },
    "Command-R7B": {
        "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid",
        "layer_switch": 4, "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
        "use_parallel_block": True, "use_parallel_embedding": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(name):
    spec = ModelSpec.from_config(unified_config(SIZES | PUBLISHED[name]))
    assert spec.num_layers == 4


def test_halves_have_heads_by_either_name():
    config = SIZES | PUBLISHED["Nemotron-H-8B"] | {"attention_head_dim": 64}
    assert ModelSpec.from_config(config).head_dim == 64
    assert ModelSpec.from_config(config | {"head_dim": 32}).head_dim == 32


# More that files have, by architecture.
KEYS = {
    "LlamaForCausalLM": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "max_sequence_length": 2048,
        "pretraining_tp": 1,
        "_name_or_path": "x",
        "unsloth_fixed": True,
    },
    "Qwen2ForCausalLM": {"max_window_layers": 21, "use_mrope": False, "attention_dropout": 0.0},
    "Phi3ForCausalLM": {
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "resid_pdrop": 0.1,
        "original_max_position_embeddings": 4096,
        "sliding_window": 262144,
    },
    "Gemma2ForCausalLM": {"cache_implementation": "hybrid", "sliding_window_size": 4096},
    "GPT2LMHeadModel": {"n_ctx": 256, "task_specific_params": {"x": 1}, "summary_type": "c"},
    "GPTBigCodeForCausalLM": {"pad_key_length": True, "validate_runner_input": True},
    "OPTForCausalLM": {"prefix": "</s>", "layerdrop": 0.1, "dropout": 0.1},
}


@pytest.mark.parametrize("architecture", KEYS)
def test_keys_of_published_files_that_do_not_count_are_no_error(architecture):
    assert tiny_spec(architecture, **KEYS[architecture]) is not None


def test_text_inside_a_model_of_text_and_pictures():
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
        "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    }  # fmt: skip
    spec = ModelSpec.from_config(unified_config({**outer, "text_config": SIZES}))
    assert spec.windows == (None,) * 4


def test_what_would_change_the_arithmetic_is_refused():
    others = SIZES | PUBLISHED["Granite-4.0-H-Micro"] | {"layer_types": ["mamba3"] * 4}
    with pytest.raises(UnsupportedModelError, match=r"mamba3.*only linear_attention, full_att"):
        ModelSpec.from_config(others)
    for name, key, value in (
        ("StarCoder2-3B", "mlp_type", "gated"),
        ("SmolLM3-3B", "new", 3),
        ("Granite-4.0-H-Micro", "mamba_proj_bias", True),
        ("Granite-4.0-H-Micro", "time_step_limit", [0.0, 0.1]),
        ("Nemotron-H-8B", "hybrid_override_pattern", "ME-*"),
        ("Nemotron-H-8B", "time_step_limit", [0.001, float("inf")]),
        ("Nemotron-H-8B", "use_bias", True),
        ("Nemotron-H-8B", "norm_eps", 1e-6),
        ("LFM2-1.2B", "conv_bias", True),
        ("LFM2-1.2B", "layer_types", ["conv", "sliding_attention"] * 2),
    ):
        with pytest.raises(UnsupportedModelError, match=key):
            ModelSpec.from_config(SIZES | PUBLISHED[name] | {key: value})


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_and_exactness_are_said(name):
    """As the engine logs them and `hunch doctor` prints them."""
    architecture, changes = FAMILIES[name]
    weights = tiny_weights(tiny_config(architecture, **changes))
    assert exactness(load_decoder(weights)).startswith("bit for bit (torch")
    if native_library.is_available():
        model = load_native(weights, dtype="int8", num_threads=1)
        assert (model is None) == (name in BY_TORCH)
        assert model is None or exactness(model) == "bit for bit (native: the CPU's own kernels)"
    with pytest.raises(UnsupportedModelError, match="new_arithmetic=3"):
        ModelSpec.from_config(weights.config | {"new_arithmetic": 3})


@pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_is_the_same_bits_in_any_batch_and_any_chunk(name):
    architecture, changes = FAMILIES[name]
    weights = tiny_weights(tiny_config(architecture, **changes), scale=2.0)
    if name in BY_TORCH:
        check_rows(load_decoder(weights))
    else:
        check_rows(load_native(weights, dtype="int8", num_threads=1))


def test_every_architecture_is_in_the_table():
    text = (ROOT / "docs" / "models.md").read_text()
    assert [name for name in MODELS if f"`{name}`" not in text] == []


def test_why_an_architecture_is_refused_is_said():
    assert not {*REFUSED} & {*MODELS}
    theirs = {name for name in dir(transformers) if name.endswith(("ForCausalLM", "Generation"))}
    assert {*REFUSED} <= theirs | {"DiffusionGemmaForBlockDiffusion"}
    with pytest.raises(
        UnsupportedModelError, match=r"'ZambaForCausalLM' is not .*share blocks of attention"
    ):
        ModelSpec.from_config({"architectures": ["ZambaForCausalLM"], "n_layer": 2})
    text = (ROOT / "docs" / "models.md").read_text()
    assert [reason for reason in {*REFUSED.values()} if f"| {reason} |" not in text] == []


def test_the_nearest_family_is_named():
    config = {**tiny_config("LlamaForCausalLM"), "architectures": ["PlamoForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=r"nearest to LlamaForCausalLM, .* otherwise"):
        ModelSpec.from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"nearest to .*, which has no unheard_of=4"):
        ModelSpec.from_config(config | {"unheard_of": 4})
