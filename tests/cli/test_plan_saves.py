"""`lmworks plan` says how often a run saves, and what failures are expected to cost."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from command import Lmworks

from lmworks.recipe.load import shipped_folder


@pytest.mark.parametrize(
    ("recipe", "cluster"), [("glm46-355b-a32b", "8192xh800"), ("glm45-air-106b-a12b", "8192xh800"), ("smollm3-3b", "64xh100")]
)
def test_a_plan_prints_the_interval_and_what_failures_cost(lmworks: Lmworks, recipe: str, cluster: str) -> None:
    found = json.loads(lmworks("plan", recipe, "--cluster", cluster, "--json").out)
    assert 0 < found["saves"]["interval"] <= 1800
    expected = found["saves"]["interval"] / 2 / found["saves"]["between_failures"]
    assert found["saves"]["lost"] == pytest.approx(expected) and 0 < expected < 0.05
    said = " ".join(lmworks("plan", recipe, "--cluster", cluster).out.split())
    assert re.search(r"saves at the latest every [\d.]+ (minutes|seconds), so that a failure costs", said)


def test_the_speed_of_the_disk_gives_the_optimum(lmworks: Lmworks, tmp_path: Path) -> None:
    """A checkpoint of 2.9 TB in 29 s, and one failure in 6.2 hours: with saves that training waits for, the optimum is 19 minutes."""
    own = tmp_path / "own.yaml"
    text = (shipped_folder() / "clusters" / "8192xh800.yaml").read_text(encoding="utf-8")
    own.write_text(text + "disk_gb_per_second: 100\n", encoding="utf-8")
    words = ("plan", "glm46-355b-a32b", "--cluster", str(own), "--set", "checkpoints.asynchronous=false")
    found = json.loads(lmworks(*words, "--json").out)
    written = found["disk"]["checkpoint"] / 1e11
    assert found["saves"]["interval"] == pytest.approx(math.sqrt(2 * written * found["saves"]["between_failures"]))
    assert found["overheads"]["saves"] == pytest.approx(found["compute_seconds"] / found["saves"]["interval"] * written, rel=0.2)


def test_a_save_in_the_background_needs_host_memory(lmworks: Lmworks) -> None:
    """A copy of the state, divided among the nodes; none where training waits for the save."""
    options = ("plan", "quickstart", "--cluster", "16xh100")
    one, other = ("".join(lmworks(*options, "--set", f"checkpoints.asynchronous={said}").out.split()) for said in ("true", "false"))
    size, staged = re.search(r"checkpoint([\d.]+)MBeach", one), re.search(r"copyinhostmemory:([\d.]+)MBpernode", one)
    assert size and staged and float(staged[1]) == pytest.approx(float(size[1]) / 2, rel=0.02)
    assert "hostmemory" not in other
