"""The causes in optimizer, schedule and initial weights: each is named by its signature, and silent on its look-alikes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judged import Metrics, judge, named

Change = Callable[[Metrics], None]


def times(factor: float, *names: str, first: int = 0, last: int = 10**9) -> Change:
    """Multiply metrics, of the lines from `first` to before `last`."""

    def change(metrics: Metrics) -> None:
        for name in names:
            values = metrics[name]
            metrics[name] = [
                value * factor if first <= at < last and value not in (None, ...) else value for at, value in enumerate(values)
            ]

    return change


def all_of(*changes: Change) -> Change:
    def change(metrics: Metrics) -> None:
        for one in changes:
            one(metrics)

    return change


def loss(of: Callable[[int, float], Any]) -> Change:
    def change(metrics: Metrics) -> None:
        metrics["train/loss"] = [of(at, value) for at, value in enumerate(metrics["train/loss"])]

    return change


LOGITS = tuple(f"layers/{layer}/attention_logit_max" for layer in range(2))
ACTIVATIONS = tuple(f"layers/{layer}/activation_rms" for layer in range(2))
RATES = ("optim/learning_rate", "optim/adam_learning_rate")
HIGH = ["optimizer.learning_rate=0.1"]
LOW = ["optimizer.learning_rate=0.0001"]
EARLY = ['train.phases.0.lr_schedule={"kind": "multistep", "milestone_fractions": [0.5, 0.51], "gamma": 0.04}']
COSINE = ['train.phases.0.lr_schedule={"kind": "cosine", "warmup": "2%", "min_lr_ratio": 0.0}']
DECAY = ['train.phases.0.lr_schedule={"kind": "wsd", "warmup": "5%", "decay": "10%", "min_lr_ratio": 0.0}']

grown = all_of(times(40, *LOGITS), times(1000, *ACTIVATIONS), times(6, "optim/weight_norm"))
still = all_of(
    times(0.02, "optim/update_ratio"),
    lambda metrics: metrics.update({"optim/weight_norm": [17.0 if value is not ... else ... for value in metrics["optim/weight_norm"]]}),
    loss(lambda at, value: 6.9 - 0.001 * at),
)
flat = loss(lambda at, value: value if at < 100 else 4.0 + 0.05 * (at % 2))
NAMED: dict[str, tuple[Change, list[str], str]] = {
    "weights, activations and scores grow": (grown, HIGH, "learning-rate-too-high"),
    "the loss rises at the peak, and there are no lines of layers": (
        all_of(
            loss(lambda at, value: 7.5 if at > 20 else value),
            lambda metrics: (
                [metrics.pop(name) for name in [*metrics] if name.startswith("layers/") or name == "optim/weight_norm"] and None
            ),
        ),
        HIGH,
        "learning-rate-too-high",
    ),
    "the weights do not move": (still, LOW, "learning-rate-too-low"),
    "the rate ends at half of the steps": (flat, EARLY, "schedule-ends-early"),
    "the first loss is far above ln V": (
        loss(lambda at, value: value + 4 / (1 + at / 5)),
        ["model.initializer_range=0.5"],
        "init-too-wide",
    ),
}


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("case", NAMED)
def test_a_signature_is_named(case: str, every: int, tmp_path: Path) -> None:
    change, overrides, code = NAMED[case]
    found = judge(tmp_path, change, overrides=overrides, every=every)
    assert named(found)[:1] == [code]
    for one in [*found.problems, *found.unsure]:
        assert one.sure and one.changes and one.check_afterwards and one.excluded and all(m.source for m in one.evidence if m.healthy)


SILENT: dict[str, tuple[Change, list[str]]] = {
    "nothing happened": (times(1, "train/loss"), []),
    "three times the rate": (all_of(times(1.7, "optim/weight_norm"), times(2, *LOGITS)), ["optimizer.learning_rate=0.03"]),
    "a third of the rate": (times(0.5, "optim/update_ratio"), ["optimizer.learning_rate=0.003"]),
    "a cosine to zero": (times(1, "train/loss"), COSINE),
    "a drop in the decay": (loss(lambda at, value: value - max(0, at - 180) * 0.03), DECAY),
    "a jump of the mixture": (loss(lambda at, value: value + 0.7 * (at > 140)), []),
    "one spike that recovers": (loss(lambda at, value: value + 3 * (at == 120)), []),
    "every step is clipped": (lambda metrics: metrics.update({"optim/clipped": [1.0] * 200}), []),
    "attention scores grow at a good rate": (times(5, *LOGITS), []),
    "the rate is low at the end, and the loss falls": (loss(lambda at, value: 6.9 - 0.015 * at), EARLY),
    "a narrow deviation of the initial weights": (times(1, "train/loss"), ["model.initializer_range=0.05"]),
}


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("case", SILENT)
def test_a_look_alike_is_not(case: str, every: int, tmp_path: Path) -> None:
    change, overrides = SILENT[case]
    found = judge(tmp_path, change, overrides=overrides, every=every)
    assert [code for code in named(found) if not code.endswith("?")] == []


def test_a_rate_that_is_too_low_is_told_from_eps_and_from_a_short_run(tmp_path: Path) -> None:
    eps = ["optimizer.kind=adamw", "optimizer.eps=0.1", "optimizer.learning_rate=0.001"]
    assert named(judge(tmp_path / "eps", still, overrides=eps, only="learning-rate-too-low")) == []
    assert named(judge(tmp_path / "short", still, steps=50, overrides=LOW, only="learning-rate-too-low")) == []
    assert "steps are done" in judge(tmp_path / "begun", still, steps=40, planned=400, overrides=LOW).not_judged["learning-rate-too-low"]


def test_a_rate_is_judged_during_the_run_and_lowered_to_the_law(tmp_path: Path) -> None:
    (found,) = judge(tmp_path, grown, steps=60, planned=400, overrides=HIGH, only="learning-rate-too-high").problems
    first, second = found.changes
    assert first.key == "optimizer.learning_rate" and 0.002 < float(first.value) <= 0.02 and second.key == "optimizer.adam_learning_rate"
