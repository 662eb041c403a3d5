"""Changes to a written config.json: those that mean the same, and those of which nobody knows what they mean.

`same` changes only how a config is written. `other` changes what it says: keys are left out, null, of another kind, unknown, or within
other objects. What `transformers` makes of the result is what lmworks must make of it, unless it refuses it.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

from lmworks.recipe.families.family import Family

_HARMLESS: dict[str, Any] = {
    "_name_or_path": "somewhere/else", "torch_dtype": "float32", "use_cache": False, "top_k": 20, "unsloth_version": "2025.1",
    "pretraining_tp": 2, "sep_token_id": 3, "attn_implementation": "eager", "is_llama_config": True, "transformers.js_config": {"a": 1},
    "auto_map": {}, "output_router_logits": False, "unheard_of": None, "temperature": 0.6,
}  # fmt: skip
_UNKNOWN: dict[str, Any] = {
    "text_config": {"hidden_size": 64}, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "use_rope": False,
    "residual_multiplier": 0.2, "per_layer_config": {"0": {"rms_norm_eps": 1.0}}, "qk_layernorm": True, "head_bias": True,
    "rotary_pct": 0.5, "attention_multiplier": 0.1, "layer_types_per_block": [1, 0], "norm_eps": 0.1, "rope_type": "linear",
    "clip_qkv": 1.0, "query_pre_attn_scalar": 12, "partial_rotary_factor": 0.25, "head_dim": 6, "rope_interleaved": True,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "moe_layer_freq": 2, "scoring_func": "softmax",
    "topk_method": "greedy", "original_max_position_embeddings": 24, "use_sliding_window": True, "sliding_window": 3,
    "max_window_layers": 1, "no_rope_layer_interval": 2, "model_type": "mistral", "rope_theta": 300.0, "attention_bias": True,
}  # fmt: skip
_WITHIN_ROPE: dict[str, Any] = {
    "attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 8, "beta_slow": 2.0, "factor": 3,
    "low_freq_factor": 0.7, "high_freq_factor": 3.0, "original_max_position_embeddings": 20, "rope_theta": 700, "rope_type": "longrope",
    "type": "dynamic", "partial_rotary_factor": 0.75, "short_factor": [1.0], "finetuned": True, "max_position_embeddings": 128,
    "full_attention": {"rope_type": "default", "rope_theta": 90.0}, "sliding_attention": {"rope_theta": 50.0},
}  # fmt: skip


def class_defaults(kind: Any) -> dict[str, Any]:
    """The defaults of a config class, by the names that it writes."""
    names = {field.name: kind.attribute_map.get(field.name, field.name) for field in dataclasses.fields(kind)}
    return {names[field.name]: field.default for field in dataclasses.fields(kind) if field.name in names}


def same(config: dict[str, Any], family: Family, kind: Any, draw: random.Random) -> dict[str, Any]:
    """The config, written otherwise: older names, defaults left out, keys that change nothing added."""
    config, defaults = copy.deepcopy(config), class_defaults(kind)
    for key in list(config):
        if key in defaults and config[key] == defaults[key] and type(config[key]) is type(defaults[key]) and draw.random() < 0.7:
            del config[key]
    rope = config.pop("rope_parameters", None)
    if rope is None:
        assert "rope_parameters" in family.omits
    elif family.sliding_rope_theta is None:
        config |= _otherwise(rope, config.get("head_dim", 0), family, kind, draw)
    else:
        config |= _ropes_otherwise(rope, family, draw)
    for alias, name in family.aliases.items():
        if name in config and draw.random() < 0.5:
            config[alias] = config.pop(name)
    if draw.random() < 0.5:
        config["torch_dtype"] = config.pop("dtype", "float32")
    if draw.random() < 0.3:
        config["architectures"] = None
    for key in draw.sample(sorted(_HARMLESS), 3):
        config.setdefault(key, _HARMLESS[key])
    return config


def _otherwise(rope: dict[str, Any], head_dim: int, family: Family, kind: Any, draw: random.Random) -> dict[str, Any]:
    """The keys of one RoPE for all layers."""
    config: dict[str, Any] = {}
    if "rotary_dim" in family.defaults and draw.random() < 0.5:
        config["rotary_dim"] = int(rope["partial_rotary_factor"] * head_dim)
        if draw.random() < 0.5:
            del rope["partial_rotary_factor"]
    if draw.random() < 0.5:
        rope["type"] = rope.pop("rope_type")
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if key in rope and draw.random() < 0.5:
            config[key] = rope.pop(key)
    if rope.get("type", rope.get("rope_type")) == "default" and draw.random() < 0.5:
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope:
                config[key] = rope.pop(key)
        if family.rope_without:  # which a config without any has
            return config | {"rope_parameters": {}}
        return config | {draw.choice(["rope_scaling", "rope_parameters"]): draw.choice([None, {}])}
    if draw.random() < 0.3 and rope.get("rope_theta") == kind.default_theta:
        del rope["rope_theta"]
    return config | {draw.choice(["rope_scaling", "rope_parameters"]): rope}


def _ropes_otherwise(ropes: dict[str, Any], family: Family, draw: random.Random) -> dict[str, Any]:
    """The keys of a RoPE for each kind of layer, as now, or as older configs have them."""
    full, sliding = ropes["full_attention"], ropes["sliding_attention"]
    if "rope_scaling" in family.fixed or draw.random() < 0.3:  # which reads no older keys
        return {"rope_parameters": ropes}
    if "rope_local_base_freq" not in family.defaults:  # what is at the top is of the layers that see everything
        if sliding["rope_theta"] == family.sliding_rope_theta:
            return {"rope_theta": full.pop("rope_theta"), "rope_scaling": full}
        return {"rope_parameters": ropes} if full["rope_type"] != "default" else {
            "rope_theta": full["rope_theta"], "rope_parameters": {"sliding_attention": sliding}}  # fmt: skip
    if full["rope_type"] == "default":
        return {"rope_theta": full["rope_theta"], "rope_local_base_freq": sliding["rope_theta"], "rope_scaling": None}
    return {"rope_theta": full.pop("rope_theta"), "rope_local_base_freq": sliding["rope_theta"], "rope_scaling": full}


def other(config: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The config with one to three changes of what it says."""
    config = copy.deepcopy(config)
    for _ in range(draw.choice([1, 1, 2, 3])):
        where = draw.choice(["omit", "null", "kind", "value", "unknown", "rope", "rope", "rope"])
        held = config.get("rope_parameters") if where == "rope" else config
        if not isinstance(held, dict):
            held = config
        name = draw.choice(sorted(held.keys() - {"architectures", "vocab_size", "id2label", "label2id"}) or ["model_type"])
        if where == "omit":
            held.pop(name, None)
        elif where == "null":
            held[name] = None
        elif where == "kind":
            held[name] = draw.choice([str(held.get(name)), True, [held.get(name)], 1.5, {"a": 1}])
        elif where == "value":
            held[name] = _another(held.get(name), draw)
        elif where == "unknown":
            key = draw.choice(sorted(_UNKNOWN))
            held[key] = _UNKNOWN[key]
        elif draw.random() < 0.3:
            held.pop(name, None)
        else:
            key = draw.choice(sorted(_WITHIN_ROPE))
            held[key] = draw.choice([_WITHIN_ROPE[key], _WITHIN_ROPE[key], None])
    return config


def _another(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return draw.choice([value * 2, value + 1, -value, 0, 1])
    if isinstance(value, list):
        return draw.choice([value[::-1], value[1:], [*value, *value[:1]], []])
    return draw.choice([value, "gelu", "swish", 2])
