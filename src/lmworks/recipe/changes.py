"""What each key of the recipe affects, fingerprints of recipes, and the changes that a resumed run allows.

The effects are declared beside the keys (`lmworks.recipe.schema.base`): the stages that read a key, and what a change of it needs once
training has begun. From them follow the inputs of a stage (`lmworks.run.run_dir`), the keys that need `--allow`, the mark * of
docs/recipe, and the table of docs/changes.md, which `python -m lmworks.recipe.changes` prints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lmworks.errors import UserError
from lmworks.recipe.keys import Keys, display, get, leaves, locate, nodes_of, tag_of
from lmworks.recipe.schema.base import NOT_ARCHITECTURE, Effect, Node, Rule, StageName
from lmworks.recipe.schema.recipe import Recipe


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


def as_tree(recipe: BaseModel | dict[str, Any]) -> dict[str, Any]:
    """The recipe (or a node of it) as plain JSON values; quantities as text with their unit."""
    return recipe.model_dump(mode="json") if isinstance(recipe, BaseModel) else recipe


def canonical(value: Any) -> bytes:
    """One and only one JSON text per value: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fingerprint(recipe: BaseModel | dict[str, Any], paths: Iterable[str] | None = None) -> str:
    """Hex SHA-256 of the whole resolved recipe, or of the sub-trees at `paths` (dotted; the order does not matter).

    A stage stamps what it makes with the fingerprint of the paths that it reads, so that other changes do not undo it.
    """
    tree = as_tree(recipe)
    if paths is not None:
        tree = {path: get(tree, locate(tree, path)) for path in paths}
    return hashlib.sha256(canonical(tree)).hexdigest()


@dataclass(frozen=True)
class Change:
    """One key whose value differs between two recipes, or a node that only one of them has; None where it is absent.

    `leaves` are the keys below a node.
    """

    path: str
    old: Any
    new: Any
    leaves: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.leaves and self.old is None:
            return f"{self.path} (added)"
        if self.leaves and self.new is None:
            return f"{self.path} (taken out)"
        return f"{self.path} ({_short(self.old)} -> {_short(self.new)})"

    @property
    def keys(self) -> tuple[str, ...]:
        """The single keys that have changed."""
        return self.leaves or (self.path,)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def changed_keys(old: BaseModel | dict[str, Any], new: BaseModel | dict[str, Any]) -> list[Change]:
    """What differs, by dotted path, in the order of the new recipe and then what only the old one has.

    A node that only one of them has, such as a phase, a source or the whole of `model.moe`, is one change.
    """
    before, after = _Spread(as_tree(old)), _Spread(as_tree(new))
    found: dict[str, Change] = {}
    for path in {**after.values, **before.values}:
        values = before.values.get(path), after.values.get(path)
        if values[0] == values[1] or all(value in (None, {}, []) for value in values):
            continue  # where one is empty and the other has more below it, that is told by what is below
        if path not in before.known:
            node, keys = after.highest(path, before.known)
            change = Change(node, None, get(after.tree, keys))
        elif path not in after.known:
            node, keys = before.highest(path, after.known)
            change = Change(node, get(before.tree, keys), None)
        else:
            change = Change(path, *values)
        same = found.get(change.path, change)
        found[change.path] = replace(same, leaves=(*same.leaves, path)) if change.path != path else same
    return list(found.values())


class _Spread:
    """A tree by its leaves: the `values`, and in `known` the paths of all that is there, nodes included."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self._keys = {display(tree, keys): keys for keys, _ in leaves(tree)}
        self.values = {path: get(tree, keys) for path, keys in self._keys.items()}
        self.known = {node for path, value in self.values.items() if value is not None for node, _ in self._above(path)}

    def _above(self, path: str) -> Iterator[tuple[str, Keys]]:
        keys = self._keys[path]
        return ((display(self.tree, keys[:stop]), keys[:stop]) for stop in range(1, len(keys) + 1))

    def highest(self, path: str, others: Collection[str]) -> tuple[str, Keys]:
        """The highest node above a leaf that is not among the `others`, or the leaf."""
        return next((node, keys) for node, keys in self._above(path) if node not in others)


def harmless(change: Change | str) -> bool:
    """Whether a change, or one of this key, leaves a resumed run exact."""
    return rule([change] if isinstance(change, str) else change.keys) == "free"


def require_allowed(
    changes: Sequence[Change], allowed: Sequence[str] = (), derived: Collection[str] = (), pretrained: bool = True
) -> None:
    """Require that each change that matters is allowed by name (itself, or a node above it).

    What is `derived` from other values follows those: it needs no word of its own as long as one of them has changed. Raises `UserError`
    naming the others and how to allow them, and for what no word allows. Harmless changes pass. `pretrained`: the run has trained
    its base model, whose checkpoints have the state of an optimizer; the stages after it begin with a new one.
    """
    frozen = [change for change in changes if any(effect_of(key).frozen for key in change.keys)]
    if frozen:
        raise UserError(
            f"the recipe changed what the weights of this run were trained with: {_named(frozen)}; no --allow permits that, since "
            "they would mean something else: undo it, or choose another run_dir"
        )
    state = [change for change in changes if pretrained and any(effect_of(key).optimizer_state for key in change.keys)]
    if state:
        raise UserError(
            f"the checkpoints of this run have the state of another optimizer: {_named(state)}; no --allow permits that: undo it, or "
            "choose another run_dir and set start_from to this run, to begin with its weights"
        )
    matter = [change for change in changes if not harmless(change)]
    causes = [change for change in matter if not derived or not set(change.keys) <= set(derived)]
    refused = [c for c in causes or matter if not any(c.path == name or c.path.startswith(name + ".") for name in allowed)]
    if refused:
        follows = [change for change in matter if causes and change not in causes]
        also = f", from which {_named(follows)} follow{'s' * (len(follows) == 1)}" if follows else ""
        flags = " ".join(f"--allow {change.path}" for change in refused)
        raise UserError(
            f"the recipe changed since this run began: {_named(refused)}{also}; undo it, choose another run_dir, or continue with {flags}"
        )


def _named(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes[:8])) + (f" and {len(changes) - 8} more" if len(changes) > 8 else "")


if __name__ == "__main__":
    print(table())
