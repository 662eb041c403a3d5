"""Granite 4: Mamba-2 or attention in each layer, mostly without positions, Granite's factors, and a dense block or experts beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common, granite, mamba2
from lmworks.recipe.families.family import Extra, Family, Gguf, Names, NoClass, Null, said
from lmworks.recipe.families.olmo2 import heads_are_the_width
from lmworks.recipe.schema.mixers import Multipliers
from lmworks.recipe.schema.model import Model, Rope

_LAYER = "model.layers.{i}."
_EXPERT, _BLOCK, _SHARED = _LAYER + "block_sparse_moe.experts.{e}.", _LAYER + "block_sparse_moe.", _LAYER + "shared_mlp."
_NAMES: Names = (
    *common.ENDS, *common.PRE_NORMS, *common.PROJECTIONS, *mamba2.names(_LAYER + "mamba."),
    *((f"layers.{{i}}.ffn.{block}{part}.weight", _SHARED + theirs)
      for block in ("", "shared.")
      for part, theirs in (("gate", "input_linear.weight"), ("up", "input_linear.weight"), ("down", "output_linear.weight"))),
    *((f"layers.{{i}}.ffn.experts.{part}", f"{_EXPERT}{part}_proj.weight") for part in ("gate", "up", "down")),
    ("layers.{i}.ffn.router.weight", _BLOCK + "router.layer.weight"),
)  # fmt: skip
_STACKED = {
    f"{_BLOCK}{stored}.weight": tuple(f"{_EXPERT}{part}_proj.weight" for part in parts)
    for stored, parts in (("input_linear", ("gate", "up")), ("output_linear", ("down",)))
}
_FACTORS = ("embedding", "key", "attention_out", "mamba_out", "ffn_out", "logits")
_NOPE = "nope"  # as published; every other text than "rope" means no positions too


def _differs(model: Model) -> str | None:
    given, moe = model.factors, model.moe
    for name in given.changed():
        if name not in _FACTORS:
            return f"it has a factor that Granite has not (multipliers.{name})"
    if not given.attention_out == given.ffn_out == given.mamba_out:
        return "its blocks have different factors on what they add (multipliers.attention_out, mamba_out and ffn_out)"
    if moe is not None:
        for found, text in (
            (moe.scoring_func != "softmax", "its gates are sigmoid (moe.scoring_func)"),
            (not moe.norm_topk_prob, "the weights of its experts are not normalized (moe.norm_topk_prob)"),
            (not moe.n_shared_experts, "it has experts and no shared one (moe.n_shared_experts)"),
        ):
            if found:
                return text
    dense = None if moe is None else common.first_layers_dense(moe)
    return dense or heads_are_the_width(model) or mamba2.inner_width_differs(model) or mamba2.gated_norm_differs(model)


def _to_config(model: Model, rope: Rope) -> dict[str, Any]:
    mamba, moe, older = model.mamba, model.moe, {newer: older for older, newer in mamba2.OLDER.items()}
    assert mamba and model.hidden_size
    experts = {
        "num_local_experts": moe.n_routed_experts if moe else 0, "num_experts_per_tok": moe.num_experts_per_tok if moe else 0,
        "intermediate_size": moe.moe_intermediate_size if moe else model.intermediate_size,
        "shared_intermediate_size": moe.n_shared_experts * moe.moe_intermediate_size if moe else model.intermediate_size,
    }  # fmt: skip
    positions: dict[str, Any] = {"position_embedding_type": "rope"}
    if not rope.partial_rotary_factor:
        positions = {"position_embedding_type": _NOPE, "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta}}
    return {
        "layer_types": [older[model.layer_type(layer)] for layer in range(model.num_hidden_layers or 0)],
        "mamba_n_heads": mamba.num_heads, "mamba_d_head": mamba.head_dim, "mamba_n_groups": mamba.n_groups,
        "mamba_d_state": mamba.state_size, "mamba_d_conv": mamba.conv_kernel, "mamba_expand": mamba.inner_size // model.hidden_size,
        "mamba_chunk_size": 256, "mamba_conv_bias": mamba.conv_bias, "mamba_proj_bias": False,
        "time_step_limit": [0.0, math.inf],
        **dict(zip(granite.KEYS, granite.numbers(model), strict=True)), **experts, **positions,
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    layers, types = config["num_hidden_layers"], config["layer_types"]
    types = mamba2.layer_types([mamba2.LINEAR] * layers if types is None else types, layers, (mamba2.FULL, mamba2.LINEAR))
    found = granite.factors_from_config(config) | _feed_forward(
        config["num_local_experts"], config["num_experts_per_tok"], config["intermediate_size"], config["shared_intermediate_size"]
    )  # fmt: skip
    if config["position_embedding_type"] != "rope":
        found["rope"] = {"partial_rotary_factor": 0}
    if mamba2.LINEAR not in types:
        return found
    heads, groups, inner = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_expand"] * config["hidden_size"]
    if heads <= 0 or inner % heads or config["mamba_d_head"] not in ("auto", inner // heads):
        raise UserError(
            f"config.json has mamba_n_heads {heads} and {said('mamba_d_head', config['mamba_d_head'])}, whose product is not the inner "
            f"width {inner}"
        )
    mamba2.refuse_limits(config["time_step_limit"])
    mamba = {
        "num_heads": heads, "head_dim": inner // heads, "n_groups": groups, "norm_groups": groups, "state_size": config["mamba_d_state"],
        "conv_kernel": config["mamba_d_conv"], "conv_bias": config["mamba_conv_bias"],
    }  # fmt: skip
    return found | _factors(found) | {"layer_types": common.repeating(types), "mamba": mamba}


def _factors(values: dict[str, Any]) -> dict[str, Any]:
    """`multipliers` of Granite, with that of what attention adds for Mamba-2 too."""
    given = values["multipliers"]
    return {"multipliers": given and Multipliers.model_validate(given.model_dump() | {"mamba_out": given.attention_out})}


def _feed_forward(experts: int, selected: int, size: int, shared: int) -> dict[str, Any]:
    """`intermediate_size` of a dense model, or `moe`."""
    if not experts:
        return {"intermediate_size": shared}
    if size <= 0 or shared <= 0 or shared % size:
        raise UserError(
            f"config.json has shared_intermediate_size {shared}, which must be a multiple of intermediate_size {size} in lmworks"
        )
    values = common.softmax_experts(experts, selected, size, normalized=True)
    values["moe"] |= {"n_shared_experts": shared // size}
    return values


def _gguf(model: Model) -> Gguf:
    mamba, moe, rotates = model.mamba, model.moe, model.rope.partial_rotary_factor > 0
    assert mamba and model.hidden_size and model.head_dim
    if mamba.inner_size != 2 * model.hidden_size:
        raise NoClass(f"the inner width of Mamba-2 is {mamba.inner_size}, and llama.cpp wants twice hidden_size {model.hidden_size}")
    block = "shared." if moe else ""
    end = "_shexp" if moe else ""
    further: Names = (
        *((f"layers.{{i}}.ffn.{block}{part}.weight", f"blk.{{i}}.ffn_{part}{end}.weight") for part in ("gate", "up", "down")),
        *((f"layers.{{i}}.ffn.experts.{part}", f"blk.{{i}}.ffn_{part}_exps.weight") for part in ("gate", "up", "down")),
        ("layers.{i}.ffn.router.weight", "blk.{i}.ffn_gate_inp.weight"),
    )  # fmt: skip
    shared = moe.n_shared_experts * moe.moe_intermediate_size if moe else model.intermediate_size
    metadata = granite.metadata(model) | {
        "rope_scaling_finetuned": rotates, "rope_dimension_count": model.head_dim, "expert_shared_feed_forward_length": shared,
    } | (common.softmax_experts_metadata(model) if moe else {"expert_count": 0, "expert_used_count": 0})  # fmt: skip
    # the converter turns queries and keys without positions too, which changes no score
    return mamba2.gguf(model, "granitehybrid", metadata, further, interleaved_rope=True)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    size, shared = values["feed_forward_length"], values["expert_shared_feed_forward_length"]
    found = _factors(granite.factors_from_gguf(values)) | mamba2.from_gguf(values)
    found |= _feed_forward(values.get("expert_count", 0), values.get("expert_used_count", 0), size, shared)
    return found if values.get("rope.scaling.finetuned", True) else found | {"rope": {"partial_rotary_factor": 0}}


FAMILY = Family(
    name="GraniteMoeHybridForCausalLM", model_type="granitemoehybrid",
    about="hybrid: Mamba-2 and attention, often without positions, constant factors, dense or experts (softmax gates) with shared ones; "
    "heads x head_dim is the width; with attention alone it is read, and written as `GraniteForCausalLM`",
    names=_NAMES, stacked=_STACKED, stacked_rows=True, zero=("layers.{i}.ffn.router.bias",),
    defaults=common.DEFAULTS | {
        "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": Null(int), "head_dim": Extra(int),
        "max_position_embeddings": 2048, "attention_bias": False, **dict.fromkeys(granite.KEYS, 1.0),
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "position_embedding_type": Null(str),
        "layer_types": Null(list), "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": Null(int, "auto"),
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "time_step_limit": Null(list, (0.0, math.inf)),
    },
    aliases={"layers_block_type": "layer_types"},
    fixed={"mamba_proj_bias": (False,), "attention_bias": (False,)}, ignored=("normalization_function", "init_method"),
    requires=frozenset({"Mamba-2"}),
    allows=frozenset({"constant factors", "experts", "shared experts", "softmax gates", "no RoPE"}),
    differs=_differs, to_config=_to_config, omits=("head_dim",), from_config=_from_config,
    architectures=("granitehybrid",), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="Mamba-2 not twice as wide, without a bias of its convolution or without attention in any layer",
)  # fmt: skip
