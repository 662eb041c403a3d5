"""The causes in optimizer, schedule and initial weights: each is named by its signature, and silent on its look-alikes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judged import Metrics, judge, named

from lmworks.recipe.load import load_recipe_text
from lmworks.watch.diagnosis import diagnose
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Finding
from lmworks.watch.run_files import open_run
from written_run import RECIPE

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


def without_layers(metrics: Metrics) -> None:
    for name in [*metrics]:
        if name.startswith("layers/") or name == "optim/weight_norm":
            del metrics[name]


def large_gradients(factor: float, every: int) -> Change:
    def change(metrics: Metrics) -> None:
        metrics["optim/grad_norm"] = [0.7 * factor if at % every == 15 else value for at, value in enumerate(metrics["optim/grad_norm"])]

    return change


unclipped = large_gradients(80, 20)


def noise(of: float) -> Change:
    return loss(lambda at, value: value + of * (1 if at * 2654435761 % 4294967296 > 2147483648 else -1))


def put(values: Callable[[int], float], *names: str) -> Change:
    """Other values, of the lines that have the metric."""

    def change(metrics: Metrics) -> None:
        for name in names:
            metrics[name] = [... if value is ... else values(at) for at, value in enumerate(metrics[name])]

    return change


grown = all_of(put(lambda at: 20 + 10 * at, *LOGITS), put(lambda at: 5 * at, *ACTIVATIONS), times(6, "optim/weight_norm"))
still = all_of(
    times(0.02, "optim/update_ratio"),
    lambda metrics: metrics.update({"optim/weight_norm": [17.0 if value is not ... else ... for value in metrics["optim/weight_norm"]]}),
    loss(lambda at, value: 6.9 - 0.001 * at),
)
flat = loss(lambda at, value: value if at < 100 else 4.0 + 0.05 * (at % 2))
slow = loss(lambda at, value: 6.9 - 0.02 * min(at, 100) - 0.003 * max(0, at - 100))
moves_little = all_of(still, put(lambda at: 0.0075 / (1 + at / 50), "optim/update_ratio"))
NO_WARMUP = ['train.phases.0.lr_schedule={"kind": "wsd", "warmup": "0%", "decay": "20%"}', *HIGH]
EPS = ["optimizer.kind=adamw", "optimizer.eps=0.01"]
UNCLIPPED = ["optimizer.max_grad_norm=0"]
SMALL = ["train.phases.0.global_batch_tokens=64 tokens"]
NAMED: dict[str, tuple[Change, list[str], str]] = {
    "weights, activations and scores grow": (grown, HIGH, "learning-rate-too-high"),
    "the loss rises at the peak, and there are no lines of layers": (
        all_of(loss(lambda at, value: 7.5 if at > 20 else value), without_layers),
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
    "the gradients are below eps": (times(0.2, "optim/update_ratio"), EPS, "eps-too-large"),
    "the weights move and do not grow": (times(0.5, "optim/weight_norm"), ["optimizer.weight_decay=10"], "weight-decay-too-strong"),
    "the scores grow and grow, and nothing else does": (
        put(lambda at: 1.0 + 2 * at, *LOGITS),
        [],
        "attention-logits-growing",
    ),
    "the head grows in the decay": (
        all_of(put(lambda at: 5 + max(0, at - 150) ** 1.2, "optim/head_norm"), times(2.0, "train/z_loss", first=170)),
        [],
        "head-norm-growing",
    ),
}
NAMED_FROM_EVERY_LINE: dict[str, tuple[Change, list[str], str]] = {
    "the second step is worse than the first": (loss(lambda at, value: 7.3 if at == 1 else value), NO_WARMUP, "no-warmup"),
    "every twentieth gradient is large": (unclipped, UNCLIPPED, "no-clipping"),
    "noise of half a nat, and a batch of 64 tokens": (
        all_of(noise(0.5), put(lambda at: 64.0, "train/batch_tokens")),
        SMALL,
        "batch-too-small",
    ),
}


def assert_named(case: tuple[Change, list[str], str], every: int, folder: Path) -> None:
    change, overrides, code = case
    found = judge(folder, change, overrides=overrides, every=every)
    assert named(found)[:1] == [code]
    for one in [*found.problems, *found.unsure]:
        assert one.sure and one.changes and one.check_afterwards and one.excluded and all(m.source for m in one.evidence if m.healthy)
        for advised in one.changes:
            load_recipe_text(RECIPE, [*overrides, *([f"{advised.key}={advised.value}"] if advised.key else [])])


LATE = ['train.phases.0.lr_schedule={"kind": "multistep", "milestone_fractions": [0.7, 0.71], "gamma": 0.07}']
NAMED |= {
    "eps is a third of the gradients": (times(0.2, "optim/update_ratio"), ["optimizer.kind=adamw", "optimizer.eps=0.001"], "eps-too-large"),
    "a decay of 1.5, and weights that move and do not grow": (
        times(0.4, "optim/weight_norm"),
        ["optimizer.weight_decay=1.5"],
        "weight-decay-too-strong",
    ),
    "the weights move by less than half of their norm": (moves_little, LOW, "learning-rate-too-low"),
    "the rate ends at half of the steps, and the loss falls a little": (slow, EARLY, "schedule-ends-early"),
}


NAMED_FROM_EVERY_LINE |= {
    "one of forty gradients is twenty times the others": (large_gradients(25, 40), UNCLIPPED, "no-clipping"),
    "the rate ends at 0.5% of the peak at 70% of the steps": (
        loss(lambda at, value: value if at < 140 else 3.6 + 0.05 * (at % 2)),
        LATE,
        "schedule-ends-early",
    ),
}


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("case", NAMED)
def test_a_signature_is_named(case: str, every: int, tmp_path: Path) -> None:
    assert_named(NAMED[case], every, tmp_path)


@pytest.mark.parametrize("case", NAMED_FROM_EVERY_LINE)
def test_a_signature_in_single_steps_is_named(case: str, tmp_path: Path) -> None:
    assert_named(NAMED_FROM_EVERY_LINE[case], 1, tmp_path)


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
    "the rate is low at the end, and the loss falls": (
        loss(lambda at, value: 6.9 - 0.02 * min(at, 100) - 0.012 * max(0, at - 100)),
        EARLY,
    ),
    "a batch of 60% of the law, and noise": (all_of(noise(0.5), put(lambda at: 750.0, "train/batch_tokens")), []),
    "eps at a fortieth of the gradients": (times(0.2, "optim/update_ratio"), ["optimizer.kind=adamw", "optimizer.eps=5e-5"]),
    "weight decay of 0.3, and weights that move far": (
        times(0.3, "optim/weight_norm"),
        ["optimizer.weight_decay=0.3", "optimizer.learning_rate=0.05"],
    ),
    "no warm-up that hurts nothing": (times(1, "train/loss"), NO_WARMUP[:1]),
    "no clipping, and no large gradient": (times(1, "train/loss"), UNCLIPPED),
    "gradients of six times the median": (large_gradients(6, 20), UNCLIPPED),
    "two large gradients": (large_gradients(80, 100), UNCLIPPED),
    "large gradients that are clipped": (unclipped, []),
    "noise of half a nat at the batch of the law": (noise(0.5), []),
    "a small batch without noise": (put(lambda at: 64.0, "train/batch_tokens"), SMALL),
    "eps far below the gradients": (times(0.2, "optim/update_ratio"), ["optimizer.kind=adamw", "optimizer.eps=1e-6"]),
    "weight decay of 0.3": (times(0.5, "optim/weight_norm"), ["optimizer.weight_decay=0.3"]),
    "scores of 60 that stay": (put(lambda at: 60.0, *LOGITS), []),
    "scores of 200 that stay": (put(lambda at: 200.0, *LOGITS), []),
    "scores that grow to 60": (put(lambda at: 0.3 * at, *LOGITS), []),
    "a head that grows at the peak": (put(lambda at: 5.0 + min(at, 150), "optim/head_norm"), []),
    "a narrow deviation of the initial weights": (times(1, "train/loss"), ["model.initializer_range=0.05"]),
}


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("case", SILENT)
def test_a_look_alike_is_not(case: str, every: int, tmp_path: Path) -> None:
    change, overrides = SILENT[case]
    found = judge(tmp_path, change, overrides=overrides, every=every)
    assert [code for code in named(found) if not code.endswith("?")] == []


FAST = ["optimizer.update_scale=spectral", "optimizer.learning_rate=0.1"]


def test_the_usual_decay_is_too_strong_at_a_high_rate_in_a_long_run(tmp_path: Path) -> None:
    """0.1 forgets after 100 steps there: a tenth of 1,000, and a fiftieth of 5,000, where a seventh would be best."""
    code, forgets = "weight-decay-too-strong", times(0.5, "optim/weight_norm")

    def found(name: str, overrides: list[str], planned: int = 5000) -> list[Finding]:
        judged = judge(tmp_path / name, forgets, steps=planned // 2 + 50, every=50, planned=planned, overrides=overrides, only=code)
        return [*judged.problems, *judged.unsure]

    (problem,) = found("long", FAST)
    assert ("at least 0.04508", 0.02) in [(one.healthy, pytest.approx(one.value)) for one in problem.evidence]
    assert [(one.key, one.value) for one in problem.changes] == [("optimizer.weight_decay", "0.015")]
    assert not found("of the law", [*FAST, "optimizer.weight_decay=0.015"])
    assert not found("shorter", FAST, 1000)


def test_a_rate_that_is_too_low_is_told_from_eps_and_from_a_short_run(tmp_path: Path) -> None:
    eps = ["optimizer.kind=adamw", "optimizer.eps=0.1", "optimizer.learning_rate=0.001"]
    assert named(judge(tmp_path / "eps", still, overrides=eps, only="learning-rate-too-low")) == []
    assert named(judge(tmp_path / "short", still, steps=50, overrides=LOW, only="learning-rate-too-low")) == []
    assert "steps are done" in judge(tmp_path / "begun", still, steps=40, planned=400, overrides=LOW).not_judged["learning-rate-too-low"]


def test_a_run_of_few_steps_has_too_few_tokens_once_it_has_ended(tmp_path: Path) -> None:
    end = {"event": "finish", "step": 25, "tokens": 25_600}
    falling = loss(lambda at, value: 6.9 - 0.08 * at)
    found = judge(tmp_path / "ended", falling, [end], steps=25)
    assert named(found) == ["too-few-tokens"] and found.problems[0].changes[0].key == "train.phases.0.tokens"
    assert "not ended" in judge(tmp_path / "going", falling, steps=25).not_judged["too-few-tokens"]
    assert named(judge(tmp_path / "longer", falling, [end | {"step": 150}], steps=150)) == []
    early = {"event": "early_stop", "step": 25}
    assert named(judge(tmp_path / "stopped", falling, [early, end], steps=25)) == []


def test_a_run_of_one_step_has_too_few_tokens_and_each_phase_gets_its_share_of_more(tmp_path: Path) -> None:
    end = {"event": "finish", "step": 3, "tokens": 3072}
    (found,) = judge(tmp_path / "three", loss(lambda at, value: 6.9), [end], steps=3, only="too-few-tokens").problems
    assert "only 3 steps" in found.excluded[0].because
    assert named(judge(tmp_path / "one", loss(lambda at, value: 6.9), [end], steps=1, only="too-few-tokens")) == ["too-few-tokens"]
    later = "{name: later, tokens: 75k, sequence_length: 64 tokens, global_batch_tokens: 1024 tokens, mixture: {text: 1.0}}"
    first = later.replace("later", "first").replace("75k", "25k")
    falling = loss(lambda at, value: 6.9 - 0.08 * at)
    run = judge(tmp_path / "two", falling, [end], [f"train.phases=[{first}, {later}]"], steps=25, only="too-few-tokens")
    tokens = [float(one.value.removesuffix(" tokens")) for one in run.problems[0].changes]
    assert [one.key for one in run.problems[0].changes] == ["train.phases.0.tokens", "train.phases.1.tokens"]
    assert tokens[1] == pytest.approx(3 * tokens[0], rel=1e-4) and sum(tokens) > 1e6


def test_eps_and_initial_weights_go_below_what_they_are(tmp_path: Path) -> None:
    tiny = times(1e-6, "optim/grad_norm")
    (eps,) = judge(tmp_path / "eps", tiny, overrides=["optimizer.kind=adamw"], only="eps-too-large").unsure
    assert float(eps.changes[0].value) < 1e-3 / eps.evidence[0].value * 1e-8 <= 1.1e-2 * float(eps.changes[0].value) * 1e3
    early = loss(lambda at, value: 8.0 if at == 0 else value)
    (init,) = judge(tmp_path / "init", early, overrides=["model.initializer_range=0.02"], only="init-too-wide").unsure
    assert init.changes[0].value == "0.01"


def test_what_hurts_for_all_of_the_run_is_not_called_a_missing_warm_up(tmp_path: Path) -> None:
    change = all_of(loss(lambda at, value: 7.3 if at == 1 else value), grown)
    assert named(judge(tmp_path, change, overrides=NO_WARMUP))[0] == "learning-rate-too-high"


def test_a_recipe_that_cannot_be_read_is_not_judged(tmp_path: Path) -> None:
    judge(tmp_path)
    (tmp_path / "resolved.json").write_text('{"model": {"vocab_size": -3}, "optimizer": {"eps": "x"}}')
    found = diagnose(Evidence(open_run(tmp_path)))
    assert not found.problems and "cannot be read" in found.not_judged["learning-rate-too-high"]


def test_a_rate_is_judged_during_the_run_and_lowered_to_the_law(tmp_path: Path) -> None:
    (found,) = judge(tmp_path, grown, steps=60, planned=400, overrides=HIGH, only="learning-rate-too-high").problems
    first, second = found.changes
    assert first.key == "optimizer.learning_rate" and 0.002 < float(first.value) <= 0.02 and second.key == "optimizer.adam_learning_rate"
