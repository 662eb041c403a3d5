"""A run that has gone through all stages, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_run import Tiny


@pytest.fixture(scope="session")
def finished(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    run = tiny.copy(tmp_path_factory.mktemp("finished") / "run")
    run.walk()
    return run


@pytest.fixture
def run(finished: Tiny, tmp_path: Path) -> Tiny:
    """A finished run of the test's own."""
    return finished.copy(tmp_path / "run")
