"""RoPE in config.json: `rope_parameters`, its older name `rope_scaling`, and the keys beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families.family import Family, of_kind, said
from lmworks.recipe.schema.model import Model, Rope

_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned")
"""Keys within `rope_parameters` that every type may have. The length before the extension is read by some types; `finetuned`, of older
YaRN models, says how they were made."""

_OF_TYPE: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}  # fmt: skip
_SAME = 1e-6  # relative; an attention factor enters the scores squared, and logits are compared to 1e-5


def rope_parameters(family: Family, model: Model, rope: Rope) -> dict[str, Any]:
    """`rope_parameters` of config.json."""
    theta = rope.theta
    if rope.scaling == "ntk":  # expressed as a larger base
        rotated = model.mla.qk_rope_head_dim if model.mla else int((model.head_dim or 0) * rope.partial_rotary_factor)
        theta = rope.theta * rope.factor ** (rotated / (rotated - 2))
    parameters: dict[str, Any] = {"rope_type": "default" if rope.scaling in ("none", "ntk") else rope.scaling, "rope_theta": theta}
    if family.has("partial RoPE"):
        parameters["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.scaling in ("linear", "yarn", "llama3"):
        parameters["factor"] = rope.factor
    if rope.scaling in ("yarn", "llama3"):
        assert rope.original_max_position_embeddings is not None
        parameters["original_max_position_embeddings"] = int(rope.original_max_position_embeddings)
    if rope.scaling == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if not rope.truncate:
            parameters["truncate"] = False
        if model.mla is not None:
            parameters |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # scales the whole attention score
    if rope.scaling == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return parameters


_OF_LAYERS = ("full_attention", "sliding_attention")


def read_ropes(family: Family, config: Mapping[str, Any], context: int) -> dict[str, Rope]:
    """`rope` and `sliding_rope` of a class that has a RoPE for each kind of layer: within `rope_parameters` by the kind, or, as older
    configs have it, at the top, where `rope_local_base_freq` is the base of the sliding layers and `rope_scaling` is of the others.
    """
    given = of_kind("rope_parameters", config.get("rope_parameters") or {}, dict)
    if foreign := [key for key in given if key not in _OF_LAYERS]:
        other = said(f"rope_parameters.{foreign[0]}", given[foreign[0]])
        raise UserError(f"config.json has {other}; those of {family.name} are within {' and '.join(_OF_LAYERS)}")
    full, sliding = (of_kind(f"rope_parameters.{kind}", given.get(kind) or {}, dict) for kind in _OF_LAYERS)
    if full and config.get("rope_scaling"):
        raise UserError("config.json has rope_scaling and rope_parameters.full_attention, two names of the same; keep one")
    top = {key: config[key] for key in _OF_ALL if key in config}
    scaling = {"rope_scaling": config["rope_scaling"]} if config.get("rope_scaling") else {"rope_parameters": full}
    local = {"rope_theta": config["rope_local_base_freq"]} if "rope_local_base_freq" in config else {}
    assert family.sliding_rope_theta is not None
    return {
        "rope": read_rope(family, top | scaling, context),
        "sliding_rope": read_rope(replace(family, rope_theta=family.sliding_rope_theta), {"rope_parameters": sliding} | local, context),
    }


def read_rope(family: Family, config: Mapping[str, Any], context: int) -> Rope:
    """The RoPE of a config.json whose model states `context` tokens. Raises `UserError` for what lmworks does not compute."""
    name, given = _object(config)
    if family.rope_without and not given and config.get("rope_parameters") is None:
        given = dict(family.rope_without)
    kind = _type(name, given, family.rope_types or tuple(sorted(_OF_TYPE)))
    for key, value in given.items():
        if isinstance(value, dict):
            raise UserError(f"config.json has {name} with an object {key}; lmworks supports one RoPE for all layers")
        if key not in (*_OF_ALL, *_OF_TYPE[kind], *family.rope_ignored) and value is not None:
            raise UserError(f"config.json has {said(f'{name}.{key}', value)}, which is no key of rope_type {kind}; remove it")
    if "rotary_dim" in family.defaults and config.get("rotary_dim") is not None:  # the older form of the fraction
        head_dim = config.get("head_dim", family.defaults["head_dim"])
        config = {"partial_rotary_factor": config["rotary_dim"] / head_dim} | dict(config)
    theta = _either(config, name, given, "rope_theta", family.rope_theta)
    fraction = _either(config, name, given, "partial_rotary_factor", family.partial_rotary_factor)
    if fraction != 1 and not family.has("partial RoPE"):
        raise UserError(f"config.json has partial_rotary_factor {fraction:g}, but {family.name} has no such option; lmworks cannot read it")
    if kind == "default":
        return Rope(theta=theta, partial_rotary_factor=fraction)
    if kind == "linear":
        return Rope(theta=theta, partial_rotary_factor=fraction, scaling=kind, factor=_number(name, given, "factor"))
    original = _either(config, name, given, "original_max_position_embeddings", context, int)
    relative = kind == "yarn" and "factor" in given and given["factor"] is None
    factor = context / original if relative else _number(name, given, "factor")
    values: dict[str, Any] = {
        "theta": theta, "partial_rotary_factor": fraction, "scaling": kind, "factor": factor,
        "original_max_position_embeddings": f"{original} tokens",
    }  # fmt: skip
    if kind == "llama3":
        return Rope(**values, **{key: _number(name, given, key) for key in ("low_freq_factor", "high_freq_factor")})
    _refuse_other_yarn(family, name, given, factor, theta)
    truncate = of_kind(f"{name}.truncate", given.get("truncate", True), bool)
    ends = {key: _positive(name, given, key, default) for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    return Rope(**values, **ends, truncate=truncate)


def _object(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """`rope_parameters` or its older name `rope_scaling`, with the name that is there; an empty object is none."""
    found = {name: of_kind(name, config[name], dict) for name in ("rope_scaling", "rope_parameters") if config.get(name)}
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        raise UserError("config.json has rope_scaling and rope_parameters, two names of the same, and they differ; keep one")
    return next(iter(found.items()), ("rope_parameters", {}))


def _type(name: str, given: Mapping[str, Any], known: tuple[str, ...]) -> str:
    kinds = [given[key] for key in ("rope_type", "type") if key in given]
    if kinds[1:] and kinds[0] != kinds[1]:
        raise UserError(f"config.json has {said(f'{name}.rope_type', kinds[0])} and {said('type', kinds[1])}; keep one")
    kind = kinds[0] if kinds else "default"
    if not isinstance(kind, str) or kind not in known:
        raise UserError(f"config.json has rope_type {kind}; lmworks supports {', '.join(known)}")
    return kind


def _either(config: Mapping[str, Any], name: str, given: Mapping[str, Any], key: str, default: float, kind: type = float) -> Any:
    """A number that may lie within the object or beside it."""
    places = [(path, holder[key]) for path, holder in ((f"{name}.{key}", given), (key, config)) if key in holder]
    values = [of_kind(path, value, kind) for path, value in places]
    if values[1:] and values[0] != values[1]:
        raise UserError(f"config.json has {said(*places[0])} and {said(*places[1])}, which differ; keep one")
    value = values[0] if values else default
    if value < 0 or (value == 0 and key != "partial_rotary_factor"):
        raise UserError(f"config.json has {said(key, value)}, which must be positive")
    return value


def _number(name: str, given: Mapping[str, Any], key: str) -> float:
    if key not in given:
        raise UserError(f"config.json has no {name}.{key}, which its rope_type needs")
    value: float = of_kind(f"{name}.{key}", given[key], float)
    return value


def _positive(name: str, given: Mapping[str, Any], key: str, default: float) -> float:
    value = of_kind(f"{name}.{key}", given[key], float) if given.get(key) else default  # transformers takes 0 for the default
    if value <= 0:
        raise UserError(f"config.json has {said(f'{name}.{key}', value)}, which must be positive")
    return float(value)


def _refuse_other_yarn(family: Family, name: str, given: Mapping[str, Any], factor: float, theta: float) -> None:
    """Raise `UserError` for YaRN with another factor of the scores than ours: 0.1 ln(factor) + 1 on cos and sin, and with latent attention
    its square on the whole score.
    """
    scales = [of_kind(f"{name}.{key}", given[key], float) if given.get(key) else 0.0 for key in ("mscale", "mscale_all_dim")]
    if family.has("MLA") and scales != [1, 1]:
        raise UserError("config.json has YaRN with mscale or mscale_all_dim other than 1; lmworks supports only 1, as in DeepSeek-V3")
    derived = _log_scale(factor, scales[0]) / _log_scale(factor, scales[1]) if all(scales) else _log_scale(factor)
    found = given.get("attention_factor")
    found = derived if found is None else of_kind(f"{name}.attention_factor", found, float)
    ours = 1.0 if family.has("MLA") else _log_scale(factor)
    if not math.isclose(found, ours, rel_tol=_SAME):
        key = "attention_factor" if given.get("attention_factor") is not None else "mscale"
        raise UserError(
            f"config.json has {said(f'{name}.{key}', given[key])}, which scales cos and sin by {found:.6g}; lmworks supports only "
            f"{ours:.6g}, which follows from the factor {factor:g}"
        )
    if theta <= 1:
        raise UserError(f"config.json has rope_theta {theta:g}, which YaRN needs to be more than 1")


def _log_scale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
