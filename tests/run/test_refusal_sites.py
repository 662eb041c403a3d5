"""Each place that raises a `UserError` is in the table of `refusal_sites`: none is made without asking whether it can come first."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import lmworks
from refusal_sites import FOLDERS, listed

SOURCE = Path(lmworks.__file__).parent


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name(node: ast.expr) -> str | None:
    """Of a class as it is called or derived from: `UserError` and `errors.UserError` are the same."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


@cache
def _kinds() -> frozenset[str]:
    """The names of `UserError` and of the exceptions derived from it."""
    classes = [node for path in SOURCE.rglob("*.py") for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)]
    found = {"UserError"}
    while more := {one.name for one in classes if {_name(base) for base in one.bases} & found} - found:
        found |= more
    return frozenset(found)


def raised(source: Path) -> Counter[str]:
    """How often each function makes such an error: `module function`, and `module Class.method`."""
    kinds, found = _kinds(), Counter[str]()

    def walk(node: ast.AST, module: str, within: list[str]) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call) and _name(child.func) in kinds:
                found[f"{module} {'.'.join(within)}"] += 1
            walk(child, module, [*within, child.name] if named else within)  # type: ignore[attr-defined]

    for path in sorted(source.rglob("*.py")):
        walk(_tree(path), ".".join(path.relative_to(source).with_suffix("").parts), [])
    return found


def _in_folder(place: str) -> bool:
    return any(place.startswith((f"{folder}.", f"{folder} ")) for folder in FOLDERS)


def _differences(source: Path) -> Iterator[str]:
    there, known = raised(source), listed()
    for place in sorted({*there, *known}):
        if not _in_folder(place) and there[place] != known[place]:
            yield f"{place}: {there[place]} in the source, {known[place]} in the table"


def test_every_refusal_is_classified() -> None:
    assert not list(_differences(SOURCE)), "new refusals: can a check of run/refusals.py find them before the first stage?"


def test_a_new_refusal_fails_until_it_is_classified(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "late.py").write_text("def stop():\n    if hours > 9:\n        raise UserError('too late')\n")
    assert "train.late stop: 1 in the source, 0 in the table" in list(_differences(tmp_path))
