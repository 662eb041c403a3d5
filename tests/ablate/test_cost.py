"""What an ablation costs, and budgets of equal time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml

from lmworks.ablate import cost
from lmworks.ablate.ablate import Options, open_experiment
from lmworks.ablate.document import cost_text
from lmworks.ablate.run_set import prepare_data
from lmworks.host import machine
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.calibrate import Speed
from tiny_run import Tiny

SPEED = 1e9


def pair(tiny: Tiny, folder: Path) -> str:
    """The file of an ablation of two arms in equal time, of which one has more operations per token."""
    file = folder / "pair.yaml"
    tree = {
        "recipe": str(tiny.recipe), "out": str(folder / "out"), "equal": "time", "seeds": 2, "budget": "16384 tokens",
        "arms": {"small": [], "wide": ["model.intermediate_size=512"]},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return str(file)


def test_predicted_hours_and_equal_time(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine of known speed an arm with more operations per token gets fewer tokens, and all take as long."""
    monkeypatch.setenv(machine.VARIABLE, f"peak=1e11,speed={SPEED},cores=1")
    file = pair(tiny, tmp_path)
    before = open_experiment(file, Options())
    assert before.arms["wide"].tokens == before.arms["small"].tokens
    assert cost.cost(before, {}, 1).hours is None, "nothing has been measured"
    prepare_data(before, lambda event: None, lambda line: None)
    cost.calibrate(before, list(before.arms.values()), 1)

    after = open_experiment(file, Options())
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


def test_arms_are_measured_in_turns_on_the_batches_of_their_steps(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the turns counts, so that a moment in which other programs run costs no arm its tokens."""
    experiment = open_experiment(pair(tiny, tmp_path), Options())
    prepare_data(experiment, lambda event: None, lambda line: None)
    seen: list[tuple[int, list[np.ndarray]]] = []

    def measure(recipe: Recipe, batches: Sequence[Batch], patience: float, flops: Callable[[int], float]) -> Speed:
        seen.append((int(recipe.model.intermediate_size or 0), [batch.tokens for batch in batches]))
        speed = SPEED * (1, 9, 3)[(len(seen) - 1) // 2]
        return Speed({batch.tokens.shape[1]: speed for batch in batches}, speed, speed)

    monkeypatch.setattr("lmworks.ablate.cost.measure_apart", measure)
    arms = list(experiment.arms.values())
    cost.calibrate(experiment, arms, 1)
    assert [width for width, _ in seen] == 3 * [int(arm.recipe.model.intermediate_size or 0) for arm in arms]
    phases = arms[0].recipe.train.phases
    rows = {int(phase.sequence_length): int(phase.global_batch_tokens // phase.sequence_length) for phase in reversed(phases)}
    assert all({tokens.shape[1]: len(tokens) for tokens in batches} == rows for _, batches in seen), "as many sequences as a step has"
    speeds = cost.speeds(experiment.out)
    assert [speeds[arm.name] for arm in arms] == pytest.approx([3 * SPEED / (cost.flops_of(arm) / arm.tokens) for arm in arms], rel=1e-6)
