"""The page on 15T tokens shows what its benchmark prints."""

from __future__ import annotations

import subprocess
import sys

from pages import ROOT


def test_the_table_is_what_the_script_prints() -> None:
    printed = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "data_at_scale.py")], capture_output=True, text=True, check=True
    ).stdout
    page = (ROOT / "docs" / "data-at-scale.md").read_text(encoding="utf-8")
    assert page.partition("<!-- table -->\n")[2].partition("<!-- end of table -->")[0] == printed
