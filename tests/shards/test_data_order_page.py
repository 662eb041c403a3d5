"""What docs/data-order.md shows is run, in one go as a reader would."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "data-order.md"


def test_the_code_on_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    for line in printed:
        assert f"    {line}\n" in PAGE.read_text(encoding="utf-8"), "the page shows what is printed"


def test_the_figure_is_there_and_well_formed() -> None:
    (figure,) = re.findall(r"!\[.*?\]\((figures/.*?\.svg)\)", PAGE.read_text(encoding="utf-8"))
    assert ElementTree.parse(PAGE.parent / figure).getroot().tag.endswith("svg")
