"""The recipe reference, generated from the types: a page for each section of a recipe. `python -m lmworks.recipe.reference docs/recipe`."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lmworks.recipe.changes import rule
from lmworks.recipe.keys import known_paths, nodes_of, sections, tag_of
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.layout import ActivationCheckpointing, Cluster
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Bytes, Duration, Seconds, Tokens

_UNITS = {Tokens: "tokens", Bytes: "bytes", Seconds: "seconds", Duration: "duration", ActivationCheckpointing: "activation checkpointing"}
_CLUSTER = "cluster"  # the page of cluster files, which are no section of a recipe
_HEADING = re.compile(r"\(#(\w+)\)")
_INDEX = "README"  # the page that GitHub shows for the folder
_INTRODUCTION = """\
# Recipe reference

A recipe is one YAML file. Every key that it omits has the default below, or is derived from others. `lmworks show RECIPE` prints every
value with its origin, and `--set a.b=c` overrides one. An unknown key is refused. Each section of a recipe has a page of its own,
to which its type in the [table](#recipe) links, and so have [cluster files](cluster.md). The pages are generated from the types.

Quantities carry their unit:

| unit | examples |
|---|---|
| tokens | `15T`, `4Mi`, `131072 tokens` |
| bytes | `16MB`, `4GiB` |
| seconds | `30 s`, `10 min`, `90 days` |
| duration | `2000 steps`, `1B tokens`, or `2%`: of the phase for a key of a phase, else of all of the stage |
| activation checkpointing | `none`, `selective`, `full`, `50%` (of the layers in full), `selective 50%` |

Items of a list are named by their `name`: `--set train.phases.general.tokens=2M`. Keys marked * may change when a run is resumed;
a change of any other must be allowed by its name (`--allow train.phases.general.tokens`) and is written to the ledger, and those of the
tokenizer may not change at all. [What a change repeats](../changes.md) lists which stages read which keys.
"""


def type_text(annotation: Any) -> str:
    """An annotation as a reader of YAML would put it; nodes link to their headings."""
    if annotation in _UNITS:
        return _UNITS[annotation]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(parts[0])
    if origin is Literal:
        return " \\| ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else type_text(part) for part in parts)
    if origin is list:
        return f"list of {type_text(parts[0])}"
    if origin is tuple:
        return f"list of {type_text(parts[0])}" if parts[-1] is Ellipsis else f"[{', '.join(map(type_text, parts))}]"
    if origin is dict:
        return f"map of {type_text(parts[1])} by name"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "any"}.get(annotation, str(annotation))


def _value_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (Tokens, Bytes, Seconds, Duration, ActivationCheckpointing)):
        return value.text()
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        return ", ".join(tag_of(type(item)) or type(item).__name__ for item in value)
    return str(list(value)) if isinstance(value, tuple) else str(value)


def default_text(field: FieldInfo) -> str:
    """The default of a field; a node's own table states its defaults."""
    if field.default_factory is not None:
        return "`{}`" if get_origin(field.annotation) is dict else "`[]`"
    if field.default is PydanticUndefined:
        return "required"
    return "see there" if isinstance(field.default, BaseModel) else f"`{_value_text(field.default)}`"


def _below(path: str, field: FieldInfo) -> Iterator[str]:
    """The keys below a key that is a node."""
    for node in nodes_of(field.annotation):
        yield from known_paths(node, f"{path}.NAME." if get_origin(field.annotation) is list else f"{path}.")


def reference() -> dict[str, str]:
    """The pages as Markdown by file name: the root of a recipe, each of its sections, and the cluster file; a table per node of the tree.
    A node that several sections have is on the page of the first."""
    places: dict[type[Node], list[str]] = {}
    for root, start in ((Recipe, ""), (Cluster, _CLUSTER)):
        for node, path in sections(root, start):
            places.setdefault(node, []).append(path)
    page = {node: paths[0].partition(".")[0] or _INDEX for node, paths in places.items()}
    files = {node.__name__.lower(): f"{name}.md" for node, name in page.items()}
    pages: dict[str, list[str]] = {}
    for node, paths in places.items():
        here = page[node]
        parts = pages.setdefault(here, [_INTRODUCTION if here == _INDEX else _title(here)])
        where = ", ".join(f"`{path}`" for path in paths if path and path != _CLUSTER)
        parts.append(f"## {node.__name__}\n\n{_about(node)}{f' At {where}.' if where else ''}\n")
        rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key, field in node.model_fields.items():
            path = f"{paths[0]}.{key}".lstrip(".")
            mark = "*" if here != _CLUSTER and rule([path, *_below(path, field)]) == "free" else ""
            below = nodes_of(field.annotation)
            meaning = field.description or (_about(below[0]) if below else "")
            rows.append(f"| `{key}`{mark} | {type_text(field.annotation)} | {default_text(field)} | {_cell(meaning)} |")
        parts.append("\n".join(rows) + "\n")
    return {f"{name}.md": _between_pages("\n".join(parts), f"{name}.md", files) for name, parts in pages.items()}


def _between_pages(text: str, here: str, files: dict[str, str]) -> str:
    """The text of the page `here` with links to headings of other pages led to their `files`."""
    return _HEADING.sub(lambda found: found[0] if files[found[1]] == here else f"({files[found[1]]}#{found[1]})", text)


def _title(section: str) -> str:
    subject = "Keys of cluster files" if section == _CLUSTER else f"Keys of `{section}`"
    return f"# {subject}\n\nPart of the [recipe reference]({_INDEX}.md), which explains units and the mark *.\n"


def _about(node: type[BaseModel]) -> str:
    return " ".join((node.__doc__ or "").split())


def _cell(text: str) -> str:
    return text.partition("\n")[0].replace("|", "\\|")


def write(folder: Path) -> None:
    """Write the pages into `folder`, and remove those of sections that no longer exist."""
    pages = reference()
    folder.mkdir(parents=True, exist_ok=True)
    for stale in {path.name for path in folder.glob("*.md")} - set(pages):
        (folder / stale).unlink()
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
