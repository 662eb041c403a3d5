"""A resolved recipe for reading: every value, and where it came from."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text
from rich.tree import Tree

from lmworks.recipe.derivation.positions import positions, warnings
from lmworks.recipe.loading.load import Origin, Resolved
from lmworks.recipe.tree.fingerprint import as_tree
from lmworks.recipe.tree.paths import Keys, display, item_names

_STYLES = {"default": "dim", "preset": "magenta", "recipe": "cyan", "override": "yellow", "derived": "green"}


def tree(resolved: Resolved, changed_only: bool = False) -> Tree:
    """The recipe as a tree of `key: value  origin` lines; `changed_only` leaves the defaults out."""
    values = as_tree(resolved.recipe)
    root = Tree(Text(f"{resolved.path}  fingerprint {resolved.fingerprint[:12]}", style="bold"), guide_style="dim")
    _grow(root, values, values, (), resolved.origins, changed_only)
    return root


def phases(resolved: Resolved) -> Text:
    """The positions of each phase, and what is unwise about them."""
    found = positions(resolved.recipe)
    lines = [f"positions of {here.phase} ({here.length:,} tokens): {here.text}" for here in found]
    warned = [(f"\nwarning: {line}", "yellow") for line in warnings(resolved.recipe)]
    return Text.assemble("\n".join(lines), *warned)


def _grow(branch: Tree, whole: Any, value: Any, keys: Keys, origins: dict[str, Origin], changed_only: bool) -> None:
    many = isinstance(value, list)
    entries = (
        list(zip(item_names(value), range(len(value)), value, strict=True)) if many else [(key, key, item) for key, item in value.items()]
    )
    for label, key, item in entries:
        below = (*keys, key)
        path = display(whole, below)
        origin = origins.get(path)
        if origin is None:
            inside = Tree(Text(str(label), style="bold"), guide_style="dim")
            _grow(inside, whole, item, below, origins, changed_only)
            if inside.children:
                branch.children.append(inside)
        elif not (changed_only and origin.kind == "default"):
            branch.add(Text.assemble(f"{label}: ", (_plain(item), "bold"), "  ", (str(origin), _STYLES[origin.kind])))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(resolved: Resolved) -> dict[str, Any]:
    """The same for machines: the recipe, the origin of each leaf by path, positions and warnings, the fingerprint and the file."""
    return {
        "path": str(resolved.path),
        "fingerprint": resolved.fingerprint,
        "recipe": as_tree(resolved.recipe),
        "positions": {here.phase: here.text for here in positions(resolved.recipe)},
        "warnings": list(warnings(resolved.recipe)),
        "origins": {path: str(origin) for path, origin in resolved.origins.items()},
    }
