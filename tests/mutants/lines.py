"""Which tests are to find a mistake: those that run a line that it changes."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mutants.tracing import Traced
from mutants.workspace import Workspace


@dataclass
class File:
    """Of tests: the lines of the modules of a group that ran before its tests did, and each test that passed."""

    key: str
    imported: dict[str, list[int]] = field(default_factory=dict)
    tests: dict[str, Traced] = field(default_factory=dict)


class Coverage:
    """What the tests in some files run of some modules. What `kept` tells of the same contents of both is not run again."""

    def __init__(self, workspace: Workspace, modules: Sequence[str], tests: Sequence[str], kept: Path) -> None:
        known: dict[str, File] = {}
        if kept.exists():
            for name, row in json.loads(kept.read_text(encoding="utf-8")).items():
                known[name] = File(row["key"], row["imported"], {test: Traced(**one) for test, one in row["tests"].items()})
        keys = {name: digest(workspace.path, [*modules, name]) for name in tests}
        if stale := [name for name in tests if name not in known or known[name].key != keys[name]]:
            print(f"tracing the tests of {len(stale)} files", flush=True)
            with workspace.hold(stale, traced=modules) as held:
                imported, traced = held.trace()
            known |= {name: File(keys[name], imported) for name in stale}
            for test, one in traced.items():
                known[test.partition("::")[0]].tests[test] = one
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps({name: asdict(one) for name, one in known.items()}), encoding="utf-8")
        self._files = [known[name] for name in tests]

    def of(self, module: str, before: str, after: str) -> tuple[dict[str, Traced], bool]:
        """The tests that run what a mistake changes, the cheapest first; and whether it has run before any of
        them, when the modules were imported: then it may show in all that run the function, or else the module."""
        ran = {line for file in self._files for line in file.imported.get(module, ())}
        lines, imported = needed_lines(before, after, ran)
        tests = [one for file in self._files for one in file.tests.items()]
        found = {name: test for name, test in tests if not lines.isdisjoint(test.lines.get(module, ()))}
        return dict(sorted(found.items(), key=lambda one: one[1].seconds + sum(one[1].fixtures.values()))), imported


def needed_lines(before: str, after: str, imported: Collection[int]) -> tuple[set[int], bool]:
    """The lines that a mistake shows in when they run, and whether it is in some of those that ran when the module was imported."""
    first, end = changed_lines(before, after)
    lines = _statements(before, first, end)
    if lines.isdisjoint(imported):
        return lines, False
    return lines | _body(before, first, end), True


def digest(root: Path, names: Iterable[str]) -> str:
    found = hashlib.sha256()
    for name in sorted(set(names)):
        found.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return found.hexdigest()[:16]


def changed_lines(before: str, after: str) -> tuple[int, int]:
    """The first line and the one behind the last that two texts do not share at their beginnings and ends; counted from 1, in the first."""
    old, new = before.splitlines(), after.splitlines()
    first = next((number for number, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new)))
    most = min(len(old), len(new)) - first
    same = next((number for number in range(most) if old[-1 - number] != new[-1 - number]), most)
    return first + 1, max(first + 2, len(old) - same + 1)


def _statements(source: str, first: int, end: int) -> set[int]:
    """All lines of the statements in these lines: a call runs none of its own if it starts in another line."""
    lines = set(range(first, end))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            begin, behind = _extent(node)
            if begin < end and first < behind:
                lines |= set(range(begin, behind))
    return lines


def _extent(node: ast.stmt | ast.ExceptHandler) -> tuple[int, int]:
    """The lines [begin, end) of a simple statement, or of what comes before the block of a compound one."""
    begin = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    inside = getattr(node, "body", None) or getattr(node, "cases", None)
    if not inside:
        return begin, (node.end_lineno or begin) + 1
    return begin, max(begin + 1, getattr(inside[0], "lineno", getattr(getattr(inside[0], "pattern", None), "lineno", begin)))


def _body(source: str, first: int, end: int) -> set[int]:
    """The lines of the function whose signature these lines are in, or else of the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            begin, behind = _extent(node)
            if begin <= first and end <= behind:
                return set(range(begin, (node.end_lineno or begin) + 1))
    return set(range(1, source.count("\n") + 2))
