"""What anybody may have written is shown, not obeyed."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

import lmworks
from lmworks import progress
from lmworks.terminal import Terminal

HOSTILE = "a\x1b]0;title\x07b\x9b2J[/x][red]c :smile:"
SHOWN = "a]0;titleb2J[/x][red]c :smile:"
_STYLES = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_text_is_shown_as_it_is() -> None:
    from rich.table import Table
    from rich.text import Text

    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=80)
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, "bold"))
    terminal.print(table)
    terminal.print(HOSTILE, style="yellow")
    terminal.out(HOSTILE)
    terminal.print("10 of 20", end="\r")
    out = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert out.count(SHOWN) == 7
    assert "\x1b[" in out and out.endswith("10 of 20\r")
    assert not _CONTROL.search(_STYLES.sub("", out[:-1]))


def test_progress_shows_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=200)
    monkeypatch.setattr(progress, "console", terminal)
    with progress.bar(HOSTILE, 2) as bar:
        bar.note(HOSTILE)
        bar.advance()
    out = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert SHOWN in out and "\x07" not in out and "\x9b" not in out


def test_nothing_is_styled_by_markup() -> None:
    """It would be shown as it stands."""
    tags = re.compile(r"\[/(bold|dim|red|green|yellow|cyan|italic)\]")
    sources = sorted(Path(lmworks.__file__).parent.rglob("*.py"))
    assert [str(path) for path in sources if tags.search(path.read_text(encoding="utf-8"))] == []
    consoles = [path.name for path in sources if re.search(r"rich\.console import .*\bConsole\b", path.read_text(encoding="utf-8"))]
    assert consoles == ["terminal.py"]
