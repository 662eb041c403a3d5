"""Granite 3 and 4, dense: Llama with constant factors on embeddings, scores, both updates of the residual stream, and logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.families import common
from lmworks.recipe.families.family import Extra, Family, Gguf, Null, said
from lmworks.recipe.families.olmo2 import heads_are_the_width
from lmworks.recipe.schema.mixers import Multipliers
from lmworks.recipe.schema.model import Model, Rope

KEYS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_FACTORS = ("embedding", "key", "attention_out", "ffn_out", "logits")


def _rounded(value: float) -> float:
    """Without the last bits of a quotient. The export is compared in fp64 to some 1e-13: fewer digits would be a difference."""
    return float(f"{value:.14g}")


def _shortest(value: float, back: Callable[[float], float]) -> float:
    """The number with the fewest digits that is read as the same factor."""
    return next((one for digits in range(1, 17) if _rounded(back(one := float(f"{value:.{digits}g}"))) == _rounded(back(value))), value)


def _differs(model: Model) -> str | None:
    given = model.factors
    for name in given.changed():
        if name not in _FACTORS:
            return f"it has a factor that Granite has not (multipliers.{name})"
    if given.attention_out != given.ffn_out:
        return "attention and feed-forward have different factors on what they add (multipliers.attention_out, multipliers.ffn_out)"
    return heads_are_the_width(model)


def numbers(model: Model) -> tuple[float, float, float, float]:
    """The values of `KEYS`: scores are multiplied by one of them, and not divided by the root of head_dim, which ours are too."""
    given, root = model.factors, (model.head_dim or 1) ** 0.5
    scale, logits = _shortest(given.key / root, lambda one: one * root), _shortest(1 / given.logits, lambda one: 1 / one)
    return given.embedding, scale, given.attention_out, logits


def _to_config(model: Model, _: Rope) -> dict[str, Any]:
    return dict(zip(KEYS, numbers(model), strict=True))


def factors_of(embedding: float, scale: float, residual: float, logits: float, head_dim: int) -> dict[str, Any]:
    """`multipliers`, from the four numbers of a class or of a GGUF file."""
    given = Multipliers(
        embedding=embedding, key=_rounded(scale * head_dim**0.5), attention_out=residual, ffn_out=residual, logits=_rounded(1 / logits)
    )
    return {"multipliers": None if given == Multipliers() else given}


def factors_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """`multipliers` from the values of `KEYS`. Raises `UserError` for one that is not positive."""
    head_dim = config["hidden_size"] // config["num_attention_heads"] if config["head_dim"] is None else config["head_dim"]
    for key in KEYS:
        if config[key] <= 0:
            raise UserError(f"config.json has {said(key, config[key])}, which must be positive")
    embedding, scale, residual, logits = (config[key] for key in KEYS)
    return factors_of(embedding, scale, residual, logits, head_dim)


def metadata(model: Model) -> dict[str, Any]:
    """The factors in llama.cpp."""
    return dict(zip(("embedding_scale", "scale", "residual_scale", "logit_scale"), numbers(model), strict=True))


def _gguf(model: Model) -> Gguf:
    return common.gguf(model, "granite", interleaved_rope=True, metadata=metadata(model))


def factors_from_gguf(values: Mapping[str, Any]) -> dict[str, Any]:
    """`multipliers` from the metadata of a GGUF file."""
    names = ("embedding_scale", "attention.scale", "residual_scale", "logit_scale")
    head_dim = values.get("attention.key_length", values["embedding_length"] // values["attention.head_count"])
    embedding, scale, residual, logits = (float(values[name]) for name in names)
    return factors_of(embedding, scale, residual, logits, head_dim)


FAMILY = Family(
    name="GraniteForCausalLM", model_type="granite", about="dense, plain, constant factors; heads x head_dim is the width",
    names=common.LLAMA,
    defaults=common.DEFAULTS | {
        "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": Null(int), "head_dim": Extra(int),
        "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, **dict.fromkeys(KEYS, 1.0),
    },
    requires=frozenset({"constant factors"}), differs=_differs, to_config=_to_config, omits=("head_dim",),
    from_config=factors_from_config, architectures=("granite",), gguf=_gguf, from_gguf=factors_from_gguf, without_gguf="llama3 RoPE",
)  # fmt: skip
