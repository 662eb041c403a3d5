"""The versions that are installed: one list, with the newest and with the oldest torch."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

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
