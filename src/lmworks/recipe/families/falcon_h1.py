"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in every layer, and constant factors on activations."""

from __future__ import annotations

import math
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common, mamba2
from lmworks.recipe.families.family import Extra, Family, Gguf, Names, NoClass, Null
from lmworks.recipe.schema.mixers import Multipliers
from lmworks.recipe.schema.model import Model, Rope

_PLACES = {
    "lm_head_multiplier": "logits", "embedding_multiplier": "embedding", "key_multiplier": "key",
    "attention_out_multiplier": "attention_out", "attention_in_multiplier": "attention_in", "ssm_in_multiplier": "mamba_in",
    "ssm_out_multiplier": "mamba_out",
}  # fmt: skip
_NAMES: Names = (
    ("embedding.weight", "model.embed_tokens.weight"), ("norm.weight", "model.final_layernorm.weight"), ("head.weight", "lm_head.weight"),
    ("layers.{i}.attention_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.ffn_norm.weight", "model.layers.{i}.pre_ff_layernorm.weight"),
    *common.PROJECTIONS,
    *((f"layers.{{i}}.ffn.{part}.weight", f"model.layers.{{i}}.feed_forward.{part}_proj.weight") for part in ("gate", "up", "down")),
    *((f"layers.{{i}}.attention.mamba.{ours}", f"model.layers.{{i}}.mamba.{theirs}") for ours, theirs in mamba2.PARTS),
)  # fmt: skip


def _differs(model: Model) -> str | None:
    assert model.mamba
    if set(model.layer_types) != {"hybrid"}:
        return "only some of its layers have Mamba-2 beside attention (layer_types)"
    known = {*_PLACES.values(), "gate", "ffn_out", "mamba_parts"}
    for name in model.multipliers.changed() if model.multipliers else ():
        if name not in known:
            return f"it has a factor that Falcon-H1 has not (multipliers.{name})"
    if model.mamba.gate_norm != "none" and model.mamba.norm_groups != model.mamba.n_groups:
        return f"its gated norm has {model.mamba.norm_groups} groups and not those of B and C, {model.mamba.n_groups} (mamba.norm_groups)"
    return None


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    mamba, given = model.mamba, model.factors
    assert mamba
    return {
        "mamba_d_ssm": mamba.inner_size, "mamba_n_heads": mamba.num_heads, "mamba_d_head": mamba.head_dim,
        "mamba_n_groups": mamba.n_groups, "mamba_d_state": mamba.state_size, "mamba_d_conv": mamba.conv_kernel, "mamba_expand": 2,
        "mamba_chunk_size": 256, "num_logits_to_keep": 1,
        "time_step_limit": [0.0, math.inf], "mamba_conv_bias": mamba.conv_bias, "mamba_proj_bias": False,
        "projectors_bias": False,
        "mamba_rms_norm": mamba.gate_norm != "none", "mamba_norm_before_gate": mamba.gate_norm != "after_gate",
        **{theirs: getattr(given, ours) for theirs, ours in _PLACES.items()},
        "mlp_multipliers": [given.gate, given.ffn_out], "ssm_multipliers": list(given.mamba_parts),
    }  # fmt: skip


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    heads, groups, inner = config["mamba_n_heads"], config["mamba_n_groups"], config["mamba_d_ssm"]
    inner = config["mamba_expand"] * config["hidden_size"] if inner is None else inner
    if heads <= 0 or inner % heads or config["mamba_d_head"] not in ("auto", inner // heads):
        raise UserError(
            f"config.json has mamba_n_heads {heads} and mamba_d_head {config['mamba_d_head']}, whose product is not the inner width {inner}"
        )
    mamba2.refuse_limits(config["time_step_limit"])
    norm = "none" if not config["mamba_rms_norm"] else "before_gate" if config["mamba_norm_before_gate"] else "after_gate"
    mamba = {
        "num_heads": heads, "head_dim": inner // heads, "n_groups": groups, "state_size": config["mamba_d_state"],
        "conv_kernel": config["mamba_d_conv"], "conv_bias": config["mamba_conv_bias"], "gate_norm": norm,
        "norm_groups": groups if norm != "none" else 1,
    }  # fmt: skip
    gate, down = config["mlp_multipliers"] or (1.0, 1.0)
    given = {ours: config[theirs] for theirs, ours in _PLACES.items()} | {
        "gate": gate, "ffn_out": down, "mamba_parts": tuple(config["ssm_multipliers"] or (1.0,) * 5),
    }  # fmt: skip
    multipliers = Multipliers.model_validate(given)
    return {"layer_types": ("hybrid",), "mamba": mamba, "multipliers": None if multipliers == Multipliers() else multipliers}


def _gguf(_: Model) -> Gguf:
    raise NoClass("lmworks does not write Falcon-H1's state spaces, whose factors llama.cpp expects multiplied into the weights")


FAMILY = Family(
    name="FalconH1ForCausalLM", model_type="falcon_h1", about="hybrid: attention and Mamba-2 side by side, constant factors",
    names=_NAMES,
    defaults=common.DEFAULTS | {
        "vocab_size": 128000, "intermediate_size": 14336, "num_key_value_heads": Null(int, 8), "head_dim": Extra(int),
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "attention_bias": False, "mamba_d_ssm": Null(int, 1024),
        "mamba_n_heads": 128, "mamba_d_head": Null(int, "auto"), "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True, "mamba_norm_before_gate": True, "mamba_rms_norm": False, "time_step_limit": Null(list, (0.0, math.inf)),
        "mamba_chunk_size": 256, "num_logits_to_keep": Null(int, 1), "projectors_bias": False, "mamba_proj_bias": False,
        "mlp_multipliers": Null(list), "ssm_multipliers": Null(list), **dict.fromkeys(_PLACES, 1.0),
    },
    fixed={"mamba_proj_bias": (False,), "projectors_bias": (False,), "attention_bias": (False,)},
    ignored=("mamba_use_mlp", "attn_layer_indices", "layer_types"), aliases={"layers_block_type": "layer_types"},
    requires=frozenset({"Mamba-2 beside attention"}), allows=frozenset({"constant factors"}),
    differs=_differs, to_config=_to_config, from_config=_from_config, gguf=_gguf,
    without_gguf="all: lmworks does not write its state spaces",
)  # fmt: skip
