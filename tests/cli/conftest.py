"""Commands, and recipes to break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command import Lmworks

from tiny_run import Tiny


@pytest.fixture
def lmworks(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Lmworks:
    """Call a command."""
    return Lmworks(monkeypatch, capfd)


@pytest.fixture
def mine(tiny: Tiny, tmp_path: Path) -> Callable[[str, str], Path]:
    """Write `mine.yaml`: the tiny recipe with one text replaced by another, and a run directory of its own."""

    def write(old: str, new: str) -> Path:
        text = tiny.recipe.read_text()
        assert text.count(old) == 1, old
        path = tmp_path / "mine.yaml"
        path.write_text(text.replace(old, new) + f"run_dir: {tmp_path}/run\n")
        return path

    return write
