"""What an earlier version of lmworks stored with the recipe keys of its time, read with those of now (`lmworks.recipe.names`).

`python -m lmworks.recipe.former` prints the table of CHANGELOG.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic_core import to_jsonable_python

from lmworks.recipe.document import Document
from lmworks.recipe.keys import Keys, item_names, node_for, sections
from lmworks.recipe.names import CONVERTED, FORMER
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.schema.recipe import Recipe


def translated(tree: Any, root: Any = Recipe) -> Any:
    """A stored recipe, or a node of the class `root`, with the keys of now. Keys that are not known stay as they are."""
    return _translate(tree, root, (), (), {})


def translated_document(document: Document) -> Document:
    """The same for a file, whose lines follow their keys."""
    moved: dict[Keys, Keys] = {}
    tree = _translate(document.tree, Recipe, (), (), moved)

    def now(keys: Keys) -> Keys:
        stop = next((stop for stop in range(len(keys), 0, -1) if keys[:stop] in moved), 0)
        return (*moved.get(keys[:stop], ()), *keys[stop:])

    return replace(document, tree=tree, lines={now(keys): line for keys, line in document.lines.items()})


def _translate(value: Any, annotation: Any, before: Keys, now: Keys, moved: dict[Keys, Keys]) -> Any:
    if isinstance(value, list):
        return [_translate(item, annotation, (*before, index), (*now, index), moved) for index, item in enumerate(value)]
    if not isinstance(value, dict) or (node := node_for(annotation, value)) is None:
        return value
    found, fields, former = {}, node.model_fields, FORMER.get(node.__name__, {})
    for key, item in value.items():
        present: Any = former.get(key, key)
        name = key if key in fields or present in value else present  # where both are there, the former one is refused
        conversion = CONVERTED.get((node.__name__, key))
        if conversion is not None and isinstance(item, int | float):
            item = conversion.now(item)
        old, new = (*before, key), (*now, name)
        moved[old] = new
        inside = isinstance(item, dict | list) and name in fields
        found[name] = _translate(item, fields[name].annotation, old, new, moved) if inside else item
    return found


def with_defaults(tree: Any, like: Any, root: Any) -> Any:
    """A stored node of the class `root`, with the defaults of the keys that the node `like` has and an earlier version did not know."""
    if not isinstance(tree, dict) or not isinstance(like, dict) or (node := node_for(root, like)) is None:
        return tree
    found, fields = dict(tree), node.model_fields
    for key in [key for key in like if key in fields]:
        if key in found:
            found[key] = with_defaults(found[key], like[key], fields[key].annotation)
        elif not fields[key].is_required():
            found[key] = to_jsonable_python(fields[key].get_default(call_default_factory=True))
    return found


def with_former_paths(values: Mapping[str, Any], tree: Mapping[str, Any], of: Callable[[Any], Any]) -> dict[str, Any]:
    """`values` by the dotted path of a key that may be a former one, by the paths of now in the recipe `tree`.

    Where the value of a key had another form, `of` tells what `values` have of the value in `tree` (such as its hash): if they have that of
    the former form, they get that of the present one.
    """
    found = dict(values)
    for former, path, value, convert in _former_paths(tree, Recipe, "", ("",)):
        if former in found and path not in found:
            found[path] = found.pop(former)
            if convert is not None and found[path] == of(convert(value)):
                found[path] = of(value)
    return found


_Former = tuple[str, str, Any, Callable[[Any], Any] | None]


def _former_paths(value: Any, annotation: Any, now: str, before: tuple[str, ...]) -> Iterator[_Former]:
    """Each former path below a node, with that of now, the value there, and what gives the value the form that it had."""
    if isinstance(value, list):
        for name, item in zip(item_names(value), value, strict=True):
            yield from _former_paths(item, annotation, f"{now}{name}.", tuple(f"{one}{name}." for one in before))
    node = node_for(annotation, value)
    if not isinstance(value, dict) or node is None:
        return
    names = FORMER.get(node.__name__, {})
    for key, item in value.items():
        former = [name for name, present in names.items() if present == key]
        for above in before:
            for name in (key, *former):
                if above + name != now + key:
                    conversion = CONVERTED.get((node.__name__, name))
                    yield above + name, now + key, item, conversion.before if conversion is not None else None
        if key in node.model_fields:
            paths = tuple(f"{above}{name}." for above in before for name in (key, *former))
            yield from _former_paths(item, node.model_fields[key].annotation, f"{now}{key}.", paths)


def table() -> str:
    """The former keys as Markdown, by section."""
    places: dict[str, list[str]] = {}
    for root, top in ((Recipe, ""), (Cluster, "cluster file")):
        for node, path in sections(root):
            places.setdefault(node.__name__, []).append(path or top)
    lines = ["| section | former key | key |", "|---|---|---|"]
    for name, paths in places.items():
        where = ", ".join(f"`{path}`" for path in dict.fromkeys(paths))
        lines += [f"| {where} | `{former}` | `{now}` |" for former, now in FORMER.get(name, {}).items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
