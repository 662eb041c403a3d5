"""The causes in numbers: each is named by its signature, and silent on its look-alikes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from judged import Metrics, judge, named

from lmworks.recipe.load import load_recipe_text
from written_run import RECIPE

FP16 = {"event": "start", "steps": 200, "tokens": 204_800, "precision": "float16"}
FP32 = FP16 | {"precision": "float32"}
FORWARD = "mm of layers.0.ffn.down, forward pass: its result is infinite"
ROLLBACK = {"event": "rollback", "step": 69, "to_step": 40, "skip": [40, 70], "reason": "not finite"}


def bad(steps: Any) -> list[dict[str, Any]]:
    return [{"event": "bad_step", "step": step, "loss": "nan", "grad_norm": "nan", "in_a_row": at + 1} for at, step in enumerate(steps)]


def first(step: int, what: str = FORWARD) -> dict[str, Any]:
    return {"event": "not_finite", "step": step, "first": what}


def nulls(begin: int, end: int) -> Any:
    def change(metrics: Metrics) -> None:
        for name in ("train/loss", "optim/grad_norm"):
            metrics[name][begin:end] = [None] * (end - begin)

    return change


def rise(nats: float, steps: Any, norm: float = 10.0, heal: float = 0.0) -> Any:
    """The loss of some steps is higher, with a larger gradient; `heal`: steps in which it comes back afterwards."""

    def change(metrics: Metrics) -> None:
        for step in steps:
            metrics["train/loss"][step] += nats
            metrics["optim/grad_norm"][step] *= norm
        for step in range(max(steps) + 1, min(200, int(max(steps) + 1 + heal))):
            metrics["train/loss"][step] += nats * (1 - (step - max(steps)) / (heal + 1))

    return change


def before(step: int, norm: float) -> Any:
    """The gradient of the step before has this norm, as a share of what it would have."""

    def change(metrics: Metrics) -> None:
        metrics["optim/grad_norm"][step - 1] *= norm

    return change


def smooth(metrics: Metrics) -> None:
    metrics["train/loss"] = [6.9 - 0.015 * at for at in range(200)]


def scale(values: Any) -> Any:
    def change(metrics: Metrics) -> None:
        metrics["optim/loss_scale"] = [float(values(step)) for step in range(200)]

    return change


def zero_gradient(begin: int) -> Any:
    def change(metrics: Metrics) -> None:
        metrics["optim/grad_norm"][begin:] = [0.0] * (200 - begin)

    return change


def accumulated(power: float, noise: float = 0.02) -> Any:
    def change(metrics: Metrics) -> None:
        metrics["optim/grad_norm"] = [
            0.5 * step**power * (1 + noise * (-1) ** step) * (value / 0.7) ** (noise > 0.1)
            for step, value in enumerate(metrics["optim/grad_norm"], 1)
        ]

    return change


def rows(count: int) -> Any:
    def change(metrics: Metrics) -> None:
        metrics["train/sequence_length"] = [1024.0 / count] * 200

    return change


def both(*changes: Any) -> Any:
    def change(metrics: Metrics) -> None:
        for one in changes:
            one(metrics)

    return change


def absurd(metrics: Metrics) -> None:
    name = "layers/1/activation_rms"
    metrics[name] = [value if value is ... or at < 100 else 1e18 for at, value in enumerate(metrics[name])]


def unchanged_weights(share: float) -> Any:
    def change(metrics: Metrics) -> None:
        metrics["optim/unchanged_weights"] = [... if value is ... else share for value in metrics["optim/unchanged_weights"]]
        metrics["train/loss"] = [max(value, 5.0) for value in metrics["train/loss"]]

    return change


def nothing(metrics: Metrics) -> None:
    pass


NAMED: dict[str, tuple[Any, list[dict[str, Any]], list[str], str]] = {
    "fp16 overflows in every forward pass": (nulls(0, 200), [FP16, first(0), *bad(range(10))], [], "fp16-overflow"),
    "the scale falls to 1": (both(scale(lambda at: max(1.0, 65536 / 2**at)), nulls(0, 30)), [FP16, *bad(range(30))], [], "fp16-overflow"),
    "one step of random rows": (both(rise(3.0, [120]), rows(8)), [], [], "bad-batch"),
    "a burst of random rows": (both(rise(4.0, range(120, 128)), rows(8)), [], [], "bad-batch"),
    "a spike that a roll-back has taken out of the lines": (
        rows(8),
        [{"event": "spike", "step": 120, "loss": 8.5, "grad_norm": 12.0, "action": "rollback"}],
        [],
        "bad-batch",
    ),
    "the same operator on many batches": (
        nulls(60, 200),
        [FP32, first(60), *bad(range(60, 70)), ROLLBACK, first(70), *bad(range(70, 80))],
        [],
        "operator-overflow",
    ),
    "the same operator on every seventh batch": (
        nothing,
        [FP32, *(first(at) for at in range(63, 98, 7)), *bad(range(63, 98, 7))],
        [],
        "operator-overflow",
    ),
    "the gradient vanishes": (zero_gradient(100), [], [], "frozen-gradient"),
    "the gradient grows with the steps": (accumulated(1.0), [], [], "gradient-not-cleared"),
    "a step leaves the weights as they are": (unchanged_weights(0.97), [], [], "low-precision-weights"),
}


@pytest.mark.parametrize("case", NAMED)
def test_a_signature_is_named(case: str, tmp_path: Path) -> None:
    change, events, overrides, code = NAMED[case]
    found = judge(tmp_path, change, events, overrides)
    assert named(found)[:1] == [code]
    one = found.problems[0]
    assert one.changes and one.check_afterwards and one.excluded and all(m.source for m in one.evidence if m.healthy)
    for advised in one.changes:
        load_recipe_text(RECIPE, [f"{advised.key}={advised.value}"] if advised.key else [])


NAMED |= {
    "an eighth of many rows is bad": (both(rise(0.8, [120]), rows(128)), [], [], "bad-batch"),
    "a few of many rows are bad, and nothing is noisy": (both(smooth, rise(0.5, [120]), rows(128)), [], [], "bad-batch"),
    "bad rows early in the run": (both(rise(4.0, [50]), rows(8)), [], [], "bad-batch"),
    "the gradient was somewhat larger a step before": (both(rise(4.0, [120]), before(120, 1.4), rows(8)), [], [], "bad-batch"),
    "two bursts of bad rows": (both(rise(4.0, [60, 61]), rise(4.0, range(120, 124)), rows(8)), [], [], "bad-batch"),
    "bad rows that leave a little behind": (both(rise(4.0, [120]), rise(0.4, range(121, 160), norm=1.0), rows(8)), [], [], "bad-batch"),
}

SILENT: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "the scale halves now and then": (scale(lambda at: 65536 / 2 ** (at // 60)), [FP16, *(bad([at])[0] for at in (1, 60, 120))]),
    "the first steps find the scale": (scale(lambda at: 4096), [FP16, *bad(range(4))]),
    "not finite in fp32 once": (nulls(60, 61), [FP32, first(60), *bad([60])]),
    "a spike that recovers": (both(rise(2.0, [110], heal=25), rows(8)), []),
    "the gradient was larger a step before: the weights": (both(rise(4.0, [120]), before(120, 2.6), rows(8)), []),
    "the gradient is larger a step after: the weights": (both(rise(4.0, [120]), before(122, 6.5), rows(8)), []),
    "one odd row of two": (both(rise(4.0, [120]), rows(2)), []),
    "a rise of eight times the noise": (both(rise(0.4, [120]), rows(128)), []),
    "a rise of a fifth of a nat without noise": (both(smooth, rise(0.2, [120]), rows(128)), []),
    "half of the rise stays": (both(rise(4.0, [120]), rise(2.0, range(121, 160), norm=1.0), rows(8)), []),
    "thirty steps of another kind of text": (both(rise(2.5, range(120, 150)), rows(8)), []),
    "odd rows all the time": (both(rise(3.0, range(30, 200, 12)), rows(8)), []),
    "a jump that stays": (both(rise(3.0, range(120, 200)), rows(8)), []),
    "different operators": (
        nothing,
        [FP32, first(60), first(70, "exp of layers.1.attention, forward pass: its result is infinite"), *bad([60, 70, 80])],
    ),
    "a gradient norm that rises slowly": (accumulated(0.4), []),
    "a gradient norm that rises with noise": (accumulated(1.0, 0.5), []),
    "a few steps without gradient": (both(lambda metrics: metrics["optim/grad_norm"].__setitem__(slice(50, 53), [0.0] * 3)), []),
    "half of the weights keep their bits, and the loss falls": (
        lambda metrics: metrics.update(
            {"optim/unchanged_weights": [... if value is ... else 0.5 for value in metrics["optim/weight_norm"]]}
        ),
        [],
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_a_look_alike_is_not(case: str, tmp_path: Path) -> None:
    assert named(judge(tmp_path, *SILENT[case])) == []


def test_an_absurd_activation_alone_is_not_sure(tmp_path: Path) -> None:
    found = judge(tmp_path, absurd)
    assert named(found) == ["operator-overflow?"] and "replay" in found.unsure[0].next_measurement


def test_a_divergence_is_told_from_an_operator_by_the_loss_before_it(tmp_path: Path) -> None:
    def diverges(metrics: Metrics) -> None:
        for at in range(40, 60):
            metrics["train/loss"][at] += 0.15 * (at - 39)
        nulls(60, 200)(metrics)

    assert named(judge(tmp_path, diverges, [FP32, first(60), *bad(range(60, 70))], only="operator-overflow")) == []


def test_a_gradient_of_zero_has_other_causes_where_no_token_has_a_label(tmp_path: Path) -> None:
    masked = both(zero_gradient(0), lambda metrics: metrics.update({"train/valid_tokens": [0.0] * 200}))
    assert named(judge(tmp_path, masked, only="frozen-gradient")) == []


def test_bad_rows_are_shown_and_skipped_by_the_numbers_of_batches(tmp_path: Path) -> None:
    """Line 121 of the metrics is that of batch 120, which a bad step of 120 in the ledger is, too."""
    run = tmp_path / "my run"
    (found,) = judge(run, both(rise(4.0, range(120, 124)), rows(8)), only="bad-batch").problems
    assert found.steps == (121, 124)
    assert f"lmworks doctor '{run}' --find-rows 120;" in found.changes[0].advice
    assert f"lmworks ckpt rollback '{run}' STEP --skip-steps 120:124" in found.changes[1].advice


def test_without_a_gradient_bad_rows_are_told_by_their_loss_alone(tmp_path: Path) -> None:
    still = both(rise(4.0, [120]), rows(8), lambda metrics: metrics.update({"optim/grad_norm": [0.0] * 200}))
    found = judge(tmp_path, still, only="bad-batch")
    assert named(found) == ["bad-batch?"] and not found.not_judged
