"""Finds all families: the modules of this package with a `FAMILY`."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe import families
from lmworks.recipe.families.family import TRAITS, Family, NoClass
from lmworks.recipe.families.keys import said
from lmworks.recipe.schema.model import Model


def _found() -> dict[str, Family]:
    modules = (import_module(f"{families.__name__}.{module.name}") for module in pkgutil.iter_modules(families.__path__))
    found = [module.FAMILY for module in modules if hasattr(module, "FAMILY")]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


FAMILIES = _found()


def family_of(model: Model) -> Family:
    """The family that expresses this model, the simplest one if there are several. Raises `NoClass` with the reason if there is none."""
    reasons = {name: family.why_not(model) for name, family in FAMILIES.items()}
    traits = {name for name, trait in TRAITS.items() if trait.found(model)}
    nearest = min(FAMILIES, key=lambda name: (len(reasons[name]), -len(FAMILIES[name].requires & traits), len(FAMILIES[name].allows)))
    if reasons[nearest]:
        raise NoClass(f"{' and '.join(reasons[nearest])}, unlike the nearest class, {nearest}")
    return FAMILIES[nearest]


def family_in(config: dict[str, Any]) -> Family:
    """The family that a config.json names: by its class, and without one by its model_type. Raises `UserError` if it is none of ours, or if
    the two name different ones: `transformers` goes by model_type, other programs by the class."""
    names, kind = config.get("architectures"), config.get("model_type")
    known = {family.model_type: family.name for family in FAMILIES.values()}
    if names in (None, []) and isinstance(kind, str):
        names = [known.get(kind, f"unknown (model_type {kind})")]
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"config.json is of class {name}; lmworks supports {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if kind not in (None, family.model_type, *family.model_types):
        raise UserError(f"config.json is of class {name}, but of {said('model_type', kind)}; that of the class is {family.model_type}")
    return family


def table() -> str:
    """The families as Markdown, for docs/serving.md."""
    lines = ["| model | in `transformers` | always | possibly | in llama.cpp | not in llama.cpp |", "|---|---|---|---|---|---|"]
    for family in FAMILIES.values():
        always, possibly = (", ".join(sorted(traits, key=str.lower)) for traits in (family.requires, family.allows))
        known = ", ".join(f"`{name}`" for name in family.architectures)
        lines.append(f"| {family.about} | `{family.name}` | {always} | {possibly} | {known} | {family.without_gguf} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
