"""Keys of the recipe: dotted paths through the tree such as `train.phases.general.tokens`, and the keys that the types know.

Items of a list are named by their `name` or `step`, else by index. A key that the types do not know is refused with the one to use: the
name that it has now, ours for that of another tool (`lmworks.recipe.names`), or the nearest known one.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from lmworks.errors import UserError
from lmworks.recipe.names import FOREIGN, FORMER, MOVED, REMOVED
from lmworks.recipe.schema.base import Node

Key = str | int
Keys = tuple[Key, ...]


def nearest(word: str, known: list[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    lower = {item.lower(): item for item in known}
    found = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def nearest_or_all(name: str, known: Sequence[str]) -> str:
    """The end of a message about a name that is not among few known ones: the nearest of them, or all."""
    close = nearest(name, list(known))
    return f"did you mean {close}?" if close else f"take one of {', '.join(known)}"


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


def sections(root: type[Node], path: str = "") -> Iterator[tuple[type[Node], str]]:
    """Every node below `root` and itself, with its dotted path; list items appear as NAME."""
    yield root, path
    for key, field in root.model_fields.items():
        for below in nodes_of(field.annotation):
            many = f".{tag_of(below) or 'NAME'}" if get_origin(field.annotation) is list else ""
            yield from sections(below, f"{path}.{key}{many}".lstrip("."))


def known_paths(node: type[Node], above: str = "") -> Iterator[str]:
    """Every dotted path below `node`; list items appear as NAME."""
    for key, info in node.model_fields.items():
        yield above + key
        for below in nodes_of(info.annotation):
            many = f"{tag_of(below) or 'NAME'}." if get_origin(info.annotation) is list else ""
            yield from known_paths(below, f"{above}{key}.{many}")


def refuse_unknown(tree: dict[str, Any], root: Any, place: Callable[[Keys], str]) -> None:
    """Raise `UserError` for the keys in `tree` that had these names before, else for the first key that the types below `root` do not know,
    and for the first section of it that is no map, or no list of maps, as they have it: what works on the tree before its values are
    checked may rely on that."""
    if former := [f"{place(keys)}: {message}" for keys, message in _former(tree, tree, root, ())]:
        raise UserError(*former)

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
        other = any(node.text_form is not None for node in nodes_of(annotation))
        for index, item in enumerate(value) if many else [(None, value)]:
            if not isinstance(item, dict) and not (other and isinstance(item, str)):
                where = keys if index is None else (*keys, index)
                raise UserError(f"{place(where)}: {display(tree, where)} is a map of keys, not {_short(item)}")

    walk(tree, root, ())


def _short(value: Any) -> str:
    return "nothing" if value is None else "a list" if isinstance(value, list) else repr(value)[:100]


def _former(tree: Any, value: Any, annotation: Any, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """The former keys in the `value` at `keys`, each with what is said of it."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _former(tree, item, annotation, (*keys, index))
    node = node_for(annotation, value)
    if not isinstance(value, dict) or node is None:
        return
    where, section = display(tree, keys) or "the top", node.__name__
    for key, item in value.items():
        if key in node.model_fields:
            yield from _former(tree, item, node.model_fields[key].annotation, (*keys, key))
        elif new := FORMER.get(section, {}).get(key):
            yield (*keys, key), f"{where} has no key {key!r} any more; it is called {new!r} now"
        elif new := MOVED.get(section, {}).get(key):
            yield (*keys, key), f"{where} has no key {key!r} any more; set {new} at the top of the recipe instead"
        elif advice := REMOVED.get(section, {}).get(key):
            yield (*keys, key), f"{where} has no key {key!r} any more; {advice}"


_MOST_NAMED = 4


def of_another_tool(where: str, key: str) -> tuple[list[str], list[str]]:
    """The keys that stand for one of another tool, of several those nearest to `where` it is written, and at most one note on them. Both
    are empty for a key that no tool is known to have."""
    found = list(dict.fromkeys(ours[word] for ours in FOREIGN.values() if (word := key.replace("-", "_").lower()) in ours))
    paths = [(path, one) for one in found for path in one.keys]
    shared = {path: _shared(path, where) for path, _ in paths}
    nearest = [(path, one) for path, one in paths if shared[path] == max(shared.values())]
    named = list(dict.fromkeys(_at(path, where) for path, _ in nearest))[:_MOST_NAMED]
    return named, list(dict.fromkeys(one.note for one in ([one for _, one in nearest] or found) if one.note))[:1]


def advice(named: Sequence[str], notes: Sequence[str]) -> str:
    """What `of_another_tool` has found in words; empty if that is nothing."""
    return "; ".join([*(["use " + " or ".join(named)] if named else []), *notes])


def _shared(path: str, where: str) -> int:
    """How many parts of `where` are those that `path` begins with; NAME is the name of any item."""
    parts = zip(path.split("."), where.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] in (pair[1], "NAME"), parts))


def _at(path: str, where: str) -> str:
    """`path` with the names of the items that `where` it is written has."""
    shared = _shared(path, where)
    return ".".join([*where.split(".")[:shared], *path.split(".")[shared:]])


def _message(tree: Any, root: type[Node], node: type[Node], keys: Keys, key: str) -> str:
    where = display(tree, keys) or "the top"
    if instead := advice(*of_another_tool(where, key)):
        return f"{where} has no key {key!r}; {instead}"
    close = nearest(key, list(node.model_fields))
    if close:
        return f"{where} has no key {key!r}; did you mean {close!r}?"
    elsewhere = [path for path in known_paths(root) if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"{where} has no key {key!r}; it belongs at {elsewhere[0]}"
    return f"{where} has no key {key!r}; it knows: {', '.join(node.model_fields)}"
