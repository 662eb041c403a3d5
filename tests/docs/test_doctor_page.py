"""The example of docs/doctor.md is what the command prints."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from doc_pages import ROOT

from lmworks.cli import main
from written_run import write_run


def test_the_example_is_what_the_doctor_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    example = textwrap.dedent(page.split("<!-- example -->\n")[1].split("<!-- end of example -->")[0])
    full = {"event": "save_failed", "step": 30, "reason": "[Errno 28] No space left on device", "in_a_row": 1}
    write_run(tmp_path / "run", {"train/loss": [5.0 - 0.01 * i for i in range(60)]}, [full])
    monkeypatch.setattr("sys.argv", ["lmworks", "doctor", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1 and example in capsys.readouterr().out
