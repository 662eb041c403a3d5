"""Programs of another environment that end, or answer, otherwise than they should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmworks.quantize import child
from lmworks.quantize.child import ChildScorer, Crashed, running


def program(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> None:
    path.write_text(f"import json, os, sys\n{text}", encoding="utf-8")
    monkeypatch.setattr(child, "PROGRAMS", path)


@pytest.mark.parametrize("printed", ["", '{"vers'])
def test_a_program_that_ends_within_an_answer_has_crashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    program(monkeypatch, tmp_path / "p.py", f"print({printed!r}, end='', flush=True)\nsys.exit('no such layer')\n")
    with running(Path(sys.executable), "engine") as one, pytest.raises(Crashed, match="engine ended with exit code 1: no such layer"):
        one.ask({"do": "open"})


def test_logits_of_another_size_are_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "request = json.loads(sys.stdin.readline())\nopen(request['to'], 'wb').write(bytes(4 * 3 * 7))\nprint('{}', flush=True)\n"
    program(monkeypatch, tmp_path / "p.py", text)
    with running(Path(sys.executable), "engine") as one:
        scorer = ChildScorer(one, tmp_path, 8, "engine 1")
        with pytest.raises(Crashed, match="engine 1 has computed 21 logits for 3 tokens and a vocabulary of 8"):
            scorer.logits([1, 2, 3])
