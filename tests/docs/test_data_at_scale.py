"""The pages on 15T tokens, on checkpoints and on sizes show what their benchmarks print."""

from __future__ import annotations

import runpy
import sys

import pytest
from doc_pages import ROOT


@pytest.mark.parametrize(
    ("script", "name"),
    [("data_at_scale.py", "data-at-scale.md"), ("checkpoint_scale.py", "checkpoints.md"), ("size_table.py", "sizing.md")],
)
def test_the_table_is_what_the_script_prints(
    script: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page.partition("<!-- table -->\n")[2].partition("<!-- end of table -->")[0] == printed
