"""Qwen3-Next (80B-A3B): three layers with the gated delta rule to each with gated attention, and experts with a gated shared one."""

from __future__ import annotations

from functools import partial
from typing import Any

from lmworks.recipe.families import common, gated_delta
from lmworks.recipe.families.family import Family, Names, Null
from lmworks.recipe.schema.model import Model, Rope

_OURS, _THEIRS = "layers.{i}.gated_delta.", "model.layers.{i}.linear_attn."
_PROJECTED: Names = (
    *((f"{_OURS}{part}.weight", f"{_THEIRS}in_proj_qkvz.weight") for part in ("query", "key", "value", "gate")),
    *((f"{_OURS}{part}.weight", f"{_THEIRS}in_proj_ba.weight") for part in ("beta", "decay")),
)


def _differs(model: Model) -> str | None:
    moe = model.moe
    assert moe is not None
    if moe.norm_topk_prob and not moe.first_k_dense_replace and model.intermediate_size == moe.moe_intermediate_size:
        return "all its layers have experts with normalized weights, and intermediate_size is that of an expert, as in Qwen3.5"
    return None


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    return gated_delta.layers_to_config(model) | common.qwen_experts_to_config(model)


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return gated_delta.layers_from_config(config) | common.qwen_experts_from_config(config)


FAMILY = Family(
    name="Qwen3NextForCausalLM", model_type="qwen3_next",
    about="hybrid: gated delta rule and gated attention, experts (softmax gates) and a gated shared one; "
    "`moe.balance.method` aux, sinkhorn or none; multi-token prediction is left out",
    names=(*common.ENDS, *common.PRE_NORMS, *gated_delta.ATTENTION, *gated_delta.RECURRENCE, *_PROJECTED, *common.FFN, *common.EXPERTS,
           *common.GATED_SHARED_EXPERT),
    groups=gated_delta.GROUPS | {f"{_THEIRS}in_proj_{part}.weight": gated_delta.key_heads for part in ("qkvz", "ba")},
    zero=("layers.{i}.ffn.router.bias",), unread=("mtp.",), norms_plus_one=True,
    defaults=gated_delta.DEFAULTS | {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True, "mlp_only_layers": Null(list),
    },
    partial_rotary_factor=0.25,
    requires=frozenset({
        "experts", "shared experts", "softmax gates", "gate of shared experts", "QK norm", "output gate", "gated delta rule",
    }),
    allows=frozenset({"partial RoPE"}), differs=_differs, to_config=_to_config, from_config=_from_config,
    architectures=("qwen3next",), gguf=partial(gated_delta.recurrent_gguf, architecture="qwen3next", tiled=False),
    from_gguf=gated_delta.recurrent_from_gguf,
    without_gguf=gated_delta.NOT_IN_GGUF + ", dense layers, weights of experts that are not normalized",
)  # fmt: skip
