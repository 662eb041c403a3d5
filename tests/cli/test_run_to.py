"""`lmworks run --to STAGE` and `lmworks plan --to STAGE`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks
from test_habits import completed
from test_plan_data import _recipe, base  # noqa: F401

from lmworks.run import runner
from tiny_run import Tiny

Mine = Callable[[str, str], Path]


def test_a_run_ends_with_the_stage(lmworks: Lmworks, mine: Mine, tmp_path: Path) -> None:
    recipe = mine("seed: 5", "seed: 6")
    assert "--to 'token' is not a stage; did you mean tokenizer?" in lmworks("run", recipe, "--to", "token").error
    assert not list(tmp_path.rglob("stage.json"))
    done = lmworks("run", recipe, "--to", "tokenizer")
    assert done.code == 0, done.error
    assert {path.parent.name for path in tmp_path.rglob("stage.json")} == {"corpus", "tokenizer"}


def planned(lmworks: Lmworks, recipe: Path, *options: object, code: int = 0) -> dict[str, Any]:
    done = lmworks("plan", recipe, *options, "--json")
    assert done.code == code, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_a_plan_ends_with_the_stage(lmworks: Lmworks, tiny: Tiny, mine: Mine) -> None:
    """What is trained and written up to it. The data of tuning are not there, nor is a set of the evaluation: of no matter to what trains
    nothing, as `run --to` has it."""
    recipe, unknown = mine(f"path: {tiny.texts}/chats.jsonl", "path: nowhere.jsonl"), ("--set", "evaluate.benchmarks=[{name: nosuchset}]")
    whole, pretrain = planned(lmworks, recipe, *unknown, code=2), planned(lmworks, recipe, *unknown, "--to", "pretrain", code=2)
    assert "nowhere.jsonl" in str(whole["refusals"]) and "nosuchset" in str(whole["refusals"])
    assert pretrain["refusals"] == whole["refusals"] and "nowhere.jsonl" in lmworks("run", recipe, "--to", "pretrain").error
    assert "stages after pretraining (tune)" in whole["not_counted"] and "tune" not in pretrain["not_counted"]
    assert [one["name"] for one in pretrain["phases"]] == ["general", "long"] and pretrain["seconds"] > 0
    assert pretrain["fingerprint"] == whole["fingerprint"], "it is the plan of the same recipe"
    shards, tokenizer = (planned(lmworks, recipe, *unknown, "--to", stage) for stage in ("shards", "tokenizer"))
    for found in (shards, tokenizer):
        assert found["refusals"] == []
        assert (found["phases"], found["seconds"], found["device_hours"], found["disk"]["checkpoint"]) == ([], 0, 0, 0)
        assert "nothing is trained" in found["not_counted"]
    assert (shards["disk"]["data"], tokenizer["disk"]["data"]) == (pretrain["disk"]["data"], 0)
    said = lmworks("plan", recipe, "--to", "shards").out
    assert "nothing is trained" in said and "Memory" not in said and "checkpoint" not in said


def test_a_plan_of_tuning_ends_with_it(
    lmworks: Lmworks, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    """Of a run without pretraining."""
    recipe = _recipe(tmp_path, base, export={"huggingface": True})
    whole, tune = planned(lmworks, recipe), planned(lmworks, recipe, "--to", "tune")
    assert [one["name"] for one in whole["phases"]] == ["tune", "dpo"] and [one["name"] for one in tune["phases"]] == ["tune"]
    assert tune["seconds"] == tune["phases"][0]["seconds"] < whole["seconds"]
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    ran: list[str | None] = []
    run_stages = runner.run_stages

    def recorded(*given: Any, **options: Any) -> Any:
        ran.append(options.get("last"))
        return run_stages(*given, **options)

    monkeypatch.setattr(runner, "run_stages", recorded)
    rehearsed = planned(lmworks, recipe, "--to", "tune", "--calibrate")
    assert ran == ["tune"], "what the plan leaves out takes no time"
    assert list(rehearsed["stages"]) == ["start", "tokenizer", "pretrain", "tune"]
    assert not (tmp_path / "cache" / "rehearsals").exists(), "it is not the time of the whole run, which the run would record"


def test_a_plan_for_a_time_ends_with_the_stage(lmworks: Lmworks, tiny: Tiny, mine: Mine) -> None:
    recipe = mine("seed: 5", "seed: 6")
    found = planned(lmworks, recipe, "--time", "2min", "--to", "pretrain")
    assert "stages after pretraining" not in found["not_counted"] and 0 < found["seconds"] <= 120
    assert found["budget"]["candidates"][0]["tokens"] == found["tokens"]
    assert planned(lmworks, recipe, "--time", "2min", "--to", "shards")["phases"] == []


def test_stages_of_plan_and_run_have_the_same_names(lmworks: Lmworks, mine: Mine) -> None:
    recipe = mine("seed: 5", "seed: 6")
    for stage in ("token", "dpo"):
        assert lmworks("plan", recipe, "--to", stage).error == lmworks("run", recipe, "--to", stage).error
    assert "nothing is trained up to shards" in lmworks("plan", recipe, "--to", "shards", "--calibrate").error
    assert completed("lmworks plan quickstart --to t") == ["tokenizer", "tune"]
