"""DPO and GRPO improve a small model (`glm-tiny`), on pairs and problems that it was not trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def curve(folder: Path, stage: str) -> list[float]:
    """The stage's measure at its first step, and on held-out data after each validation."""
    script = ROOT / "benchmarks" / "alignment.py"
    subprocess.run([sys.executable, str(script), str(folder), "--threads", "1", "--stages", stage], check=True)
    return [value for _, value in json.loads((folder / "curves.json").read_text(encoding="utf-8"))[stage]]


@pytest.mark.slow
def test_dpo_prefers_the_chosen_answers_of_pairs_it_has_not_seen(tmp_path: Path) -> None:
    first, *_, last = curve(tmp_path, "dpo")
    assert first == 0.5
    assert last >= 0.8
    assert "held-out pairs" in (tmp_path / "dpo" / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_grpo_learns_a_task_that_the_model_seldom_did(tmp_path: Path) -> None:
    first, *_, last = curve(tmp_path, "grpo")
    assert first < 0.15
    assert last >= 0.6
    assert "held-out prompts" in (tmp_path / "grpo" / "report.html").read_text(encoding="utf-8")
