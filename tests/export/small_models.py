"""Small models, briefly trained on real text, and what the engines are asked.

The slow tests train for more steps, because random weights would not do there: their logits are flat noise, and a rounding that sends a
token to another expert changes everything. After 64 steps two engines differ by what they differ for a model that somebody uses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.model.layers import ACTIVATIONS, SwiGLU
from lmworks.optim.optimizer import build_optimizer
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batches import Batches
from lmworks.tokenizer.tokenizer import Tokenizer

VOCABULARY = 640
LENGTH = 128

_DENSE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 256,
    "max_position_embeddings": "256 tokens",
}  # fmt: skip
_MOE = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
SOFTMAX = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 0,
    "scoring_func": "softmax",
    "balance": {"method": "aux"},
}
_SHARED = {**SOFTMAX, "n_shared_experts": 1, "shared_expert_gate": True, "first_k_dense_replace": 0}
_DELTA: dict[str, Any] = {
    **_DENSE, "use_qk_norm": True, "attn_output_gate": True, "rms_norm_eps": 1e-6, "rope": {"partial_rotary_factor": 0.25},
    "layer_types": ("linear_attention", "full_attention"),
    "gated_delta": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 32, "value_head_dim": 32},
}
_MAMBA: dict[str, Any] = {
    **_DENSE, "head_dim": 32, "layer_types": ("linear_attention", "linear_attention", "full_attention"),
    "mamba": {"num_heads": 4, "head_dim": 64, "state_size": 32, "n_groups": 2, "norm_groups": 2},
}
_CONV: dict[str, Any] = {
    **_DENSE, "head_dim": 32, "use_qk_norm": True, "layer_types": ("conv", "full_attention", "conv"), "short_conv": {},
    "rope": {"theta": 1_000_000.0},
}
_BLOCKS: dict[str, Any] = {
    **_DENSE, "num_hidden_layers": 6, "hidden_act": "relu2", "rope": {"partial_rotary_factor": 0}, "mamba": _MAMBA["mamba"],
    "layer_types": ("linear_attention", "mlp", "full_attention", "mlp"),
}
MODELS: dict[str, dict[str, Any]] = {
    "glm4moe": {**_DENSE, "use_qk_norm": True, "attention_bias": True, "rope": {"partial_rotary_factor": 0.5}, "moe": _MOE},
    "glm4moe-groups": {**_DENSE, "rope": {"partial_rotary_factor": 0.5}, "moe": {**_MOE, "n_group": 4, "topk_group": 2,
        "norm_topk_prob": False}},
    "glm4moe-mtp": {**_DENSE, "use_qk_norm": True, "rope": {"partial_rotary_factor": 0.5}, "moe": _MOE, "mtp": {}},
    "deepseek": {**_DENSE, "num_key_value_heads": 4, "head_dim": 48, "rms_norm_eps": 1e-6, "moe": _MOE, "mtp": {},
                 "mla": {"q_lora_rank": 64, "kv_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}},
    "qwen3": {**_DENSE, "use_qk_norm": True, "tie_word_embeddings": True},
    "qwen2": {**_DENSE, "attention_bias": True, "head_dim": 32},
    "qwen2-wide": {**_DENSE, "attention_bias": True},
    "llama": {**_DENSE, "rope": {"theta": 500_000.0}},
    "llama-yarn": {**_DENSE, "rope": {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": "64 tokens"}},
    "llama-llama3": {**_DENSE, "rope": {"theta": 500_000.0, "scaling": "llama3", "factor": 4.0,
        "original_max_position_embeddings": "64 tokens"}},
    "llama-linear": {**_DENSE, "rope": {"scaling": "linear", "factor": 2.0}},
    "llama-ntk": {**_DENSE, "rope": {"scaling": "ntk", "factor": 4.0, "original_max_position_embeddings": "64 tokens"}},
    "qwen3moe": {**_DENSE, "use_qk_norm": True, "moe": {**SOFTMAX, "first_k_dense_replace": 0}},
    "qwen2moe": {**_DENSE, "attention_bias": True, "head_dim": 32, "moe": {**_SHARED, "norm_topk_prob": False}},
    "mixtral": {**_DENSE, "moe": {**SOFTMAX, "first_k_dense_replace": 0}},
    "olmoe": {**_DENSE, "head_dim": 32, "num_key_value_heads": 4, "use_qk_norm": True, "qk_norm_over": "all_heads",
              "moe": {**SOFTMAX, "first_k_dense_replace": 0, "norm_topk_prob": False}},
    "olmo2": {**_DENSE, "head_dim": 32, "use_qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post"},
    "olmo3": {**_DENSE, "head_dim": 32, "use_qk_norm": True, "qk_norm_over": "all_heads", "norm_position": "post",
        "sliding_window": "24 tokens", "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope": {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": "64 tokens"}, "sliding_rope": {"theta": 10_000.0}},
    "mellum": {**_DENSE, "use_qk_norm": True, "sliding_window": "24 tokens", "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "rope": {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": "64 tokens"}, "sliding_rope": {"theta": 10_000.0},
        "moe": {**SOFTMAX, "first_k_dense_replace": 0}},
    "gpt-oss": {**_DENSE, "attention_bias": True, "attention_output_bias": True, "attention_sinks": True, "sliding_window": "24 tokens",
        "layer_types": ["sliding_attention", "full_attention"], "rope": {"scaling": "yarn", "factor": 4.0,
        "original_max_position_embeddings": "64 tokens"},
        "moe": {**SOFTMAX, "first_k_dense_replace": 0, "add_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}},
    "minimax-m2": {**_DENSE, "use_qk_norm": True, "qk_norm_over": "all_heads", "rope": {"partial_rotary_factor": 0.5},
        "moe": {**_MOE, "first_k_dense_replace": 0, "n_shared_experts": 0, "routed_scaling_factor": 1.0}},
    "gemma3": {**_DENSE, "use_qk_norm": True, "norm_position": "both", "hidden_act": "gelu_tanh", "scale_embeddings": True,
        "tie_word_embeddings": True, "sliding_window": "24 tokens", "sliding_rope": {"theta": 10_000.0}},
    "phi3": {**_DENSE, "head_dim": 32, "rope": {"partial_rotary_factor": 0.75}},
    "granite": {**_DENSE, "head_dim": 32, "multipliers": {"embedding": 2.0, "key": 0.707106781187, "attention_out": 0.5, "ffn_out": 0.5,
        "logits": 0.5}},
    "granitehybrid": {**_MAMBA, "rope": {"partial_rotary_factor": 0}, "tie_word_embeddings": True, "multipliers": {"embedding": 2.0,
        "key": 0.707106781187, "attention_out": 0.5, "mamba_out": 0.5, "ffn_out": 0.5, "logits": 0.5}},
    "granitehybrid-moe": {**_MAMBA, "intermediate_size": 64, "moe": {**SOFTMAX, "n_shared_experts": 2, "first_k_dense_replace": 0}},
    "nemotron-h": _BLOCKS,
    "nemotron-h-moe": {**_BLOCKS, "layer_types": ("linear_attention", "moe", "full_attention", "moe"), "intermediate_size": 64,
        "moe": {**_MOE, "first_k_dense_replace": 0, "n_shared_experts": 2, "moe_latent_size": 96}},
    "glm4": {**_DENSE, "norm_position": "both", "attention_bias": True, "rope": {"partial_rotary_factor": 0.5}},
    "qwen3next": {**_DELTA, "moe": _SHARED},
    "qwen35": {**_DELTA, "tie_word_embeddings": True},
    "qwen35moe": {**_DELTA, "intermediate_size": 64, "moe": _SHARED},
    "lfm2": _CONV,
    "lfm2moe": {**_CONV, "tie_word_embeddings": True, "moe": {**_MOE, "n_shared_experts": 0, "routed_scaling_factor": 1.0}},
    "smollm3": {**_DENSE, "no_rope_layer_interval": 4, "tie_word_embeddings": True},
}  # fmt: skip
STEPS = 64
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, isn't it?  Two  spaces.\n\nA paragraph\t with a tab. ",
    Path(json.__file__).read_text(encoding="utf-8")[:1500],
    "你好，世界！今天天气很好，我们去公园散步吧。数字：１２３。",
    "naïve café 👩‍👩‍👧 <|user|> [gMASK] \u0000 e\u0301 Ünïcödé 日本語 привет\r\n\r\n    x = 1",
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hello!"}]},
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"},
                  {"role": "user", "content": "And\n\n twice that? "}]},
    {"messages": [{"role": "user", "content": "Weather in 北京?"}],
     "tools": [{"type": "function", "function": {"name": "weather", "description": "Now", "parameters": {
         "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]},
]  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A finished run directory, and what lies in it."""

    recipe: Recipe
    directory: Path
    tokenizer: Tokenizer
    model: Transformer


def recipe_for(model: dict[str, Any], run_dir: Path, **export: Any) -> Recipe:
    phase = {
        "name": "only",
        "tokens": "64Ki",
        "mixture": {"code": 0.5, "docs": 0.5},
        "sequence_length": f"{LENGTH} tokens",
        "global_batch_tokens": "1Ki",
    }
    return Recipe.model_validate({
        "name": "tiny", "seed": 3, "threads": 1, "run_dir": str(run_dir), "model": model, "train": {"phases": [phase]},
        "tokenizer": {"vocab_size": VOCABULARY, "sample_bytes": "300kB"}, "export": {"dtype": "fp32", **export},
        "optimizer": {"kind": "adamw", "learning_rate": 0.003},
    })  # fmt: skip


def trained(recipe: Recipe, shards_dir: Path, steps: int) -> Transformer:
    """Some steps of plain AdamW; the selection biases are pushed apart, as balancing would."""
    model = initialize(Transformer(recipe.model), recipe.seed)
    optimizer = build_optimizer(model, recipe.optimizer)
    batches = Batches(recipe, shards_dir)
    for step in range(steps):
        batch = batches.batch(step)
        loss = model.loss(*(torch.from_numpy(array).long() for array in (batch.tokens, batch.labels)), torch.from_numpy(batch.cu_seqlens))
        (loss.total / batch.valid_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias") and recipe.model.moe and recipe.model.moe.balance.method == "bias":
                buffer.copy_(0.05 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


@contextmanager
def gelu_of_a_table(model: Transformer) -> Iterator[None]:
    """GELU as ggml computes it on CPUs: argument and value are rounded to fp16."""
    gates = [one for one in model.modules() if isinstance(one, SwiGLU) and one.activation is ACTIVATIONS["gelu_tanh"]]
    for one in gates:
        one.activation = lambda x: ACTIVATIONS["gelu_tanh"](x.half().float()).half().float()
    yield
    for one in gates:
        one.activation = ACTIVATIONS["gelu_tanh"]
