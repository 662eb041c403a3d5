"""Runs to make pages of."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_runs import write_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run called trial."""
    run = tmp_path / "trial"
    write_run(run)
    return run
