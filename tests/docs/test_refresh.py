"""docs/refresh.py, which writes the output that README.md and docs/quickstart.md show."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from doc_pages import ROOT, script

from lmworks.errors import UserError
from tiny_run import Tiny

PAGES = ("README.md", "docs/quickstart.md")


@pytest.fixture
def refresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, working on copies of the pages and without a browser."""
    module = script("refresh")
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        (tmp_path / page).write_text((ROOT / page).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "take_picture", lambda page, picture: None)
    return module


def between(text: str, name: str) -> str:
    return text.split(f"<!-- {name} -->")[1].split(f"<!-- end of {name} -->")[0]


def test_the_blocks_are_replaced_and_nothing_else(refresh: ModuleType, tiny: Tiny, tmp_path: Path) -> None:
    tiny = tiny.copy(tmp_path / "run")
    resolved = tiny.run_dir / "resolved.json"
    resolved.write_text(resolved.read_text(encoding="utf-8").replace('"name": "tiny"', '"name": "quickstart"', 1), encoding="utf-8")
    refresh.main(tiny.run_dir)
    after = {page: (tmp_path / page).read_text(encoding="utf-8") for page in PAGES}
    shown = "".join(between(after["docs/quickstart.md"], "quickstart").split())  # lines break where the path is long
    assert f"lmworkschat{tiny.run_dir}" in shown
    for page, name in zip(PAGES, ("measured", "quickstart"), strict=True):
        before = (ROOT / page).read_text(encoding="utf-8")
        assert before != after[page] and before.replace(between(before, name), "") == after[page].replace(between(after[page], name), "")
    refresh.main(tiny.run_dir)
    assert after == {page: (tmp_path / page).read_text(encoding="utf-8") for page in PAGES}


def test_the_readme_shows_a_section_of_the_quickstarts_summary(refresh: ModuleType) -> None:
    readme, quickstart = ((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    shown = between(readme, "measured").strip().removeprefix("```text\n").removesuffix("\n```")
    assert refresh.section(between(quickstart, "quickstart"), refresh.MEASURED) == shown


def test_a_run_of_another_recipe_is_refused(refresh: ModuleType, tiny: Tiny) -> None:
    with pytest.raises(UserError, match="is a run of 'tiny'; pages show runs of quickstart and assistant"):
        refresh.main(tiny.run_dir)


def test_a_missing_block_is_named(refresh: ModuleType) -> None:
    with pytest.raises(UserError, match="no block 'elsewhere'"):
        refresh.replace_block("text", "elsewhere", "")
