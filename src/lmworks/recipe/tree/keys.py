"""The keys that the types know, and the refusal of any other with the nearest known one."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lmworks.errors import UserError
from lmworks.recipe.schema.base import Node
from lmworks.recipe.tree.paths import Keys, display, nearest


def nodes_of(annotation: Any) -> list[type[Node]]:
    """The node types inside an annotation such as `Moe | None` or `list[Phase]`; several where one key tells them apart."""
    if isinstance(annotation, type) and issubclass(annotation, Node):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, types.UnionType, list, tuple):
        return [node for part in get_args(annotation) for node in nodes_of(part)]
    return []


def tag_of(node: type[Node]) -> str | None:
    """The value of `step` that stands for this node, if it is one of several."""
    field = node.model_fields.get("step")
    return get_args(field.annotation)[0] if field is not None and get_origin(field.annotation) is Literal else None


def node_for(annotation: Any, value: Any) -> type[Node] | None:
    """The node type that `value` is meant to be; None if there is none, or its `step` is unknown (which validation then says)."""
    nodes = nodes_of(annotation)
    if len(nodes) < 2:
        return nodes[0] if nodes else None
    tag = value.get("step") if isinstance(value, dict) else None
    return next((node for node in nodes if tag_of(node) == tag), None)


def known_paths(node: type[Node], above: str = "") -> Iterator[str]:
    """Every dotted path below `node`; list items appear as NAME."""
    for key, info in node.model_fields.items():
        yield above + key
        for below in nodes_of(info.annotation):
            many = f"{tag_of(below) or 'NAME'}." if get_origin(info.annotation) is list else ""
            yield from known_paths(below, f"{above}{key}.{many}")


def refuse_unknown(tree: dict[str, Any], root: Any, place: Callable[[Keys], str]) -> None:
    """Raise `UserError` for the first key in `tree` that the types below `root` do not know, and for the first section of it that is no
    map, or no list of maps, as they have it: what works on the tree before its values are checked may rely on that."""

    def walk(value: Any, annotation: Any, keys: Keys) -> None:
        if isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, annotation, (*keys, index))
        node = node_for(annotation, value)
        if not isinstance(value, dict) or node is None:
            return
        for key, item in value.items():
            if key not in node.model_fields:
                raise UserError(f"{place((*keys, key))}: {_message(tree, root, node, keys, key)}")
            below = node.model_fields[key].annotation
            if nodes_of(below):
                check_form(item, below, (*keys, key))
                walk(item, below, (*keys, key))
            elif isinstance(item, dict) and get_origin(below) is not dict:
                inner = (*keys, key, *list(item)[:1])
                raise UserError(f"{place(inner)}: {display(tree, (*keys, key))} is a single value; nothing can be set below it")

    def check_form(value: Any, annotation: Any, keys: Keys) -> None:
        if value is None and type(None) in get_args(annotation):
            return
        many = get_origin(annotation) in (list, tuple)
        if many and not isinstance(value, list):
            raise UserError(f"{place(keys)}: {display(tree, keys)} is a list of maps, one below the other with a dash each")
        other = any(takes_other_forms(node) for node in nodes_of(annotation))
        for index, item in enumerate(value) if many else [(None, value)]:
            if not isinstance(item, dict) and not (other and isinstance(item, str)):
                where = keys if index is None else (*keys, index)
                raise UserError(f"{place(where)}: {display(tree, where)} is a map of keys, not {_short(item)}")

    walk(tree, root, ())


def takes_other_forms(node: type[Node]) -> bool:
    """Whether a text may stand for the map of a node: then it has a validator of its own that spells it out."""
    validators = node.__pydantic_decorators__.model_validators
    return sum(one.info.mode == "before" for one in validators.values()) > 1


def _short(value: Any) -> str:
    return "nothing" if value is None else "a list" if isinstance(value, list) else repr(value)[:100]


def _message(tree: Any, root: type[Node], node: type[Node], keys: Keys, key: str) -> str:
    where = display(tree, keys) or "the top"
    if new := node.renamed.get(key):
        return f"{where} has no key {key!r} any more; it is called {new!r} now"
    if new := node.moved.get(key):
        return f"{where} has no key {key!r} any more; set {new} at the top of the recipe instead"
    if advice := node.removed.get(key):
        return f"{where} has no key {key!r} any more; {advice}"
    close = nearest(key, list(node.model_fields))
    if close:
        return f"{where} has no key {key!r}; did you mean {close!r}?"
    elsewhere = [path for path in known_paths(root) if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"{where} has no key {key!r}; it belongs at {elsewhere[0]}"
    return f"{where} has no key {key!r}; it knows: {', '.join(node.model_fields)}"
