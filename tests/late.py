"""Libraries that take seconds to import and few files of tests need. Every worker collects all files, and only some run those."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest


class Late:
    """A module that is imported when a name of it is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks all names of a file whether they are fixtures
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


def require_package(name: str, reason: str) -> None:
    """Skip the file unless the package is installed, as `pytest.importorskip` does, without importing it."""
    if find_spec(name) is None:
        pytest.skip(reason, allow_module_level=True)


def is_slow(source: str) -> bool:
    """Whether the `pytestmark` of a file has the mark slow."""
    if "\npytestmark = " not in source or "pytest.mark.slow" not in source:
        return False
    found = (node for node in ast.parse(source).body if isinstance(node, ast.Assign))
    return any(ast.unparse(node).startswith("pytestmark = ") and "pytest.mark.slow" in ast.unparse(node) for node in found)
