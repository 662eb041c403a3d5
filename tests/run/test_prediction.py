"""What a run has measured is read without judging it."""

from __future__ import annotations

import pytest

from lmworks.pages import read_run as pages
from lmworks.run.prediction import summary
from tiny_run import Tiny


def test_the_summary_of_a_run_asks_the_doctor_nothing(finished: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging takes longer than reading a small run, and only pages show it."""
    monkeypatch.setattr(pages, "read_findings", lambda *given: pytest.fail("the doctor was asked"))
    assert summary(finished.run_dir)
