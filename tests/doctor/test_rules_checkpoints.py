"""The causes around checkpoints and resumes: each is named by its signature, and silent on its look-alikes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judged import Metrics, judge, named

RESUME = {"event": "resume", "step": 120, "tokens": 122_880, "steps": 200, "planned_tokens": 204_800}
RESET = {"event": "optimizer_reset", "step": 120, "kept": "checkpoints/step-00000120.with-optimizer-1"}
FIRST = {
    "event": "resumed_step",
    "step": 120,
    "loss": 3.7,
    "saved_loss": 3.7,
    "learning_rate": 0.01,
    "saved_learning_rate": 0.01,
    "rows": "00",
    "saved_rows": "01",
    "repeated": 0.0,
}
ALLOWED = {"event": "recipe_changed", "allowed": [{"key": "optimizer.learning_rate", "old": 0.01, "new": 0.02}], "harmless": []}


def rate_times(factor: float, since: int = 120, until: int = 200) -> Any:
    def change(metrics: Metrics) -> None:
        for name in ("optim/learning_rate", "optim/adam_learning_rate"):
            metrics[name][since:until] = [factor * value for value in metrics[name][since:until]]

    return change


def bump(metrics: Metrics) -> None:
    for step in range(120, 140):
        metrics["train/loss"][step] += 0.8 * (1 - (step - 120) / 20)


def level(metrics: Metrics) -> None:
    metrics["train/loss"][120:] = [value + 0.8 for value in metrics["train/loss"][120:]]


def save_seconds(seconds: float, every: int) -> Any:
    def change(metrics: Metrics) -> None:
        metrics["perf/save_seconds"] = [seconds if step % every == 0 else 0.0 for step in range(1, 201)]

    return change


def clock_set(metrics: Metrics) -> None:
    """By an hour in the middle, while saves take a sixth of the time."""
    save_seconds(17.0, 10)(metrics)
    metrics["time"] = [1e9 + 10.0 * step + 3600.0 * (step > 100) for step in range(1, 201)]
    metrics["perf/elapsed_seconds"] = [10.0 * step for step in range(1, 201)]


def repeated(share: float) -> Any:
    def change(metrics: Metrics) -> None:
        metrics["train/repeated_rows"] = [share] * len(metrics["train/loss"])

    return change


def unchanged(metrics: Metrics) -> None:
    pass


REFUSED = {"event": "checkpoint_refused", "path": "checkpoints/step-00000150", "reason": "data-00000-00000.bin has another hash"}
CORRUPT = {"event": "corruption", "step": 69, "ranks": [3], "certain": True, "what": "the output of layer 0 was another one"}
RECHECK = ["stability.recheck_every=10 steps"]

RESTART = {"event": "restart", "step": 120, "ranks": [0], "hosts": ["a"], "in_a_row": 1}
SAVING = "rank 0 on a (process 7) was alive but did not enter the collective: it had been at step 120 (saving) for 640 s"
BUSY = "rank 0 on a (process 7) was alive but did not enter the collective: it had been at step 120 (data) for 640 s"

FULL = {
    "event": "save_failed",
    "step": 41,
    "in_a_row": 1,
    "reason": "the checkpoint of step 40 was not saved: the disk of runs/a/checkpoints is full (2.0 MB free); free some space",
}

NAMED: dict[str, tuple[Any, list[dict[str, Any]], list[str], list[str]]] = {
    "a checkpoint is refused": (unchanged, [REFUSED], [], ["damaged-checkpoint"]),
    "moments are reset": (unchanged, [RESET, RESUME], [], ["optimizer-state-lost"]),
    "the loss bumps at a resume": (bump, [RESUME], [], ["optimizer-state-lost?"]),
    "rows come again after a resume": (repeated(0.0), [RESUME, FIRST | {"repeated": 1.0}], [], ["data-position-lost"]),
    "the rate is doubled by name": (rate_times(0.5, 0, 120), [ALLOWED, RESUME], ["optimizer.learning_rate=0.02"], ["schedule-changed"]),
    "the rate jumps at a resume": (rate_times(0.25), [RESUME], [], ["schedule-changed"]),
    "the rate is another one from the first step": (rate_times(0.5, 0), [], [], ["schedule-changed"]),
    "saves take a sixth of the time": (save_seconds(17.0, 10), [], [], ["slow-saves"]),
    "saves take a sixth of the time, and the clock is set": (clock_set, [], [], ["slow-saves"]),
    "a save finds the disk full": (unchanged, [FULL], [], ["disk-full"]),
    "a rank was still saving": (unchanged, [RESTART | {"reason": SAVING}], [], ["save-timeout", "hung-rank"]),
    "the second computation differs": (unchanged, [CORRUPT], RECHECK, ["silent-corruption"]),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_signature_is_named(case: str, tmp_path: Path) -> None:
    change, events, overrides, expected = NAMED[case]
    found = judge(tmp_path, change, events, overrides)
    assert named(found) == expected
    for one in [*found.problems, *found.unsure]:
        assert one.changes and one.check_afterwards and (one.sure or one.next_measurement)


SILENT: dict[str, tuple[Any, list[dict[str, Any]], list[str]]] = {
    "nothing happened": (unchanged, [], []),
    "killed and resumed": (unchanged, [RESUME, FIRST], []),
    "resumed with other keys": (unchanged, [{"event": "recipe_changed", "allowed": [{"key": "data.x", "old": 1, "new": 2}]}, RESUME], []),
    "moments are reset of a checkpoint that nobody resumed from": (unchanged, [RESET], []),
    "a level at a resume that stays": (level, [RESUME], []),
    "rows come again before the resume, too": (repeated(1.0), [RESUME, FIRST | {"repeated": 1.0}], []),
    "the rate is lowered after a spike": (rate_times(0.3, 120), [{"event": "spike", "step": 119, "action": "reduce_lr"}], []),
    "saves take a hundredth of the time": (save_seconds(1.0, 10), [], []),
    "a save fails for another reason": (unchanged, [FULL | {"reason": "the file system is read-only"}], []),
    "the second computation is the same": (unchanged, [], RECHECK),
}


@pytest.mark.parametrize("case", SILENT)
def test_a_look_alike_is_not(case: str, tmp_path: Path) -> None:
    assert named(judge(tmp_path, *SILENT[case])) == []


def test_a_checkpoint_whose_files_are_cut_is_found_before_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-00000100"
    folder.mkdir(parents=True)
    (folder / "data-00000-00000.bin").write_bytes(bytes(100))
    (folder / "manifest.json").write_text(json.dumps({"files": {"data-00000-00000.bin": {"bytes": 100}}}))
    assert named(judge(tmp_path)) == []
    (folder / "data-00000-00000.bin").write_bytes(bytes(90))
    found = judge(tmp_path)
    assert named(found) == ["damaged-checkpoint"] and "90 bytes instead of 100" in found.problems[0].where
    folder.rename(tmp_path / "checkpoints" / "step-00000100.damaged-1")  # set aside already
    assert named(judge(tmp_path)) == []


def test_the_change_restores_the_former_rate(tmp_path: Path) -> None:
    recipe = ["optimizer.learning_rate=0.02"]
    (found,) = judge(tmp_path, rate_times(0.5, 0, 120), [ALLOWED, RESUME], recipe, only="schedule-changed").problems
    assert [(one.key, one.value) for one in found.changes] == [("optimizer.learning_rate", "0.01")] and found.steps == (120, 200)


def test_a_rank_that_is_missing_and_does_not_save_has_another_cause(tmp_path: Path) -> None:
    assert named(judge(tmp_path, events=[RESTART | {"reason": BUSY}])) == ["hung-rank"]


def test_limits_that_are_set_already_are_not_turned_back(tmp_path: Path) -> None:
    own = ["launch.timeout=1 min", "launch.exclude_after_failures=1", "checkpoints.local=/scratch", "checkpoints.keep_last=1"]
    (hung,) = judge(tmp_path / "hung", events=[RESTART | {"reason": BUSY}], overrides=own, only="hung-rank").problems
    assert [one.key for one in hung.changes] == [""]
    (full,) = judge(tmp_path / "full", events=[FULL], overrides=own, only="disk-full").problems
    assert [one.key for one in full.changes] == [""]
    slow = ["launch.timeout=2 h", "checkpoints.local=/scratch"]
    (saving,) = judge(tmp_path / "save", events=[RESTART | {"reason": SAVING}], overrides=slow, only="save-timeout").problems
    assert [(one.key, one.value) for one in saving.changes] == [("launch.timeout", "240 min")]


def test_runs_of_earlier_versions_are_not_judged(tmp_path: Path) -> None:
    assert "earlier version" in judge(tmp_path, events=[RESUME]).not_judged["data-position-lost"]
