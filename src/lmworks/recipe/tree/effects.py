"""What each key of the recipe affects: the stages that read it, and what a change of it needs once training has begun.

The declarations stand beside the keys (`lmworks.recipe.schema.effect`). From them follow the inputs of a stage (`lmworks.run.staleness`),
the keys that need `--allow` (`lmworks.recipe.tree.fingerprint`), the mark * of docs/recipe.md, and the table of docs/changes.md, which
`python -m lmworks.recipe.tree.effects` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import groupby
from typing import get_origin

from pydantic.fields import FieldInfo

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NOT_ARCHITECTURE, Effect, Rule, StageName
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.keys import nodes_of, tag_of


def _of_field(field: FieldInfo) -> Effect | None:
    """The effect that a field declares: its own, or that of the only node that it holds."""
    own = next((item for item in field.metadata if isinstance(item, Effect)), None)
    below = nodes_of(field.annotation)
    return own or (below[0].effect if len(below) == 1 and not _is_list(field) else None)


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list


@lru_cache(maxsize=4096)
def effect_of(path: str) -> Effect:
    """The effect of a key by its dotted path: its own, or that of the nearest node above it. A key that the types do not know, such as
    the name of a source in a mixture, has the effect of what it stands in."""
    found = _find(path)
    assert found is not None, f"the types of lmworks.recipe.schema declare no effect of {path}"
    return found


def _find(path: str) -> Effect | None:
    nodes: list[type[Node]] = [Recipe]
    found, in_list = Recipe.effect, False
    for part in path.split("."):
        if in_list:  # this part names an item
            nodes = [node for node in nodes if tag_of(node) == part] or nodes[: len(nodes) == 1]
            found = (nodes[0].effect if nodes else None) or found
            in_list = False
            continue
        field = next((node.model_fields[part] for node in nodes if part in node.model_fields), None)
        if field is None:
            return found
        nodes, in_list = nodes_of(field.annotation), _is_list(field)
        found = _of_field(field) or found
    return found


def readers(path: str) -> tuple[StageName, ...]:
    """The stages that read a key."""
    return effect_of(path).readers


def rule(paths: Iterable[str]) -> Rule:
    """What a change of these keys needs once there is a checkpoint: the strictest of their rules."""
    found = {effect_of(path).rule for path in paths}
    return "never" if "never" in found else "allow" if "allow" in found else "free"


def declarations(node: type[Node] = Recipe, above: str = "") -> Iterator[tuple[str, Effect]]:
    """Every declaration with the path that it holds for and for all below it, in the order of the tree; `*` stands for the name of an
    item. Of several that match a key the last one counts."""
    for key, field in node.model_fields.items():
        path, many = f"{above}{key}", _is_list(field)
        if (effect := _of_field(field)) is not None:
            yield path, effect
        for inner in nodes_of(field.annotation):
            start = f"{path}.{tag_of(inner) or '*'}" if many else path
            if many and inner.effect is not None:
                yield start, inner.effect
            yield from declarations(inner, f"{start}.")


def not_architecture(node: type[Node], above: str = "") -> Iterator[str]:
    """The keys below `node` that are marked `NOT_ARCHITECTURE`, by dotted path."""
    for key, field in node.model_fields.items():
        if NOT_ARCHITECTURE in field.metadata:
            yield above + key
        else:
            for inner in nodes_of(field.annotation):
                yield from not_architecture(inner, f"{above}{key}.")


_NO_READERS = {False: "none", True: "a run in progress"}
_RULES = {"free": "may change", "allow": "`--allow`", "never": "another `run_dir`"}


def table() -> str:
    """The declarations as Markdown, for docs/changes.md; neighbors in one section with the same effect share a row."""
    lines = ["| keys | read by | once training has begun |", "|---|---|---|"]
    for (effect, _), group in groupby(declarations(), key=lambda item: (item[1], item[0].rpartition(".")[0])):
        keys = ", ".join(f"`{path}`" for path, _ in group)
        lines.append(f"| {keys} | {', '.join(effect.readers) or _NO_READERS[effect.resume]} | {_RULES[effect.rule]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
