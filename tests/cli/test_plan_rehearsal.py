"""`plan --calibrate` of a run without pretraining rehearses all of its stages, and the run records what it took beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Lmworks
from test_plan_data import _lines, _recipe, base  # noqa: F401

from lmworks.io.files import write_json
from lmworks.plan.stages import StageData
from lmworks.recipe.load import load_recipe
from lmworks.run.rehearsal import ITEMS, START, _evaluation, _little, _training
from lmworks.run.stages import stages_for
from lmworks.watch.ledger import read_ledger

TRAINED = ("tune", "dpo", "grpo")


def test_every_stage_is_rehearsed_and_predicted(
    lmworks: Lmworks, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    asked = [{"prompt": f"What is {number}?", "answer": str(number)} for number in range(20)]
    data = [{"name": "own", "kind": "files", "path": _lines(tmp_path / "prompts.jsonl", asked), "reward": "numeric"}]
    grpo = {
        "data": data, "steps": 3, "group_size": 2, "prompts_per_step": 2, "max_new_tokens": 4, "sequence_length": "64 tokens",
        "validation_prompts": 2,
    }  # fmt: skip
    recipe = _recipe(
        tmp_path, base, grpo=grpo, dpo={"epochs": 1, "pairs_per_step": 4}, evaluate={"questions": ["Hi"]}, export={"huggingface": True}
    )  # fmt: skip
    rough = json.loads(lmworks("plan", recipe, "--json").out)
    assert "--calibrate measures all of it" in rough["not_counted"] and not rough["stages"]
    killed = tmp_path / ".lmworks-rehearsal-killed" / "run"  # what a rehearsal leaves whose process was killed
    killed.mkdir(parents=True)
    (killed.parent / ".held").touch()
    done = lmworks("plan", recipe, "--calibrate", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    resolved = load_recipe(recipe).recipe
    assert list(plan["stages"]) == [START, *(stage.name for stage in stages_for(resolved))], "a stage is left out"
    assert all(sum(plan["stages"][name].values()) > 0 for name in (*TRAINED, "evaluate"))  # others may round to 0
    assert plan["seconds"] == pytest.approx(sum(sum(parts.values()) for parts in plan["stages"].values()))
    for name in TRAINED:
        assert {"steps", "validation", "loading and the rest"} <= plan["stages"][name].keys(), name
    assert "reference scores" in plan["stages"]["dpo"] and "samples" in plan["stages"]["evaluate"]
    assert (plan["data"], [phase["steps"] for phase in plan["phases"]]) == (rough["data"], [phase["steps"] for phase in rough["phases"]])
    assert "grpo: the time is that of the updates" not in str(plan["warnings"])
    assert not list(tmp_path.glob(".lmworks-*")) and not (tmp_path / "run").exists(), "a plan leaves nothing behind"

    assert lmworks("run", recipe).code == 0
    events = read_ledger(tmp_path / "run" / "ledger.jsonl")
    for name in TRAINED:
        (predicted,), (error,) = (
            [one for one in events if one["event"] == kind and one["stage"] == name] for kind in ("prediction", "prediction_error")
        )  # fmt: skip
        assert events.index(predicted) < next(at for at, one in enumerate(events) if one["event"] == "start" and one["stage"] == name)
        assert "rehearsal" in predicted["source"]
        assert predicted["figures"]["seconds"] == pytest.approx(sum(plan["stages"][name].values()), rel=1e-4)
        assert error["figures"].keys() == {"perf/tokens_per_second", "seconds", "perf/memory", "checkpoint_bytes"}
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert all(f"{title}: " in page for title in ("Tuning", "Preference optimization", "Reinforcement learning"))
    assert page.count("Predicted and measured") == 1


def test_a_rehearsal_multiplies_what_is_repeated(base: Path, tmp_path: Path) -> None:  # noqa: F811
    """Of a rehearsal with known times: steps of 2 s (the first of 9), validations of 0.5 s, samples of 0.25 s, 3 s of reference scores."""
    recipe = load_recipe(_recipe(tmp_path, base)).recipe
    folder = tmp_path / "little" / "dpo"
    folder.mkdir(parents=True)
    clock, lines = 100.0, []
    for step in range(1, 5):
        seconds = 9.0 if step == 1 else 2.0
        clock += seconds + 0.5 + 0.25 * (step > 1)
        values = {"perf/step_seconds": seconds, "perf/validation_seconds": 0.5, "train/tokens": step * 960}
        lines.append({"step": step, "time": 1e9, "perf/elapsed_seconds": clock, **values})
    _lines(folder / "metrics.jsonl", lines)
    scores = [
        {"time": 1.0, "event": "reference_scores", "stage": "dpo", "split": split, "pairs": pairs, "seconds": seconds}
        for split, pairs, seconds in (("train", 30, 2.0), ("validation", 5, 1.0))
    ]
    saved = {"time": 2.0, "event": "checkpoint", "step": 4, "path": "little/dpo/checkpoints/step-00000004", "seconds": 0.5}
    _lines(tmp_path / "little" / "ledger.jsonl", [*scores, saved])
    found = StageData("dpo", 300, 50, 60_000, 40, 96_000, 1.0)
    parts = _training(recipe, "dpo", found, tmp_path / "little", took=30.0)
    assert parts["steps"] == pytest.approx(2.0 / 960 * 96_000)
    assert parts["validation"] == pytest.approx(0.5 * 10) and parts["samples"] == pytest.approx(0.25 * 4)
    assert parts["reference scores"] == pytest.approx(2.0 * 10 + 1.0 * 10)
    assert parts["saves"] == pytest.approx(0.5 * 9), "the last one is among the rest"
    assert parts["loading and the rest"] == pytest.approx(30 - 3 - (9 + 3 * 2) - 4 * 0.5 - 4 * 0.25)


def test_a_rehearsal_of_tuning_multiplies_a_step_that_is_not_the_first(base: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe = load_recipe(_recipe(tmp_path, base)).recipe
    (tmp_path / "little" / "tune").mkdir(parents=True)
    seconds = [9.0, 2.0, 3.0, 2.0]
    lines = [
        {"step": step, "time": 1e9, "perf/elapsed_seconds": 100.0 * step, "perf/step_seconds": took} for step, took in enumerate(seconds, 1)
    ]
    _lines(tmp_path / "little" / "tune" / "metrics.jsonl", lines)
    parts = _training(recipe, "tune", StageData("tune", 40, 0, 900, 25, 25 * 384, 3.0), tmp_path / "little", took=30.0)
    assert parts["steps"] == pytest.approx(2.0 * 25)


def test_a_rehearsal_validates_at_each_step_and_multiplies_the_items_of_benchmarks(base: Path, tmp_path: Path) -> None:  # noqa: F811
    rows = [{"goal": f"how to do {n}", "sol1": f"do it {n} times", "sol2": "never", "label": 0} for n in range(100, 200)]
    own = {"name": "piqa", "path": _lines(tmp_path / "piqa.jsonl", rows)}
    seldom = {"validate_every": "100%", "sample_every": "100%", "log_every": "100%"}
    resolved = load_recipe(_recipe(tmp_path, base, train=seldom, evaluate={"benchmarks": [own]}))
    little = resolved.settled(_little(resolved.recipe, {}, tmp_path / "little")).recipe
    assert [every.times(4, 1000) for every in (little.train.validate_every, little.train.sample_every, little.train.log_every)] == [4, 4, 4]
    spent = {"models": {name: {"speed": {"seconds": {"tasks": 1.0, "benchmarks": 2.0}}} for name in ("start", "tuned")}}
    (tmp_path / "little" / "evaluate").mkdir(parents=True)
    write_json(tmp_path / "little" / "evaluate" / "results.json", spent)
    parts = _evaluation(resolved.recipe, little, tmp_path / "little", 10.0, None)
    assert parts["benchmarks"] == pytest.approx(2 * 2.0 * 100 / ITEMS) and parts["loading and the rest"] == pytest.approx(4.0)
