"""The first, a middle and the last of 8,192 ranks: what a rank opens and holds does not grow with their number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("one_of_many.py")
CASES = [(layout, rank) for layout in ("dp", "zero3", "tp", "ep", "hsdp") for rank in (0, 4095, 8191)]


@pytest.mark.parametrize(
    ("layout", "rank"), [pytest.param(*case, marks=[pytest.mark.slow] if case != ("ep", 8191) else []) for case in CASES]
)
def test_a_rank_of_8192_builds_and_steps(layout: str, rank: int) -> None:
    done = subprocess.run([sys.executable, SCRIPT, layout, str(rank)], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["groups_of_all"] == 2, "the default one, and that of the thread that saves"
    assert found["groups"] <= 21 and found["files"] < 16
    assert found["memory"] < 300e6  # of which the optimizer's table of who owns which matrix is the largest part
