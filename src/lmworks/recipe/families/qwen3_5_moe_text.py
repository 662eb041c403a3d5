"""Qwen3.5 and 3.6 with experts (35B-A3B), the language model: as Qwen3.5, with experts and a gated shared one in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lmworks.recipe.families import common, qwen3_5_text
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.gated_delta import (
    DEFAULTS,
    GROUPS,
    NOT_IN_GGUF,
    layers_from_config,
    layers_to_config,
    recurrent_from_gguf,
    recurrent_gguf,
)
from lmworks.recipe.schema.model import Model, Rope

_ABSENT = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")


def _differs(model: Model) -> str | None:
    assert model.moe is not None
    if not model.moe.norm_topk_prob:
        return "the weights of its chosen experts are not normalized (moe.norm_topk_prob)"
    if model.intermediate_size != model.moe.moe_intermediate_size:
        return "moe.moe_intermediate_size is not intermediate_size, which the class does not have"
    return common.first_layers_dense(model.moe)


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    experts = common.qwen_experts_to_config(model)
    return layers_to_config(model) | {key: value for key, value in experts.items() if key not in _ABSENT}


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    return layers_from_config(config) | common.qwen_experts_from_config(config) | {"intermediate_size": config["moe_intermediate_size"]}


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    return recurrent_from_gguf(values) | {"intermediate_size": values["expert_feed_forward_length"]}


FAMILY = Family(
    name="Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text",
    about="hybrid: gated delta rule and gated attention, experts (softmax gates) and a gated shared one in all layers; "
    "`moe.balance.method` aux, sinkhorn or none; multi-token prediction is left out",
    names=(*qwen3_5_text.NAMES, *common.EXPERTS, *common.GATED_SHARED_EXPERT), groups=GROUPS,
    zero=("layers.{i}.ffn.router.bias",), unread=qwen3_5_text.UNREAD, norms_plus_one=True,
    prefixes=qwen3_5_text.PREFIXES, wrapper=("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"), rope_ignored=qwen3_5_text.MROPE,
    ignored=qwen3_5_text.IGNORED,
    defaults=DEFAULTS | {
        "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
    },
    partial_rotary_factor=0.25, fixed={"attn_output_gate": (True,), "mlp_only_layers": ([],)}, omits=("intermediate_size",),
    requires=frozenset({
        "experts", "shared experts", "softmax gates", "gate of shared experts", "QK norm", "output gate", "gated delta rule",
    }),
    allows=frozenset({"partial RoPE"}), differs=_differs, to_config=_to_config, from_config=_from_config,
    architectures=("qwen35moe",), gguf=partial(recurrent_gguf, architecture="qwen35moe", tiled=True), from_gguf=_from_gguf,
    without_gguf=NOT_IN_GGUF,
)  # fmt: skip
