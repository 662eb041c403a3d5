"""A copy of the run that has gone through all stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_run import Tiny


@pytest.fixture
def run(finished: Tiny, tmp_path: Path) -> Tiny:
    """A finished run of the test's own."""
    return finished.copy(tmp_path / "run")
