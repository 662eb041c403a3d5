"""Mixtral (8x7B, 8x22B): experts in all layers, softmax gates normalized over the selected experts, a sliding window or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Family, Gguf, Names, Null
from lmworks.recipe.schema.model import Model, Rope

_BLOCK = "model.layers.{i}.block_sparse_moe."
_EXPERTS: Names = (
    *((f"layers.{{i}}.ffn.experts.{ours}", f"{_BLOCK}experts.{{e}}.{theirs}.weight")
      for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))),
    ("layers.{i}.ffn.router.weight", f"{_BLOCK}gate.weight"),
)  # fmt: skip


def _differs(model: Model) -> str | None:
    assert model.moe is not None
    if not model.moe.norm_topk_prob:
        return "the weights of its chosen experts are not normalized (moe.norm_topk_prob)"
    return common.first_layers_dense(model.moe)


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    moe, window = model.moe, model.sliding_window
    assert moe is not None
    return {
        "num_local_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "intermediate_size": moe.moe_intermediate_size, "sliding_window": int(window) if window else None,
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    experts = (config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"])
    return common.softmax_experts(*experts, normalized=True) | common.window_of_all_layers(config)


def _gguf(model: Model) -> Gguf:
    return common.gguf(model, "llama", interleaved_rope=True, metadata=common.softmax_experts_metadata(model))


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    return common.softmax_experts(values["expert_count"], values["expert_used_count"], values["feed_forward_length"], normalized=True)


FAMILY = Family(
    name="MixtralForCausalLM", model_type="mixtral",
    about="mixture of experts (softmax gates) in all layers, plain; `moe.balance.method` aux, sinkhorn or none",
    names=(*common.ENDS, *common.PRE_NORMS, *common.PROJECTIONS, *_EXPERTS), zero=("layers.{i}.ffn.router.bias",),
    defaults=common.DEFAULTS | {
        "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8, "head_dim": Null(int), "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "sliding_window": Null(int), "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    rope_theta=1_000_000.0, fixed={"attention_bias": (False,)}, aliases={"num_experts": "num_local_experts"},
    requires=frozenset({"experts", "softmax gates"}), allows=frozenset({"sliding window"}), differs=_differs,
    to_config=_to_config, omits=("attention_bias",), from_config=_from_config,
    architectures=("llama",), gguf=_gguf, from_gguf=_from_gguf, without_gguf="sliding window",
)  # fmt: skip
