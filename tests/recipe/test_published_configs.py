"""A config.json as published is a preset: the recipe gets the model's shape from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lmworks.cli import recipe_commands
from lmworks.errors import UserError
from lmworks.recipe.document import parse_file
from lmworks.recipe.families.registry import from_config
from lmworks.recipe.load import load_recipe, shipped_folder
from lmworks.recipe.parameters import count_parameters
from lmworks.recipe.schema.model import Model

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
}  # fmt: skip
_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attention_multiplier": 0.0078125,
    "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
    "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 768,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)], "logits_scaling": 16, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_attention_heads": 32, "num_experts_per_tok": 10, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "num_local_experts": 72, "output_router_logits": False, "pad_token_id": 100256,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "router_aux_loss_coef": 0.0, "shared_intermediate_size": 1536, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "chunk_size": 128,
    "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02,
    "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
    "mamba_proj_bias": False, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "num_logits_to_keep": 1,
    "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
    "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.55.4",
    "use_bias": False, "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
_LFM2: dict[str, Any] = {  # as published in July 2025; the width of feed-forward blocks is two thirds of block_ff_dim, rounded up
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3,
    "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02, "max_position_embeddings": 128000,
    "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0, "theta": 1000000.0, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0", "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip


def _conv_beside(attention: list[int], layers: int) -> list[str]:
    return ["full_attention" if layer in attention else "conv" for layer in range(layers)]


def _lfm2(width: int, feed_forward: int, heads: int) -> dict[str, Any]:
    return _LFM2 | {"block_ff_dim": feed_forward, "num_attention_heads": heads, "num_heads": heads} | dict.fromkeys(
        ("hidden_size", "block_dim", "conv_dim", "conv_dim_out"), width)  # fmt: skip


_MELLUM: dict[str, Any] = {  # the defaults of its class, and the layers of arXiv:2605.31268
    "architectures": ["MellumForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 7168,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7, "max_position_embeddings": 131072,
    "mlp_layer_types": ["sparse"] * 28, "model_type": "mellum", "moe_intermediate_size": 896, "mtp_layer_types": ["sliding_attention"],
    "mtp_mlp_layer_types": ["sparse"], "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 8, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "num_local_experts": 64, "num_nextn_predict_layers": 1, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_parameters": {"full_attention": {"rope_theta": 500000.0, "rope_type": "default"},
                        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    "router_aux_loss_coef": 0.001, "sliding_window": 1024, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 98304,
}  # fmt: skip
_PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Granite-4.0-H-Small": (_GRANITE, 32_207_337_984),
    "Nemotron-3-Nano-30B-A3B": (_NEMOTRON, 31.6),
    "DeepSeek-V3": (_DEEPSEEK, 671_026_419_200),
    "Kimi-K2": (_DEEPSEEK | {
        "first_k_dense_replace": 1, "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "topk_group": 1,
        "routed_scaling_factor": 2.827, "vocab_size": 163840,
        "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
    }, 1_026_408_232_448),
    "Moonlight-16B-A3B": ({key: value for key, value in _DEEPSEEK.items() if key not in ("rope_scaling", "quantization_config")} | {
        "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None,
        "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
    }, 16.0),
    "GLM-4.5-Air": ({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5,
        "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
        "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
    }, 106.9),
    "SmolLM3-3B, tied by the default of its class": ({
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 128012,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
        "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0.dev0", "use_cache": False, "use_sliding_window": False, "vocab_size": 128256,
    }, 3_075_098_624),
    "Qwen2.5-7B, with the YaRN of its card": (_QWEN2 | {
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    }, 7_615_616_512),
    "DeepSeek-R1-Distill-Qwen-1.5B": (_QWEN2 | {
        "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21,
        "num_attention_heads": 12, "num_key_value_heads": 2, "rope_theta": 10000, "sliding_window": 4096, "use_mrope": False,
        "vocab_size": 151936,
    }, 1_777_088_000),
    "SmolLM2-135M-Instruct": (_LLAMA | {
        "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "vocab_size": 49152,
    }, 134_515_008),
    "Llama-3.2-1B": (_LLAMA | {
        "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True,
        "rope_scaling": _LLAMA["rope_scaling"] | {"factor": 32.0},
    }, 1_235_814_400),
    "Mistral-Nemo-Base-2407": ({
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 14336, "model_type": "mistral",
        "max_position_embeddings": 128000, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.3", "use_cache": True, "vocab_size": 131072,
    }, 12_247_782_400),
    "Llama-3.1-8B": (_LLAMA, 8_030_261_248),
    "Mistral-7B-v0.1": ({
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
    }, 7_241_732_096),
    "Qwen3-30B-A3B": ({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    }, 30_532_122_624),
    "Qwen3-Coder-30B-A3B": ({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "qkv_bias": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.52.3", "use_cache": True, "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 151936,
    }, 30_532_122_624),
    "Mixtral-8x7B-v0.1": ({
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    }, 46_702_792_704),
    "Qwen1.5-MoE-A2.7B": ({
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
        "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    }, 14_315_784_192),
    "OLMoE-1B-7B-0924": ({
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "eos_token_id": 50279,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
    }, 6_919_161_856),
    "OLMo-2-1124-7B": ({
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352,
    }, 7_298_617_344),
    "gpt-oss-20b": ({
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                                           "lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                                                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
    }, 20_914_757_184),
    "MiniMax-M2": ({
        "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 1536,
        "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
        "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3,
        "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "tie_word_embeddings": False, "transformers_version": "4.46.1", "use_cache": True, "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True, "vocab_size": 200064,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                                "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "lm_head"]},
    }, 228_689_748_992 + 256 * 62),
    "GLM-4.7-Flash": ({
        "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "pad_token_id": 154820,
        "eos_token_id": [154820, 154827, 154829], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10240,
        "max_position_embeddings": 202752, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "topk_method": "noaux_tc",
        "norm_topk_prob": True, "num_attention_heads": 20, "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 1,
        "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "num_hidden_layers": 47,
        "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "dtype": "bfloat16", "transformers_version": "5.0.0rc0",
        "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "vocab_size": 154880,
    }, 29.94),
    "Olmo-3-1025-7B": ({
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "max_position_embeddings": 65536, "model_type": "olmo3",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"},
        "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 100278,
    }, 7_298_011_136),
    "Mellum2-12B-A2.5B": (_MELLUM, 12_149_923_072),
    "LFM2-350M": (_lfm2(1024, 6656, 16), 354_483_968),
    "LFM2-700M": (_lfm2(1536, 10240, 24), 742_489_344),
    "LFM2-1.2B": (_LFM2, 1_170_340_608),
    "LFM2.5-1.2B": (
        {key: value for key, value in _LFM2.items() if key not in ("block_ff_dim", "conv_dim_out", "theta", "torch_dtype", "rope_theta")}
        | {"intermediate_size": 12288, "full_attn_idxs": None, "layer_types": _conv_beside([2, 5, 8, 10, 12, 14], 16), "dtype": "bfloat16",
           "tie_embedding": True, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}},
        1_170_340_608,
    ),
    "LFM2-2.6B": (_LFM2 | {
        "block_auto_adjust_ff_dim": False, "block_ff_dim": 10752, "intermediate_size": 10752, "full_attn_idxs": None,
        "num_hidden_layers": 30, "layer_types": _conv_beside([2, 5, 9, 13, 17, 21, 24, 27], 30), "tie_embedding": True,
    }, 2_569_272_320),
    "LFM2-8B-A1B": ({
        "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "dtype": "bfloat16",
        "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
        "layer_types": _conv_beside([2, 6, 10, 14, 18, 21], 24), "max_position_embeddings": 128000, "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True, "num_attention_heads": 32, "num_dense_layers": 2,
        "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0,
        "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "tie_embedding": True, "transformers_version": "4.57.0.dev0",
        "use_cache": True, "use_expert_bias": True, "vocab_size": 65536,
    }, 8_339_929_856 + 32 * 22),
}  # fmt: skip


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_models_have_as_many_parameters_as_they_say(name: str, write: Callable[..., Path], tmp_path: Path) -> None:
    config, parameters = _PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config, indent=2))
    resolved = load_recipe(write(("preset: glm-tiny", f"preset: {tmp_path}")))
    model = resolved.recipe.model
    sparse = [layer for layer in model.sparse_layers if layer < (model.num_hidden_layers or 0)]
    biases = model.moe.n_routed_experts * len(sparse) if model.moe else 0
    if not isinstance(parameters, int):  # said in billions
        assert count_parameters(model) / 1e9 == pytest.approx(parameters, rel=0.005)
    else:  # selection biases are counted by others, and are no parameters here
        assert parameters == count_parameters(model) + (biases if model.moe and model.moe.balance.method == "bias" else 0)
    assert resolved.origins["model.hidden_size"].kind == "preset"
    assert model.vocab_size == config["vocab_size"] and int(model.max_position_embeddings or 0) == config["max_position_embeddings"]


@pytest.mark.parametrize(
    "config",
    [*(config for name, (config, _) in _PUBLISHED.items() if name.startswith(("LFM2", "Mellum2"))),
     _LFM2 | {"intermediate_size": 512, "tie_embedding": False, "tie_word_embeddings": True},  # which others go over
     _LFM2 | {"layer_types": _conv_beside([1], 16)}],
)  # fmt: skip
def test_transformers_counts_as_many_parameters(config: dict[str, Any]) -> None:
    import torch
    import transformers

    with torch.device("meta"):
        peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert peer.num_parameters() == count_parameters(from_config(config))


_PRESETS = {
    "DeepSeek-V3": "deepseek-v3-671b-a37b", "Kimi-K2": "kimi-k2-1t-a32b", "Moonlight-16B-A3B": "moonlight-16b-a3b",
    "GLM-4.5-Air": "glm45-air-106b-a12b", "SmolLM3-3B, tied by the default of its class": "smollm3-3b",
    "SmolLM2-135M-Instruct": "smollm2-135m", "Llama-3.1-8B": "llama3.1-8b", "Llama-3.2-1B": "llama3.2-1b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b", "gpt-oss-20b": "gpt-oss-20b", "MiniMax-M2": "minimax-m2-230b-a10b",
    "GLM-4.7-Flash": "glm47-flash-30b-a3b", "Granite-4.0-H-Small": "granite-4.0-h-small-32b-a9b",
    "Nemotron-3-Nano-30B-A3B": "nemotron-3-nano-30b-a3b", "LFM2-1.2B": "lfm2-1.2b", "LFM2-8B-A1B": "lfm2-8b-a1b",
    "Mellum2-12B-A2.5B": "mellum2-12b-a2.5b",
}  # fmt: skip


@pytest.mark.parametrize("name", _PRESETS)
def test_shipped_presets_are_the_published_configs(name: str) -> None:
    """Key by key, but for the length that a recipe sets, how multi-token prediction and balance are trained, and the smallest time step
    of transformers, which the code of the model's makers does not have."""
    trained = {"max_position_embeddings": None, "mtp": None}
    published = from_config(_PUBLISHED[name][0]).model_copy(update=trained)
    ours = Model.model_validate(parse_file(shipped_folder() / "models" / f"{_PRESETS[name]}.yaml").tree | trained)
    if published.moe and ours.moe:
        published = published.model_copy(update={"moe": published.moe.model_copy(update={"balance": ours.moe.balance})})
    if published.mamba and published.mamba.min_time_step:
        published = published.model_copy(update={"mamba": published.mamba.model_copy(update={"min_time_step": 0.0})})
    kinds = [tuple(map(model.layer_type, range(model.num_hidden_layers or 0))) for model in (ours, published)]
    assert kinds[0] == kinds[1] and ours.model_dump(exclude={"layer_types"}) == published.model_dump(exclude={"layer_types"})


def test_a_config_without_a_class_is_that_of_its_model_type(write: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in _QWEN2.items() if key != "architectures"}))
    assert load_recipe(write(("preset: glm-tiny", f"preset: {path}"))).recipe.model.attention_bias


def test_keys_of_the_recipe_go_over_those_of_the_config(write: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(_LLAMA, indent=2))
    recipe = write(("preset: glm-tiny", f"preset: {path}\n  num_hidden_layers: 2\n  rope: {{factor: 16}}"))
    app = typer.Typer()
    recipe_commands.register(app)
    shown = CliRunner().invoke(app, ["show", str(recipe), "--set", "model.intermediate_size=512"], catch_exceptions=False)
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    for said in ("hidden_size: 4096 preset llama", "scaling: llama3 preset llama", "low_freq_factor: 1.0 preset llama"):
        assert any(said in line for line in lines), (said, shown.stdout)
    rope = load_recipe(recipe).recipe.model.rope
    assert (rope.scaling, rope.theta, rope.factor, int(rope.original_max_position_embeddings or 0)) == ("llama3", 500_000, 16, 8192)
    assert load_recipe(recipe).recipe.model.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "config.json is of class GPT2LMHeadModel; lmworks supports DeepseekV3ForCausalLM, "),
        ({"mlp_bias": True}, "config.json has mlp_bias true; lmworks supports false"),
        ({"rope_scaling": _LLAMA["rope_scaling"] | {"attention_factor": 2.0}}, "rope_scaling.attention_factor 2.0, which is no key of"),
        ({"rope_scaling": {"type": "longrope"}}, "has rope_type longrope; lmworks supports default, linear, llama3, yarn"),
        ({"text_config": {"hidden_size": 4}}, 'text_config {"hidden_size": 4}, a key that this class does not have in transformers'),
        (
            {"max_position_embeddings": 10**12},
            "max_position_embeddings 1000000000000; RoPE is computed in fp32, which holds positions from 1",
        ),
        (
            {"num_attention_heads": 5},
            "config.json describes no model that lmworks has: model.num_key_value_heads 8 must divide model.num_attention_heads 5",
        ),
        ({"num_attention_heads": 0}, "config.json "),
        ({"hidden_size": "wide"}, "config.json "),
    ],
)
def test_a_config_that_is_not_ours_is_refused_in_one_line(
    change: dict[str, Any], said: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(_LLAMA | change))
    recipe = write(("preset: glm-tiny", f"preset: {path}"))
    with pytest.raises(UserError) as error:
        load_recipe(recipe)
    assert said in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)
