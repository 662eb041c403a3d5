"""Nemotron-H: layers of one block, which is Mamba-2, attention without positions, a feed-forward block with a squared ReLU, or experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common, mamba2
from lmworks.recipe.families.family import Defaults, Extra, Family, Gguf, Names, NoClass, Null, said
from lmworks.recipe.schema.model import Model, Rope

_LAYER = "backbone.layers.{i}."
_MIXER = _LAYER + "mixer."
_NAMES: Names = (
    ("embedding.weight", "backbone.embeddings.weight"), ("norm.weight", "backbone.norm_f.weight"), ("head.weight", "lm_head.weight"),
    *((f"layers.{{i}}.{block}_norm.weight", _LAYER + "norm.weight") for block in ("attention", "ffn")),
    *((f"layers.{{i}}.attention.{ours}.weight", f"{_MIXER}{theirs}_proj.weight")
      for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))),
    *mamba2.names(_MIXER),
    *((f"layers.{{i}}.ffn.{block}{part}.weight", f"{_MIXER}{theirs}{part}_proj.weight")
      for block, theirs in (("", ""), ("shared.", "shared_experts.")) for part in ("up", "down")),
    *((f"layers.{{i}}.ffn.experts.{part}", f"{_MIXER}experts.{{e}}.{part}_proj.weight") for part in ("up", "down")),
    ("layers.{i}.ffn.router.weight", _MIXER + "gate.weight"),
    ("layers.{i}.ffn.router.bias", _MIXER + "gate.e_score_correction_bias"),
    ("layers.{i}.ffn.latent_down.weight", _MIXER + "fc1_latent_proj.weight"),
    ("layers.{i}.ffn.latent_up.weight", _MIXER + "fc2_latent_proj.weight"),
)  # fmt: skip
_LETTERS = {"M": mamba2.LINEAR, "*": mamba2.FULL, "-": "mlp", "E": "moe"}
"""Of hybrid_override_pattern."""
_UNUSED: Defaults = {
    "chunk_size": 128, "expand": 2, "hidden_dropout": 0.0, "mamba_ssm_cache_dtype": "float32", "moe_shared_expert_overlap": True,
    "num_logits_to_keep": 1, "num_nextn_predict_layers": 0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "time_step_floor": 1e-4, "time_step_max": 0.1, "use_mamba_kernels": True,
}  # fmt: skip
"""Keys of the class that change no number."""
_NO_LIMIT = 1e-30  # for no smallest time step: transformers takes the logarithm of it, and fp32 has no effect of one that small
_EXPERTS = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size", "routed_scaling_factor", "norm_topk_prob",
    "n_group", "topk_group",
)  # fmt: skip


def _differs(model: Model) -> str | None:
    if model.tie_word_embeddings:
        return "its head is its embedding (tie_word_embeddings)"
    if model.moe is not None and not model.moe.n_shared_experts:
        return "it has experts and no shared one (moe.n_shared_experts)"
    return mamba2.gated_norm_differs(model) if model.mamba is not None else None


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    mamba, moe, letters = model.mamba, model.moe, {kind: letter for letter, kind in _LETTERS.items()}
    kinds = [model.layer_type(layer) for layer in range(model.num_hidden_layers or 0)]
    config: dict[str, Any] = {key: value.default if isinstance(value, Null) else value for key, value in _UNUSED.items()} | {
        "layers_block_type": kinds, "hybrid_override_pattern": "".join(letters[kind] for kind in kinds), "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": model.rms_norm_eps, "use_bias": False,
    }  # fmt: skip
    if mamba is not None:
        config |= {
            "mamba_num_heads": mamba.num_heads, "mamba_head_dim": mamba.head_dim, "n_groups": mamba.n_groups,
            "ssm_state_size": mamba.state_size, "conv_kernel": mamba.conv_kernel, "use_conv_bias": mamba.conv_bias,
            "mamba_proj_bias": False, "mamba_hidden_act": "silu",
            "time_step_min": mamba.min_time_step or _NO_LIMIT, "time_step_limit": [0.0, math.inf],
        }  # fmt: skip
    if moe is not None:  # other programs take a model with these keys for one with experts
        config |= {name: getattr(moe, name) for name in _EXPERTS} | {
            "n_shared_experts": 1, "moe_shared_expert_intermediate_size": moe.n_shared_experts * moe.moe_intermediate_size,
        }  # fmt: skip
    return config


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    """The kinds of all layers."""
    pattern, kinds, layers = config["hybrid_override_pattern"], config["layers_block_type"], config["num_hidden_layers"]
    if pattern is not None:
        found = [_LETTERS.get(letter, letter) for letter in pattern]
    else:
        found = kinds or [mamba2.LINEAR, "moe", mamba2.FULL, "mlp"]
    known = tuple(_LETTERS.values())
    types = mamba2.layer_types(found, len(found) if layers is None else layers, known)
    if pattern is not None and kinds is not None and mamba2.layer_types(kinds, len(types), known) != types:
        raise UserError("config.json has hybrid_override_pattern and layers_block_type, and they differ; keep one")
    if "mlp" not in types and "moe" not in types:
        raise UserError("config.json has no layer of mlp or moe, by which lmworks knows layers of one block; it cannot read that model")
    return types


def _from_config(config: dict[str, Any]) -> dict[str, Any]:
    types = _kinds(config)
    found: dict[str, Any] = {
        "num_hidden_layers": len(types), "layer_types": common.repeating(types), "rms_norm_eps": config["layer_norm_epsilon"],
        "hidden_act": "relu2", "rope": {"partial_rotary_factor": 0},
    }  # fmt: skip
    if mamba2.LINEAR in types:
        smallest = config["time_step_min"]
        found["mamba"] = {
            "num_heads": config["mamba_num_heads"], "head_dim": config["mamba_head_dim"], "n_groups": config["n_groups"],
            "norm_groups": config["n_groups"], "state_size": config["ssm_state_size"], "conv_kernel": config["conv_kernel"],
            "conv_bias": config["use_conv_bias"], "min_time_step": 0.0 if smallest <= _NO_LIMIT else smallest,
        }  # fmt: skip
    if "moe" in types:
        size, shared = config["moe_intermediate_size"], config["moe_shared_expert_intermediate_size"]
        found["moe"] = {name: config[name] for name in _EXPERTS} | _shared(shared, size)
    if "mlp" not in types:  # of no layer, and no GGUF file says it
        found["intermediate_size"] = config["moe_intermediate_size"]
    return found


def _shared(shared: int, size: int) -> dict[str, Any]:
    """Shared experts of `shared` units in all, and no dense layers before them."""
    if size <= 0 or shared <= 0 or shared % size:
        raise UserError(
            f"it has {said('moe_shared_expert_intermediate_size', shared)} must be a multiple of moe_intermediate_size {size} in lmworks"
        )
    return {"n_shared_experts": shared // size, "first_k_dense_replace": 0}


def _gguf(model: Model) -> Gguf:
    mamba, moe, layers = model.mamba, model.moe, model.num_hidden_layers or 0
    if mamba is None:
        raise NoClass("no layer has Mamba-2 (mamba), whose sizes llama.cpp wants to know")
    if mamba.min_time_step:
        raise NoClass(
            f"its time steps have a smallest value (mamba.min_time_step {mamba.min_time_step:g}), which llama.cpp and NVIDIA's code "
            "do not have; train with 0, or set time_step_min of the model that you begin with to 0"
        )
    if moe is not None and "mlp" in model.layer_types:
        raise NoClass("it has dense layers beside those with experts (layer_types), and llama.cpp has one of the two")
    if moe is not None and moe.topk_group < moe.n_group:
        raise NoClass(f"it routes within groups of experts (moe.n_group {moe.n_group}), which llama.cpp does not do for this architecture")
    width = model.intermediate_size if moe is None else moe.moe_intermediate_size
    assert model.hidden_size and model.num_attention_heads
    metadata: dict[str, Any] = {
        "rope_scaling_finetuned": False, "rope_dimension_count": model.hidden_size // model.num_attention_heads,
        "layer_norm_eps": model.rms_norm_eps,
        "feed_forward_length": [0 if model.feed_forward(layer) == "none" else width for layer in range(layers)],
    }  # fmt: skip
    further: Names = (
        ("layers.{i}.ffn_norm.weight", "blk.{i}.attn_norm.weight"),
        *((f"layers.{{i}}.ffn.{part}.weight", f"blk.{{i}}.ffn_{part}.weight") for part in ("up", "down")),
        *((f"layers.{{i}}.ffn.shared.{part}.weight", f"blk.{{i}}.ffn_{part}_shexp.weight") for part in ("up", "down")),
        *((f"layers.{{i}}.ffn.experts.{part}", f"blk.{{i}}.ffn_{part}_exps.weight") for part in ("up", "down")),
        ("layers.{i}.ffn.router.weight", "blk.{i}.ffn_gate_inp.weight"), ("layers.{i}.ffn.router.bias", "blk.{i}.exp_probs_b.bias"),
        *((f"layers.{{i}}.ffn.latent_{part}.weight", f"blk.{{i}}.ffn_latent_{part}.weight") for part in ("down", "up")),
    )  # fmt: skip
    if moe is not None:
        metadata |= {
            "expert_count": moe.n_routed_experts, "expert_used_count": moe.num_experts_per_tok, "expert_shared_count": 1,
            "expert_feed_forward_length": moe.moe_intermediate_size,
            "expert_shared_feed_forward_length": moe.n_shared_experts * moe.moe_intermediate_size,
            "expert_weights_norm": moe.norm_topk_prob, "expert_weights_scale": moe.routed_scaling_factor, "expert_group_count": 1,
            "expert_group_used_count": 1,
        } | ({"moe_latent_size": moe.moe_latent_size} if moe.moe_latent_size else {})  # fmt: skip
    # the converter turns queries and keys, as of Granite, which changes no score of heads without positions
    return mamba2.gguf(model, "nemotron_h" if moe is None else "nemotron_h_moe", metadata, further, interleaved_rope=True)


def _from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    heads, widths = values["attention.head_count_kv"], values["feed_forward_length"]
    if not isinstance(heads, list) or not isinstance(widths, list):
        raise UserError("it has layers of one kind alone, which no Nemotron-H has")
    feeds = "moe" if values.get("expert_count") else "mlp"
    types = [feeds if width else mamba2.FULL if count else mamba2.LINEAR for count, width in zip(heads, widths, strict=True)]
    found = mamba2.from_gguf(values) | {
        "layer_types": common.repeating(types), "hidden_act": "relu2", "rope": {"partial_rotary_factor": 0},
        "intermediate_size": max(widths),
    }  # fmt: skip
    if feeds == "mlp":
        return found
    size = values["expert_feed_forward_length"]
    return found | {"moe": {
        "n_routed_experts": values["expert_count"], "num_experts_per_tok": values["expert_used_count"], "moe_intermediate_size": size,
        "moe_latent_size": values.get("moe_latent_size"), "routed_scaling_factor": values.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(values.get("expert_weights_norm")), **_shared(values["expert_shared_feed_forward_length"], size),
    }}  # fmt: skip


FAMILY = Family(
    name="NemotronHForCausalLM", model_type="nemotron_h",
    about="hybrid of layers of one block: Mamba-2, attention without positions, dense feed-forward or experts (sigmoid gates), with a "
    "squared ReLU",
    names=_NAMES, prefixes={"model.": "backbone."}, modules={"backbone.": "model."}, unread=("mtp.",),
    defaults={key: value for key, value in common.DEFAULTS.items() if key not in ("hidden_act", "rms_norm_eps")} | _UNUSED | {
        "vocab_size": 131072, "num_hidden_layers": Extra(int), "hybrid_override_pattern": Extra(str), "layers_block_type": Null(list),
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504, "max_position_embeddings": 4096,
        "layer_norm_epsilon": 1e-5, "attention_bias": False, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
        "ssm_state_size": 128, "conv_kernel": 4, "use_conv_bias": True, "time_step_min": 0.001,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": Null(int), "routed_scaling_factor": 1.0, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
    },
    fixed={
        "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu", "swish"), "use_bias": (False,), "mamba_proj_bias": (False,),
        "attention_bias": (False,), "tie_word_embeddings": (False,), "sliding_window": (), "n_shared_experts": (1,),
        "time_step_limit": mamba2.NO_LIMIT,
    },
    ignored=("attention_head_dim", "mamba_num_groups", "mamba_state_dim", "norm_eps", "time_step_rank"),
    aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    requires=frozenset({"layers of one block", "squared ReLU", "no RoPE"}),
    allows=frozenset({
        "Mamba-2", "experts", "shared experts", "selection bias", "expert groups", "routed scale", "latent experts", "smallest time step",
    }),
    differs=_differs, to_config=_to_config, omits=("hidden_act", "rms_norm_eps", "rope_parameters"), from_config=_from_config,
    architectures=("nemotron_h", "nemotron_h_moe"), gguf=_gguf, from_gguf=_from_gguf,
    without_gguf="a smallest time step (`time_step_min`), dense layers beside experts, groups of experts, or without Mamba-2 or attention",
)  # fmt: skip
