"""YAML text to plain values, with the line of every key.

A stricter YAML than PyYAML's own: a key written twice is refused, `no` and `on` stay words, `1e-4` is a number,
`010` is not eight, and dates stay text. Nothing but plain maps, lists and scalars is ever built, and every value is within bounds: numbers,
texts and nesting that no recipe needs are refused here, so that nothing behind this file has to expect them.
"""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from lmworks.errors import UserError
from lmworks.io.files import read_regular
from lmworks.recipe.keys import Keys
from lmworks.recipe.schema.units import LARGEST

_MOST_NODES, _DEEPEST = 200_000, 64
_MOST_DIGITS = 40
_PREFIX = "tag:yaml.org,2002:"
_KINDS = ("str", "bool", "null", "int", "float")
_BREAKS = re.compile("[\x85\u2028\u2029]")  # which end a line in YAML, and not in JSON
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"more than {_DEEPEST} levels of nesting", self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|false|True|False)$", "tTfF"),
    ("null", r"^(?:null|Null|~|)$", ["n", "N", "~", ""]),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^[-+]?[0-9][0-9_]*(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)$", "-+0123456789"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


@dataclass(frozen=True)
class Document:
    """A parsed file: its values, and the line (from 1) on which each key or item stands."""

    path: str
    tree: dict[str, Any]
    lines: dict[Keys, int] = field(default_factory=dict)

    def line(self, keys: Keys) -> int | None:
        """The line of `keys`, or of the nearest ancestor that was written."""
        while keys and keys not in self.lines:
            keys = keys[:-1]
        return self.lines.get(keys)

    def place(self, keys: Keys) -> str:
        """`FILE:LINE` of `keys`."""
        line = self.line(keys)
        return f"{self.path}:{line}" if line else self.path


def parse(text: str, path: str) -> Document:
    """Parse one YAML document whose top is a map; raises `UserError` with file and line."""
    document = _parse(text, path)
    return replace(document, tree=copy.deepcopy(document.tree))  # which its reader may change


@lru_cache(maxsize=64)  # a command reads a preset, a resolved recipe and a word of --set many times over; a copy takes 1% of the time
def _parse(text: str, path: str) -> Document:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(f"{path}:{line}: the character {chr(error.character)!a} may not stand in a recipe; write it as an escape") from None
    lines: dict[Keys, int] = {}
    nodes = 0

    def build(node: yaml.Node, keys: Keys) -> Any:
        nonlocal nodes
        nodes += 1
        lines.setdefault(keys, node.start_mark.line + 1)
        # Aliases may make a small file unfold without end.
        if nodes > _MOST_NODES or len(keys) > _DEEPEST:
            raise UserError(f"{path}:{node.start_mark.line + 1}: the file unfolds to too many or too deep values; write them out")
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                line = key_node.start_mark.line + 1
                key = scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
                if not isinstance(key, str):
                    raise UserError(f"{path}:{line}: a key must be a word; put it in quotes")
                if key in result:
                    raise UserError(f"{path}:{line}: {key!r} is written twice in this map (first on line {lines[(*keys, key)]}); keep one")
                lines[(*keys, key)] = line
                result[key] = build(value_node, (*keys, key))
            return result
        if isinstance(node, yaml.SequenceNode):
            return [build(item, (*keys, index)) for index, item in enumerate(node.value)]
        return scalar(node)

    def scalar(node: yaml.Node) -> Any:
        place, kind = f"{path}:{node.start_mark.line + 1}", node.tag.removeprefix(_PREFIX)
        if kind not in _KINDS:
            raise UserError(f"{place}: a recipe has no tags, such as {node.tag!a}; leave it out")
        if kind == "int" and len(node.value) > _MOST_DIGITS:
            raise UserError(f"{place}: a whole number of {len(node.value):,} characters; the largest is {LARGEST:,}")
        try:
            value = loader.construct_object(node)
        except (ValueError, KeyError):  # of a tag that says what the value is not
            raise UserError(f"{place}: {node.value[:100]!r} is no {kind}") from None
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UserError(f"{place}: {value} is too large; the largest whole number is {LARGEST:,}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{place}: {node.value[:100]!r} is no finite number")
        if isinstance(value, str) and (found := _NO_TEXT.search(value)):
            raise UserError(f"{place}: the character {found[0]!a} stands in a value; no text may have it")
        return value

    try:
        top = loader.get_single_node()
        tree = build(top, ()) if top is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise UserError(f"{place}: not readable as YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}") from None
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        raise UserError(f"{path}: the file must hold a map of keys, not {type(tree).__name__}")
    return Document(path, tree, lines)


def parse_file(path: Path) -> Document:
    """Read and parse a YAML file."""
    return parse(read_text(path), str(path))


def read_text(path: Path, regular: bool = False) -> str:
    """The text of a recipe's file. Raises `UserError` if it cannot be read or, with `regular`, if it is a pipe, a device or a file without
    an end, as a folder that somebody else has made may have."""
    try:
        return read_regular(path).decode("utf-8") if regular else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def tree_of_json(text: str) -> dict[str, Any] | None:
    """The tree that `parse` finds in a file of JSON, in a tenth of the time; None if it is not JSON, or `parse` may have to refuse it."""
    special = _BREAKS.search(text) or r"\u0000" in text or r"\ud" in text.lower()
    if special or len(text) > _MOST_NODES or _Loader.NON_PRINTABLE.search(text):
        return None
    try:
        tree = json.loads(text, object_pairs_hook=_each_once, parse_int=_bounded, parse_float=_bounded, parse_constant=_bounded)
        return tree if isinstance(tree, dict) and _depth(tree) < _DEEPEST else None
    except (ValueError, RecursionError):
        return None


def _depth(tree: Any) -> int:
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return 1 + max(map(_depth, below), default=0)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is written twice")
    return found


def _bounded(digits: str) -> int | float:
    """A number within the bounds of `parse`."""
    value = int(digits) if digits.lstrip("-").isdigit() else float(digits)
    if not abs(value) <= LARGEST:
        raise ValueError(f"{digits} is out of bounds")
    return value


def parse_value(text: str, what: str) -> Any:
    """Parse one YAML value, as written on the command line."""
    return parse(f"value: {text}" if text.strip() else "value: ''", what).tree["value"]
