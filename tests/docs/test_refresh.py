"""docs/refresh.py, which writes the output that README.md shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from pages import ROOT

from lmworks.errors import UserError
from tiny_run import Tiny


@pytest.fixture
def refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, working on a README of its own and without a browser."""
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "take_picture", lambda page, picture: None)
    return module


def test_the_blocks_are_replaced_and_nothing_else(refresh: ModuleType, tiny: Tiny, tmp_path: Path) -> None:
    refresh.main(tiny.run_dir)
    before, after = (ROOT / "README.md").read_text(encoding="utf-8"), (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"lmworks chat {tiny.run_dir}" in "".join(after.split("<!-- quickstart -->")[1].split("<!-- end")[0].split("\n"))

    def around(text: str) -> list[str]:
        return [part.split("-->")[-1] for part in text.replace("<!-- end of", "<!--").split("<!--")[::2]]

    assert around(before) == around(after)
    refresh.main(tiny.run_dir)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == after


def test_what_is_missing_is_named(refresh: ModuleType) -> None:
    with pytest.raises(UserError, match="no block 'elsewhere'"):
        refresh.replace_block("text", "elsewhere", "")
