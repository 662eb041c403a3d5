"""What is installed: one list of versions, with the newest and with the oldest torch, and all that the fast tests import."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from late import is_slow

ROOT = Path(__file__).parents[1]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_two_lists_differ_by_torch_alone() -> None:
    """torch 2.11 needs a setuptools below 82."""
    newest, oldest = pins("constraints.txt"), pins("constraints-2.11.txt")
    assert {name for name in newest | oldest if newest.get(name) != oldest.get(name)} == {"torch", "setuptools"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = (one for one in map(Requirement, project["dependencies"]) if one.name == "torch")
    assert torch.specifier.contains(newest["torch"]) and torch.specifier.contains(oldest["torch"])
    assert not torch.specifier.contains(f"2.{Version(oldest['torch']).minor - 1}.9") and not torch.specifier.contains("2.14.0")


def in_extra(name: str) -> set[str]:
    """The distributions that an extra names, and those of the extras in it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    found = set()
    for one in map(Requirement, extras[name]):
        found |= set().union(*map(in_extra, one.extras)) if one.name == "lmworks" else {canonicalize_name(one.name)}
    return found


def needed(tree: ast.AST) -> Iterator[str]:
    """The packages without which fast tests of a file are skipped."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and any("pytest.mark.slow" in ast.unparse(one) for one in node.decorator_list):
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("importorskip", "require_package"):
            (name, *_) = node.args
            assert isinstance(name, ast.Constant)
            yield str(name.value).partition(".")[0]
        yield from needed(node)


def test_no_fast_test_is_skipped_for_a_package_that_is_not_installed_with_them() -> None:
    """Otherwise nobody runs it: `make test` and `make mutants` install `dev`."""
    installed = in_extra("dev")
    sources = {path: path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("*.py")}
    asked = {name: path.name for path, text in sources.items() if not is_slow(text) for name in needed(ast.parse(text))}
    assert {"gguf", "peft", "transformers"} <= asked.keys()
    known = packages_distributions()
    missing = {name: file for name, file in asked.items() if not installed & {canonicalize_name(one) for one in known.get(name, [name])}}
    assert missing == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('pytest.importorskip("one.part")', ["one"]),
        ('def test() -> None:\n    require_package("one", "")', ["one"]),
        ('@pytest.mark.slow\ndef test() -> None:\n    pytest.importorskip("one")', []),
    ],
)
def test_packages_of_slow_tests_are_their_own(source: str, names: list[str]) -> None:
    assert [*needed(ast.parse(source))] == names
