"""Fingerprints of recipes, and the changes that a resumed run allows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from lmworks.errors import UserError
from lmworks.recipe.tree.effects import rule
from lmworks.recipe.tree.paths import Keys, display, get, leaves, locate


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


def require_allowed(changes: Sequence[Change], allowed: Sequence[str] = (), derived: Collection[str] = ()) -> list[Change]:
    """The changes that matter, if each is allowed by name (itself, or a node above it); for the ledger.

    What is `derived` from other values follows those: it needs no word of its own as long as one of them has changed. Raises `UserError`
    naming the others and how to allow them, and for what no word allows. Harmless changes are dropped.
    """
    frozen = [change for change in changes if rule(change.keys) == "never"]
    if frozen:
        raise UserError(
            f"the recipe changed what the weights of this run were trained with: {_named(frozen)}; no --allow permits that, since "
            "their tokens would mean something else: undo it, or choose another run_dir"
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
    return matter


def _named(changes: Sequence[Change]) -> str:
    return ", ".join(map(str, changes[:8])) + (f" and {len(changes) - 8} more" if len(changes) > 8 else "")
