"""OLMoE (1B-7B): experts in all layers, softmax gates, and QK norm over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, NoClass, Null
from lmworks.recipe.families.olmo2 import heads_are_the_width
from lmworks.recipe.schema.model import Model, Rope

_NORMS = {"use_qk_norm": True, "qk_norm_over": "all_heads"}


def _differs(model: Model) -> str | None:
    assert model.moe is not None
    return heads_are_the_width(model) or common.first_layers_dense(model.moe)


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    moe = model.moe
    assert moe is not None
    return {
        "num_experts": moe.n_routed_experts, "num_experts_per_tok": moe.num_experts_per_tok,
        "intermediate_size": moe.moe_intermediate_size, "norm_topk_prob": moe.norm_topk_prob,
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    experts = (config["num_experts"], config["num_experts_per_tok"], config["intermediate_size"])
    return _NORMS | common.softmax_experts(*experts, normalized=config["norm_topk_prob"])


def _gguf(model: Model) -> Gguf:
    moe = model.moe
    assert moe is not None
    if moe.norm_topk_prob:
        raise NoClass("the weights of its chosen experts are normalized (moe.norm_topk_prob), which llama.cpp's olmoe does not do")
    if model.num_key_value_heads != model.num_attention_heads:
        raise NoClass("it has fewer key-value heads than heads, and llama.cpp's olmoe has a key norm of the whole width")
    return common.gguf(model, "olmoe", metadata=common.softmax_experts_metadata(model))


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    experts = (values["expert_count"], values["expert_used_count"], values["feed_forward_length"])
    return _NORMS | common.softmax_experts(*experts, normalized=False)


FAMILY = Family(
    name="OlmoeForCausalLM", model_type="olmoe",
    about="mixture of experts (softmax gates) in all layers; heads x head_dim is the width; `moe.balance.method` aux, sinkhorn or none",
    names=(*common.ENDS, *common.PRE_NORMS, *common.PROJECTIONS, *common.QK_NORMS, *common.EXPERTS),
    zero=("layers.{i}.ffn.router.bias",),
    defaults=common.DEFAULTS | {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": Null(int), "head_dim": Extra(int), "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "attention_bias": False, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
    },
    fixed={"clip_qkv": ()}, aliases={"num_local_experts": "num_experts"},
    requires=frozenset({"experts", "softmax gates", "QK norm over all heads"}), differs=_differs,
    to_config=_to_config, omits=("head_dim",), from_config=_from_config,
    architectures=("olmoe",), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="weights of experts that are normalized, fewer key-value heads than heads, tied embeddings",
)  # fmt: skip
