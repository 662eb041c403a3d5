"""The keys that the types know, and the refusal of any other with the nearest known one."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from lmworks.errors import UserError
from lmworks.recipe.document import Keys
from lmworks.recipe.paths import display, nearest


def node_of(annotation: Any) -> type[BaseModel] | None:
    """The node type inside an annotation such as `Moe | None` or `list[Phase]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, list):
        for part in get_args(annotation):
            node = node_of(part)
            if node:
                return node
    return None


def known_paths(node: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every dotted path below `node`; list items appear as NAME."""
    for key, info in node.model_fields.items():
        yield above + key
        below = node_of(info.annotation)
        if below:
            many = "NAME." if get_origin(info.annotation) is list else ""
            yield from known_paths(below, f"{above}{key}.{many}")


def refuse_unknown(tree: dict[str, Any], root: Any, place: Callable[[Keys], str]) -> None:
    """Raise `UserError` for the first key in `tree` that the types below `root` do not know."""

    def walk(value: Any, node: type[BaseModel], keys: Keys) -> None:
        if isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, node, (*keys, index))
        if not isinstance(value, dict):
            return
        for key, item in value.items():
            if key not in node.model_fields:
                raise UserError(f"{place((*keys, key))}: {_message(tree, root, node, keys, key)}")
            below = node_of(node.model_fields[key].annotation)
            if below:
                walk(item, below, (*keys, key))
            elif isinstance(item, dict) and get_origin(node.model_fields[key].annotation) is not dict:
                inner = (*keys, key, *list(item)[:1])
                raise UserError(f"{place(inner)}: {display(tree, (*keys, key))} is a single value; nothing can be set below it")

    walk(tree, root, ())


def _message(tree: Any, root: type[BaseModel], node: type[BaseModel], keys: Keys, key: str) -> str:
    where = display(tree, keys) or "the top"
    close = nearest(key, list(node.model_fields))
    if close:
        return f"{where} has no key {key!r}; did you mean {close!r}?"
    elsewhere = [path for path in known_paths(root) if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"{where} has no key {key!r}; it belongs at {elsewhere[0]}"
    return f"{where} has no key {key!r}; it knows: {', '.join(node.model_fields)}"
