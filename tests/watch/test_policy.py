"""What follows from bad steps and spikes, and that it is the same after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmworks.recipe.schema.launch import Spike, Stability
from lmworks.watch.ledger import Rollback
from lmworks.watch.policy import BadSteps, Policy, RollbackRequest

NAN = float("nan")
BATCH = {"tokens": np.zeros((1, 2), np.int32)}


class Told:
    """A policy, and the lines it has reported."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = Stability(**options)
        self.lines: list[tuple[str, dict[str, Any]]] = []
        bad = BadSteps(folder, self.options.max_bad_steps, self.options.save_bad_batches, self.report)
        self.policy = Policy(self.options, bad, self.report)

    def report(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    def step(self, step: int, loss: float, norm: float = 1.0) -> RollbackRequest | None:
        return self.policy.observe(step, loss, norm, self.policy.limits(step, 0), BATCH)

    def calm(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            assert self.step(step, 2.0 + 0.01 * (step % 5)) is None

    def events(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.lines if event == name]


def test_bad_steps_in_a_row_lead_back_to_before_the_first(tmp_path):
    told = Told(tmp_path, max_bad_steps=3)
    told.calm(0, 5)
    assert [told.step(step, NAN) for step in (5, 6)] == [None, None]
    told.calm(7, 8)
    assert [told.step(step, 2.0, NAN) for step in (8, 9)] == [None, None]
    back = told.step(10, 2.0, NAN)
    assert back
    assert back.step == 8
    assert back.reason == "the gradient norm was not finite in 3 steps in a row (stability.max_bad_steps)"
    assert back.stop
    history = [Rollback(10, 8, (8, 11), "why"), Rollback(12, 7, (7, 13), "why")]
    said = str(told.policy.give_up(10, back, history))
    assert said.startswith("stopped at step 11 after 2 rollbacks: the gradient norm was not finite in 3 steps")
    assert "\n" not in said


def test_a_spike_is_left_out_and_too_many_lead_back(tmp_path):
    told = Told(tmp_path, spike={"max_in_a_row": 3})
    told.calm(0, 60)
    assert told.step(60, 4.0) is None
    told.calm(61, 65)
    assert [told.step(step, 4.0) for step in (65, 66)] == [None, None]
    back = told.step(67, 4.0)
    assert back == RollbackRequest(65, "3 spikes in a row (stability.spike)", None)
    lines = told.events("spike")
    assert [(line["step"], line["action"], line["in_a_row"]) for line in lines] == [
        (60, "skip", 1), (65, "skip", 1), (66, "skip", 2), (67, "rollback", 3),
    ]  # fmt: skip
    assert lines[0]["loss"] == 4.0
    assert 2.0 < lines[0]["loss_limit"] < 2.5
    assert (tmp_path / "step-00000060.npz").exists(), "the batch is kept for a look at it"
    told.policy.accept(67)
    assert told.step(68, 4.0) is None
    assert len(told.events("spike")) == 4, "the level is accepted"


def test_the_rate_is_lowered_and_comes_back_linearly(tmp_path):
    told = Told(tmp_path, spike={"action": "reduce_lr", "reduced_lr_factor": 0.2, "reduced_lr_steps": 4})
    told.calm(0, 50)
    assert told.policy.lr_factor(50) == 1
    assert told.step(50, 9.0) is None
    assert [round(told.policy.lr_factor(step), 6) for step in range(50, 57)] == [1, 0.2, 0.4, 0.6, 0.8, 1, 1]


def test_a_rollback_comes_at_once_where_the_recipe_says_so(tmp_path):
    told = Told(tmp_path, spike={"action": "rollback"})
    told.calm(0, 50)
    assert told.step(50, 2.0, 99.0) == RollbackRequest(50, "1 spike in a row (stability.spike)", None)


@pytest.mark.parametrize(("skip_steps", "window"), [(100, (8, 15)), (3, (12, 15))])
def test_the_window_that_is_left_out(tmp_path, skip_steps, window):
    assert Told(tmp_path, skip_steps=skip_steps).policy.window(14, 8) == window


def test_rollbacks_are_counted_in_the_phase_and_those_by_hand_are_not(tmp_path):
    policy = Told(tmp_path, max_rollbacks=2).policy
    history = [Rollback(30, 20, (20, 31), "why"), Rollback(130, 120, (120, 131), "why"), Rollback(140, 120, None)]
    assert policy.may_roll_back(history, 100)
    assert not policy.may_roll_back(history, 0)
    assert not policy.may_roll_back([*history, Rollback(150, 120, (120, 151), "why")], 100)


def test_a_resumed_policy_decides_as_an_undisturbed_one(tmp_path):
    """Interrupted after any step, through JSON as a checkpoint's meta."""
    draw = np.random.default_rng(5)
    losses = 2 + 0.01 * draw.standard_normal(200)
    losses[[70, 71, 90, 91, 92, 150]] = 6.0
    losses[[100, 101, 120, 121, 122]] = NAN
    spike = {"action": "reduce_lr", "max_in_a_row": 3, "reduced_lr_steps": 7, "window_steps": 64}

    def run(every: int | None) -> list[Any]:
        told, decided = Told(tmp_path, max_bad_steps=3, spike=spike), []
        for step, loss in enumerate(losses.tolist()):
            if every and step % every == 0:
                state = json.loads(json.dumps(told.policy.state()))
                lines, told = told.lines, Told(tmp_path, max_bad_steps=3, spike=spike)
                told.lines.extend(lines)
                told.policy.load(state)
            decided.append((told.policy.lr_factor(step), told.step(step, loss)))
        return [decided, str(told.lines), told.policy.state()]

    undisturbed = run(None)
    assert [back.step for _, back in undisturbed[0] if back] == [90, 120]
    for every in (1, 7, 50):
        assert run(every) == undisturbed


def test_off_is_off(tmp_path):
    told = Told(tmp_path, spike=None)
    for step in range(200):
        assert told.step(step, 2.0 + 50 * (step == 150)) is None
    assert told.lines == []
    assert Spike().action == "skip"
    assert Stability().spike == Spike(), "on by default"
