"""What anybody may have written is shown, not obeyed."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmworks
from lmworks import cli
from lmworks.ui import terminal as progress
from lmworks.ui.terminal import Terminal

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


# Arguments of bare print() that hold nothing that others wrote: our own words, and JSON, which escapes control characters.
_OWN = re.compile(r"plain\(|json\.dumps\(|_CONTROL\.sub\(|(__version__|context\.get_help\(\))$")


def test_commands_print_values_through_what_removes_control_characters() -> None:
    """That is the console, or `plain` for scripts and for standard error."""
    bare = []
    for path in sorted(Path(cli.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print":
                values = [ast.unparse(value) for value in call.args if not isinstance(value, ast.Constant)]
                bare += [f"{path.name}:{call.lineno}: {value}" for value in values if not _OWN.match(value)]
    assert bare == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
@pytest.mark.parametrize("stderr", [False, True])
def test_output_into_a_file_on_a_full_disk_ends_nothing(stderr: bool, monkeypatch: pytest.MonkeyPatch):
    """As of a run whose output goes to a log beside its checkpoints. What was to go to standard output is missed, unlike progress."""
    monkeypatch.setattr(Terminal, "lost", None)
    with open("/dev/full", "w", encoding="utf-8") as full:
        Terminal(file=full, stderr=stderr).print("a line")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert (Terminal.lost is None) == stderr


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_only_a_command_that_prints_results_ends_when_nobody_reads_them(stream: str):
    code = f"""
import sys
from lmworks.ui import terminal
from lmworks.ui.terminal import Terminal
console = terminal.console if {stream!r} == "stderr" else Terminal()
for _ in range(3):
    console.print("x" * 100_000)
print("it went on", file=sys.stdout if {stream!r} == "stderr" else sys.stderr)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    (process.stderr if stream == "stderr" else process.stdout).close()
    told = (process.stdout if stream == "stderr" else process.stderr).read()
    assert (process.wait(), b"it went on" in told) == ((0, True) if stream == "stderr" else (1, False)), told
