"""Dotted paths through the recipe tree: `train.phases.general.tokens`.

Items of a list are named by their `name` or `step`, else by index.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from lmworks.errors import UserError

Key = str | int
Keys = tuple[Key, ...]


def nearest(word: str, known: list[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    lower = {item.lower(): item for item in known}
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def item_names(items: list[Any]) -> list[str]:
    """What the items of a list are called in a path: their unique `name` (or `step`), else their index."""
    names = [(item.get("name") or item.get("step")) if isinstance(item, dict) else None for item in items]
    return [name if isinstance(name, str) and names.count(name) == 1 else str(index) for index, name in enumerate(names)]


def display(tree: Any, keys: Keys) -> str:
    """`keys` as a dotted path, with list items named."""
    parts = []
    for key in keys:
        if isinstance(key, int) and isinstance(tree, list) and key < len(tree):
            parts.append(item_names(tree)[key])
            tree = tree[key]
        else:
            parts.append(str(key))
            tree = tree.get(key) if isinstance(tree, dict) else None
    return ".".join(parts)


def locate(tree: Any, path: str) -> Keys:
    """Keys of a dotted path in `tree`; the last parts need not exist yet. Raises `UserError` on a list item that is not there."""
    keys: list[Key] = []
    for part in path.split("."):
        if isinstance(tree, list):
            names = item_names(tree)
            if part in names:
                index = names.index(part)
            elif part.isdigit() and int(part) < len(tree):
                index = int(part)
            else:
                raise UserError(f"{path}: there is no item {part!r} here; there are: {', '.join(names) or 'none'}")
            keys.append(index)
            tree = tree[index]
        else:
            keys.append(part)
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tuple(keys)


def put(tree: dict[str, Any], keys: Keys, value: Any) -> None:
    """Set the value at `keys`, making maps on the way."""
    node: Any = tree
    for position, key in enumerate(keys):
        if not isinstance(node, dict) and not (isinstance(node, list) and isinstance(key, int)):
            what = "a list" if isinstance(node, list) else "a single value"
            raise UserError(f"{display(tree, keys[:position])} is {what}; nothing can be set below it")
        if position < len(keys) - 1:
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
            node = node[key]
    last: Any = keys[-1]
    node[last] = value


def get(tree: Any, keys: Keys) -> Any:
    """The value at `keys`, or None where there is none."""
    for key in keys:
        if isinstance(tree, dict):
            tree = tree.get(key)
        elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def leaves(tree: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Every value that is not a non-empty map, or a list of maps, with its keys."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*keys, key))
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for index, value in enumerate(tree):
            yield from leaves(value, (*keys, index))
    else:
        yield keys, tree


def flatten(tree: Any) -> dict[str, Any]:
    """Dotted path to value for every leaf."""
    return {display(tree, keys): value for keys, value in leaves(tree)}


def merge(upper: Any, lower: Any) -> Any:
    """Maps merge key by key; anything else of the upper replaces the lower."""
    if isinstance(upper, dict) and isinstance(lower, dict):
        return {**lower, **{key: merge(value, lower[key]) if key in lower else value for key, value in upper.items()}}
    return upper
