"""What an ablation costs, and budgets of equal time."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lmworks.ablate import cost
from lmworks.ablate.ablate import Options, open_experiment
from lmworks.ablate.document import cost_text
from lmworks.ablate.run_set import prepare_data
from lmworks.host import machine
from tiny_run import Tiny

SPEED = 1e9


def test_predicted_hours_and_equal_time(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of known speed an arm with more operations per token gets fewer tokens, and all take as long."""
    monkeypatch.setenv(machine.VARIABLE, f"speed={SPEED},cores=1")
    file = tmp_path / "pair.yaml"
    tree = {
        "recipe": str(tiny.recipe), "out": str(tmp_path / "out"), "equal": "time", "seeds": 2, "budget": "16384 tokens",
        "arms": {"small": [], "wide": ["model.intermediate_size=512"]},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    before = open_experiment(str(file), Options())
    assert before.arms["wide"].tokens == before.arms["small"].tokens
    assert cost.cost(before, {}, 1).hours is None, "nothing has been measured"
    prepare_data(before, lambda event: None, lambda line: None)
    cost.calibrate(before, list(before.arms.values()), 1)

    after = open_experiment(str(file), Options())
    small, wide = after.arms.values()
    flops = {arm.name: cost.flops_of(arm) for arm in (small, wide)}
    assert small.tokens == before.arms["small"].tokens and wide.tokens < 0.75 * small.tokens
    assert flops["wide"] == pytest.approx(flops["small"], rel=0.05)
    found = cost.cost(after, {}, 2)
    assert (found.runs, found.tokens, found.finished) == (4, 2 * (small.tokens + wide.tokens), 0)
    steps = 2 * sum(flops.values()) / SPEED / 3600
    assert steps / 2 < found.hours < 2 * steps, "two side by side; validation takes time too"  # type: ignore[operator]
    assert "4 runs" in cost_text(found.to_json()) and "from a calibration" in cost_text(found.to_json())

    directory = after.runs[0].directory
    measured = cost.cost(after, {directory: 100.0}, 1)
    assert measured.basis == "finished runs" and measured.measured_hours == pytest.approx(100 / 3600)
    assert measured.predicted_hours_of_finished == pytest.approx(cost.cost(after, {}, 1).hours / 4, rel=0.1)  # type: ignore[operator]
