"""All families: the modules of this package with a `FAMILY`; and config.json of a Hugging Face class, from our model and back.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.recipe import families
from lmworks.recipe.families import common
from lmworks.recipe.families.family import FIXED, TRAITS, Family, NoClass, changes_no_number, of_kind, said
from lmworks.recipe.schema.model import Model, Rope


def _found() -> dict[str, Family]:
    modules = (import_module(f"{families.__name__}.{module.name}") for module in pkgutil.iter_modules(families.__path__))
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


FAMILIES = _found()


_GEMMA_4 = (
    "heads of another size and number in full-attention layers (global_head_dim, num_global_key_value_heads), a norm on values, a factor "
    "for each layer and, in some models, keys and values shared by layers (num_kv_shared_layers) and embeddings for each layer "
    "(hidden_size_per_layer_input)"
)
_ZAMBA_2 = (
    "attention and feed-forward blocks whose weights many layers share (num_mem_blocks), which read the embedded tokens beside the "
    "residual stream and are twice as wide, and low-rank adapters (adapter_rank) and a projection for each use"
)
_BEYOND = {
    **dict.fromkeys(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        (_GEMMA_4, "Gemma3ForCausalLM"),
    ),
    "Zamba2ForCausalLM": (_ZAMBA_2, "NemotronHForCausalLM"),
}  # fmt: skip
"""Classes that cannot be expressed -> what they have and lmworks has not, and the nearest class that it has."""
_BEYOND_BY_TYPE = {
    "gemma4": "Gemma4ForCausalLM", "gemma4_text": "Gemma4ForCausalLM", "zamba2": "Zamba2ForCausalLM",
}  # fmt: skip
"""The same by model_type, for a config.json without a class, and by the architecture in llama.cpp."""


def why_beyond(name: object) -> str | None:
    """What a class or an architecture of llama.cpp has and lmworks has not, and the nearest class; None if that is not known."""
    found = _BEYOND.get(_BEYOND_BY_TYPE.get(name, name)) if isinstance(name, str) else None
    return f"which has {found[0]}; lmworks has none of these. The nearest class is {found[1]}" if found else None


def family_of(model: Model) -> Family:
    """The family that expresses this model, the simplest one if there are several. Raises `NoClass` with the reason if there is none."""
    reasons = {name: family.why_not(model) for name, family in FAMILIES.items() if not family.written_as}
    traits = {name for name, trait in TRAITS.items() if trait.found(model)}

    def distance(name: str) -> tuple[int, bool, int, int]:
        family = FAMILIES[name]
        fits = family.requires <= traits <= family.requires | family.allows  # and at most something that is no trait differs
        return len(reasons[name]), not fits, -len(family.requires & traits), len(family.allows)

    nearest = min(reasons, key=distance)
    if reasons[nearest]:
        raise NoClass(f"{' and '.join(reasons[nearest])}, unlike the nearest class, {nearest}")
    return FAMILIES[nearest]


def family_in(config: dict[str, Any]) -> Family:
    """The family that a config.json names: by its class, and by its model_type without one, or with that of the model without its head, as
    AutoModel of transformers saves it. Raises `UserError` if it is none of ours, or if the two name different ones: `transformers` goes by
    model_type, other programs by the class."""
    config = language_model(config)
    names, kind = config.get("architectures"), config.get("model_type")
    known = {one: family.name for family in FAMILIES.values() for one in (family.model_type, *family.model_types)}
    if isinstance(kind, str) and names in (None, [], [known.get(kind, "").replace("ForCausalLM", "Model")]):
        names = [known.get(kind) or _BEYOND_BY_TYPE.get(kind, f"unknown (model_type {kind})")]
    name = names[0] if isinstance(names, list) and names else None
    if (why := why_beyond(name)) is not None:
        raise UserError(f"config.json is of class {name}, {why}")
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"config.json is of class {name}; lmworks supports {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if kind not in (None, family.model_type, *family.model_types):
        raise UserError(f"config.json is of class {name}, but of {said('model_type', kind)}; that of the class is {family.model_type}")
    return family


_WRAPPER_KEYS = ("text_config", "vision_config", "tie_word_embeddings", "language_model_only")


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model in one of a class that also reads images; any other config as it is.

    Raises `UserError` for keys beside it that may change what the language model computes.
    """
    names, kind = config.get("architectures"), config.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    wrapped = (family for family in FAMILIES.values() if family.wrapper and (name or kind) in family.wrapper)
    if (family := next(wrapped, None)) is None:
        return config
    assert family.wrapper
    text = of_kind("text_config", config.get("text_config"), dict)
    for key, value in config.items():
        known = key in _WRAPPER_KEYS or changes_no_number(key) or value in FIXED.get(key, (None,))
        if not known and value is not None:
            raise UserError(f"config.json has {said(key, value)} beside text_config, which lmworks does not know")
    tied = [one["tie_word_embeddings"] for one in (config, text) if "tie_word_embeddings" in one]
    if len(set(map(str, tied))) == 2:
        raise UserError("config.json has tie_word_embeddings twice, in text_config and beside it, and they differ; keep one")
    if kind not in (None, family.wrapper[1]) or text.get("model_type") not in (None, family.model_type):
        kinds = f"{said('model_type', kind)} and {said('text_config.model_type', text.get('model_type'))}"
        raise UserError(f"config.json has {kinds}; those of the class {family.wrapper[0]} are {family.wrapper[1]} and {family.model_type}")
    return text | {"architectures": [family.name], "model_type": family.model_type} | ({"tie_word_embeddings": tied[0]} if tied else {})


def table() -> str:
    """The families as Markdown, for docs/serving.md."""
    lines = ["| model | in `transformers` | always | possibly | in llama.cpp | not in llama.cpp |", "|---|---|---|---|---|---|"]
    for family in FAMILIES.values():
        always, possibly = (", ".join(sorted(traits, key=str.lower)) for traits in (family.requires, family.allows))
        known = ", ".join(f"`{name}`" for name in family.architectures)
        lines.append(f"| {family.about} | `{family.name}` | {always} | {possibly} | {known} | {family.without_gguf} |")
    return "\n".join(lines)


def class_for(model: Model) -> str:
    """The class whose mathematics is this model's; `NoClass` with the reason if there is none."""
    return family_of(model).name


def to_config(model: Model, rope: Rope, tokens: dict[str, Any]) -> dict[str, Any]:
    """config.json. `rope` is that of the last phase; `tokens` holds eos_token_id and pad_token_id."""
    family = family_of(model)
    return common.to_config(family, model, rope) | tokens | family.to_config(model, rope)


def from_config(config: dict[str, Any]) -> Model:
    """Our model from a config.json of one of the families; `UserError` for what they have and we have not."""
    try:
        config = language_model(config)
        return Model.model_validate(common.from_config(family_in(config), config))
    except UserError:
        raise
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"config.json describes no model that lmworks has: {reason}") from None
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"config.json has a value of the wrong kind ({error}); lmworks cannot read it") from None


if __name__ == "__main__":
    print(table())
