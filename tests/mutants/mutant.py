"""Planted mistakes: each is a small change of one function, the promise that it breaks, and the fast tests that must fail.

They are declared in `rooms/ROOM.py`, one file per room of src/lmworks, as a list `MUTANTS`.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
ROOMS = Path(__file__).with_name("rooms")


@dataclass(frozen=True)
class Mutant:
    """A mistake in one place of the sources.

    where: `module:name` below lmworks, such as `optim.optimizer:Ema.step`: a function, class or constant. The name survives moves.
    old, new: what is replaced there, and by what; `old` occurs there exactly once.
    promise: what the mutant breaks, in one sentence; it names the mutant.
    tests: files, tests (FILE::NAME) or folders below tests/ whose files may find it, besides those in the folder of the room.
    """

    where: str
    old: str
    new: str
    promise: str
    tests: str = ""
    room: str = ""

    @property
    def path(self) -> Path:
        return SOURCE / "lmworks" / (self.where.partition(":")[0].replace(".", "/") + ".py")

    @property
    def test_paths(self) -> list[str]:
        folder = f"tests/{self.room}"
        named = [path for one in self.tests.split() if (path := f"tests/{one}") != folder]
        return [*named, folder]

    def mutated(self) -> str:
        """The module with the mistake in it. Raises `ValueError` if it cannot be planted."""
        source = self.path.read_text(encoding="utf-8")
        begin, end = _extent(self.path, self.where.partition(":")[2])
        lines = source.splitlines(keepends=True)
        inside = "".join(lines[begin:end])
        if (count := inside.count(self.old)) != 1:
            raise ValueError(f"{self.where} contains the text {count} times: {self.old}")
        return "".join(lines[:begin]) + inside.replace(self.old, self.new) + "".join(lines[end:])


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _extent(path: Path, name: str) -> tuple[int, int]:
    """The lines [begin, end) of a definition, its decorators included."""
    body = _tree(path).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((one for one in body if part in _names(one)), None)
        if node is None:
            raise ValueError(f"{path.relative_to(SOURCE)} has no {name}")
        body = getattr(node, "body", [])
    assert node is not None and node.end_lineno is not None
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))]) - 1, node.end_lineno


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def declared() -> list[Mutant]:
    """All mutants, by room."""
    found: list[Mutant] = []
    for path in sorted(ROOMS.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"mutants_of_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [Mutant(*one, room=path.stem) for one in module.MUTANTS]
    return found
