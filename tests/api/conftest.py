"""Commands, to compare the Python API with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from command import Lmworks

from tiny_run import Tiny


@pytest.fixture
def mine(tiny: Tiny, tmp_path: Path) -> Callable[[str, str], Path]:
    """Write `mine.yaml`: the tiny recipe with one text replaced by another, and a run directory of its own."""

    def write(old: str, new: str) -> Path:
        text = tiny.recipe.read_text(encoding="utf-8")
        assert text.count(old) == 1, old
        path = tmp_path / "mine.yaml"
        path.write_text(text.replace(old, new) + f"run_dir: {tmp_path}/run\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def lmworks_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Lmworks:
    """Call a command."""
    return Lmworks(monkeypatch, capfd)
