"""The annealing law: a planted law is found and predicts other schedules, intervals hold, and runs that do not determine it are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmworks.errors import UserError
from lmworks.ladder import comparable, curve
from lmworks.ladder.annealing import Areas, Parameters, fit_annealing, grid_of_decays
from lmworks.ladder.comparable import Course
from lmworks.ladder.curve import Curve, predict_curve
from lmworks.recipe.changes import as_tree
from lmworks.recipe.load import Resolved, load_recipe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import Schedules

LAW, DECAY = Parameters(1.0, 4.0, 0.4, 0.004, 0), float(grid_of_decays(500)[28])  # 0.981
STEP = 256  # tokens
MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
CONSTANT = {"kind": "constant", "warmup": "20 steps"}
WSD = {"kind": "wsd", "warmup": "20 steps", "decay": "20%", "min_lr_ratio": 0.0}
COSINE = {"kind": "cosine", "warmup": "20 steps", "min_lr_ratio": 0.1}


def phase(steps: int, schedule: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": "general", "tokens": f"{steps * STEP} tokens", "mixture": {"web": 1.0}, "sequence_length": "64 tokens",
        "global_batch_tokens": f"{STEP} tokens", "lr_schedule": schedule,
    } | more  # fmt: skip


def recipe(tmp_path: Path, *phases: dict[str, Any], name: str = "target", **more: Any) -> Resolved:
    """A recipe with these phases; further keys replace whole sections."""
    document = {
        "name": name, "run_dir": str(tmp_path / name),
        "corpus": {"sources": [{"name": "web", "kind": "jsonl", "path": "web.jsonl", "domain": "web", "license": "CC0-1.0"}]},
        "tokenizer": {"vocab_size": 512},
        "model": MODEL,
        "optimizer": {"learning_rate": 0.01, "adam_learning_rate": 0.01},
        "train": {"phases": list(phases), "validate_every": "20 steps"},
    } | more  # fmt: skip
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_recipe(path)


def measured(resolved: Resolved, noise: Callable[[int], np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The steps of the validations of a recipe, and the losses there under the planted law."""
    course = Course.of(resolved.recipe)
    steps = np.arange(20, course.end + 1, 20)
    areas = Areas.of(course.lr_factors(), course.after_warmup, steps, np.array([DECAY]))
    return steps, LAW.loss(areas) * np.exp(0.0 if noise is None else noise(len(steps)))


def write_run(resolved: Resolved, noise: Callable[[int], np.ndarray] | None = None, corpus: str = "{}") -> Path:
    """A run directory with the records that the fit reads."""
    run_dir = Path(resolved.recipe.run_dir or "")
    (run_dir / "corpus").mkdir(parents=True)
    (run_dir / "corpus" / "manifest.json").write_text(corpus, encoding="utf-8")
    (run_dir / "resolved.json").write_text(json.dumps(as_tree(resolved.recipe)), encoding="utf-8")
    lines = [
        json.dumps({"step": int(step), "time": 0.0, "validation/bits_per_byte": float(loss)})
        for step, loss in zip(*measured(resolved, noise), strict=True)
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return run_dir


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A run at a constant learning rate and one with a decay, without noise."""
    constant, wsd = recipe(tmp_path, phase(500, CONSTANT), name="constant"), recipe(tmp_path, phase(400, WSD), name="wsd")
    return [write_run(constant), write_run(wsd)]


def end(found: Curve) -> float:
    return found.points[-1].predicted


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99])
def test_the_areas_are_those_of_a_plain_loop(decay: float) -> None:
    random = np.random.default_rng(0)
    lr_factors, after_warmup, steps = random.random(50), 7, np.array([3, 8, 30, 50])
    forward, annealing, momentum, expected = 0.0, 0.0, 0.0, {}
    for index, rate in enumerate(lr_factors):
        forward += rate
        momentum = decay * momentum + (lr_factors[index - 1] - rate if index > after_warmup else 0.0)
        annealing += momentum
        expected[index + 1] = forward, annealing
    areas = Areas.of(lr_factors, after_warmup, steps, np.array([0.9, decay]))
    assert areas.forward == pytest.approx([expected[step][0] for step in steps])
    assert areas.annealing[:, 1] == pytest.approx([expected[step][1] for step in steps], abs=1e-12)


def test_a_planted_law_is_found_and_predicts_a_cosine(runs: list[Path], tmp_path: Path) -> None:
    target = recipe(tmp_path, phase(500, COSINE))
    found = predict_curve(runs, target, bootstraps=2)
    assert found.residual < 1e-4 and found.law.decay == pytest.approx(DECAY)
    steps, losses = measured(target)
    kept = [step > 20 for step in steps]  # not in the warm-up
    assert [point.step for point in found.points] == list(steps[kept])
    assert [point.predicted for point in found.points] == pytest.approx(losses[kept], rel=2e-3)
    assert found.points[-1].tokens == 500 * STEP and found.points[-1].lr_factor == pytest.approx(0.1)
    constant = recipe(tmp_path, phase(500, CONSTANT), name="same")
    assert end(predict_curve(runs, constant, bootstraps=2)) > losses[-1] + 0.05, "the prediction depends on the schedule"


def test_phases_that_differ_in_their_schedule_are_one_curve(runs: list[Path], tmp_path: Path) -> None:
    """A trunk and a decay that branches off from it, as in a ladder; a phase with other data ends the prediction."""
    decay = phase(80, {"kind": "linear", "warmup": "0 steps", "min_lr_ratio": 0.0}, name="decay")
    target = recipe(tmp_path, phase(320, CONSTANT), decay)
    found = predict_curve(runs, target, bootstraps=2)
    assert end(found) == pytest.approx(measured(target)[1][-1], rel=2e-3) and found.points[-1].step == 400
    other = recipe(tmp_path, phase(320, CONSTANT), decay | {"sequence_length": "32 tokens"}, name="other")
    found = predict_curve(runs, other, bootstraps=2)
    assert found.points[-1].step == 320 and "phase decay has another sequence_length" in found.notes[-1]


def test_recorded_learning_rates_take_precedence_over_the_recipe(tmp_path: Path) -> None:
    """The recipe of a run was changed while it was trained: its first half had half the learning rate."""
    run_dir = write_run(recipe(tmp_path, phase(400, WSD), name="changed"))
    with open(run_dir / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, 401):
            line = {"step": step, "time": 0.0, "optim/learning_rate": 0.005 if step <= 200 else 0.01, "validation/bits_per_byte": 2.0}
            file.write(json.dumps(line) + "\n")
    assert curve._Run(run_dir).lr_factors == pytest.approx([0.5] * 200 + [1.0] * 200)


def test_a_schedule_is_evaluated_at_a_bounded_number_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course.of(recipe(tmp_path, phase(2000, WSD)).recipe)
    exact, asked = course.lr_factors(), []
    evaluate = Schedules.lr_factor
    monkeypatch.setattr(Schedules, "lr_factor", lambda self, step: asked.append(step) or evaluate(self, step))
    monkeypatch.setattr(comparable, "_EVALUATED", 300)
    assert course.lr_factors() == pytest.approx(exact, abs=0.06) and len(asked) == 300
    assert course.lr_factors().sum() == pytest.approx(exact.sum(), rel=1e-3)


@pytest.mark.slow
def test_intervals_of_90_percent_hold_about_as_often(tmp_path: Path) -> None:
    """24 predictions with 0.3% noise. Fewer than 18 hits have a probability of 1% at 90% coverage. Their width is bounded too."""
    made = [recipe(tmp_path, phase(500, CONSTANT), name="constant"), recipe(tmp_path, phase(400, WSD), name="wsd")]
    targets = [recipe(tmp_path, phase(500, COSINE), name="cosine"), recipe(tmp_path, phase(600, WSD), name="longer")]
    grid = grid_of_decays(500)
    areas = [_areas(one, grid)[0] for one in made]
    hits, widths = 0, []
    for seed in range(12):
        random = np.random.default_rng(seed)
        noise = lambda count, random=random: 0.003 * random.standard_normal(count)  # noqa: E731
        law = fit_annealing(areas, [_areas(one, grid, noise)[1] for one in made], grid, bootstraps=40, seed=seed)
        for target in targets:
            of_target, losses = _areas(target, grid, noise)
            low, high = law.interval(of_target)
            hits += int(low[-1] <= losses[-1] <= high[-1])
            widths.append(high[-1] - low[-1])
    assert hits >= 18
    assert 0.02 < float(np.mean(widths)) < 0.15


def _areas(resolved: Resolved, grid: np.ndarray, noise: Callable[[int], np.ndarray] | None = None) -> tuple[Areas, np.ndarray]:
    course, (steps, losses) = Course.of(resolved.recipe), measured(resolved, noise)
    kept = steps > course.after_warmup
    return Areas.of(course.lr_factors(), course.after_warmup, steps[kept], grid), losses[kept]


def test_noise_of_neighboring_validations_that_is_alike_widens_the_interval(tmp_path: Path) -> None:
    made = [recipe(tmp_path, phase(500, CONSTANT), name="constant"), recipe(tmp_path, phase(400, WSD), name="wsd")]
    grid = grid_of_decays(500)

    def width(correlated: bool) -> float:
        random = np.random.default_rng(1)

        def noise(count: int) -> np.ndarray:
            drawn = random.standard_normal(count + 4)
            return 0.003 * (np.convolve(drawn, np.full(5, 5**-0.5), "valid") if correlated else drawn[:count])

        areas, losses = zip(*(_areas(one, grid, noise) for one in made), strict=True)
        law = fit_annealing(areas, losses, grid, bootstraps=40)
        low, high = law.interval(_areas(recipe(tmp_path, phase(500, COSINE)), grid)[0])
        return float(high[-1] - low[-1])

    assert width(True) > 1.5 * width(False)


def test_a_short_decay_says_little_of_a_long_one(tmp_path: Path) -> None:
    """Validations in a decay of 20 steps fit any lambda: the interval of a cosine is wide, and a note says which run to add."""
    random = np.random.default_rng(0)
    noise = lambda count: 0.003 * random.standard_normal(count)  # noqa: E731
    short, target = WSD | {"decay": "40 steps"}, recipe(tmp_path, phase(500, COSINE))
    found = predict_curve([write_run(recipe(tmp_path, phase(400, short), name="short"), noise)], target, bootstraps=40)
    assert any("hardly determine lambda" in note for note in found.notes)
    cosine = predict_curve([write_run(recipe(tmp_path, phase(500, COSINE), name="long"), noise)], target, bootstraps=40)
    last, other = found.points[-1], cosine.points[-1]
    assert last.low < measured(target)[1][-1] < last.high and last.high - last.low > 2 * (other.high - other.low)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": MODEL | {"hidden_size": 64}}, r"model.hidden_size \(32 -> 64\).*add --set 'model.hidden_size=32'"),
        ({"optimizer": {"learning_rate": 0.02, "adam_learning_rate": 0.01}}, "add --set 'optimizer.learning_rate=0.01'"),
        ({"optimizer": {"kind": "adamw", "learning_rate": 0.01, "adam_learning_rate": 0.01}}, "optimizer.kind"),
        ({"tokenizer": {"vocab_size": 768}}, "tokenizer.vocab_size"),
        ({"time": "10 min"}, "depend on time; add --set time=null"),
    ],
)  # fmt: skip
def test_another_model_corpus_or_optimizer_is_refused(change: dict[str, Any], message: str, runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        predict_curve(runs, recipe(tmp_path, phase(500, COSINE), **change))


def test_another_batch_size_or_mixture_is_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"general.global_batch_tokens \(256 tokens -> 512 tokens\)"):
        predict_curve(runs, recipe(tmp_path, phase(500, COSINE, global_batch_tokens="512 tokens")))


def test_runs_on_another_corpus_are_refused(runs: list[Path], tmp_path: Path) -> None:
    target = recipe(tmp_path, phase(500, COSINE))
    other = write_run(recipe(tmp_path, phase(400, WSD), name="other"), corpus='{"other": 1}')
    with pytest.raises(UserError, match="is validated on other text"):
        predict_curve([*runs, other], target)
    with pytest.raises(UserError, match="is validated on other text"):
        predict_curve(runs, recipe(tmp_path, phase(400, WSD), name="other"))
    with pytest.raises(UserError, match="is listed twice"):
        predict_curve([runs[0], runs[0]], target)


def test_runs_that_do_not_determine_the_law_are_refused(runs: list[Path], tmp_path: Path) -> None:
    target = recipe(tmp_path, phase(500, COSINE))
    with pytest.raises(UserError, match=r"learning rate is constant up to the last validation.*lr_schedule.kind=wsd"):
        predict_curve(runs[:1], target)
    few = write_run(recipe(tmp_path, phase(100, WSD), name="few"))
    with pytest.raises(UserError, match=r"too few validations after the warm-up .*: 4.*train.validate_every"):
        predict_curve([few], target)
    with pytest.raises(UserError, match="is not a run directory"):
        predict_curve([tmp_path / "nothing"], target)


def test_the_recipe_that_is_compared_is_whole(tmp_path: Path) -> None:
    """Every key that pretraining reads, but those of the schedule and the seeds, makes another curve."""
    from lmworks.recipe.changes import changed_keys, readers

    one: Recipe = recipe(tmp_path, phase(500, COSINE)).recipe
    for key, value in {"weight_decay": 0.2, "ema_decay": 0.5, "max_grad_norm": 2.0, "betas": [0.8, 0.9]}.items():
        other = recipe(tmp_path, phase(500, COSINE), optimizer={"learning_rate": 0.01, "adam_learning_rate": 0.01, key: value}).recipe
        assert [change.path for change in changed_keys(one, other)] and "pretrain" in readers(f"optimizer.{key}")
        with pytest.raises(UserError, match=key):
            comparable.require_comparable(one, other, "one", "other", True)
    seeds = recipe(tmp_path, phase(500, COSINE), seed=9).recipe
    comparable.require_comparable(one, seeds, "one", "other", True)
