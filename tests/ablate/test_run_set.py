"""Sets of runs: a directory that was begun at any point is gone on with, and processes that start together find one answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmworks.ablate import ablate, cost, run_set
from lmworks.ablate.ablate import Options, open_experiment, run_ablation
from lmworks.ablate.run_set import RunSet, prepare_data, save_arms, shared_bytes
from lmworks.errors import UserError
from lmworks.io.files import write_json
from lmworks.ladder import run as ladder_run
from lmworks.metrics.log import read
from lmworks.shards.batch import Batch
from lmworks.train.calibrate import Speed
from patience import PATIENCE
from tiny_run import Tiny


class Ended(Exception):
    """Stands for the end of the process."""


def ablation(recipe: Path, folder: Path, equal: str = "time") -> Path:
    file = folder / "pair.yaml"
    tree = {
        "recipe": str(recipe), "out": str(folder / "out"), "equal": equal, "seeds": 1, "budget": "5120 tokens",
        "arms": {"small": [], "wide": ["model.intermediate_size=512"]},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return file


def ladder(recipe: Path, folder: Path) -> Path:
    file = folder / "ladder.yaml"
    sizes = {f"w{width}": ["model.moe=null", "tune=null", f"model.intermediate_size={width}"] for width in (16, 64, 256)}
    tree = {"recipe": str(recipe), "out": str(folder / "out"), "sizes": sizes, "horizons": [f"{n} tokens" for n in (2048, 4096, 8192)]}
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    return file


POINTS = {
    "an ablation of equal time": ("prepare_data", "calibrate", "save_arms", "Runner"),
    "an ablation of equal tokens": ("save_arms", "prepare_data", "calibrate", "Runner"),
    "a ladder": ("save_arms", "prepare_data", "calibrate", "Runner"),
}


@pytest.mark.parametrize(("kind", "point"), [(kind, point) for kind, points in POINTS.items() for point in points])
def test_a_set_that_ended_at_any_point_is_gone_on_with(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, point: str
) -> None:
    """The same command gets as far as it did, and does not take the directory for that of somebody else."""

    def call() -> None:
        if kind == "a ladder":
            ladder_run.run_ladder(ladder_run.resolve(ladder(tiny.recipe, tmp_path)), 1, lambda event: None, lambda line: None)
        else:
            run_ablation(str(ablation(tiny.recipe, tmp_path, kind.split()[-1])), Options(), lambda event: None, lambda line: None)

    def prepared(runs: RunSet, *given: Any) -> None:
        (runs.out / "data").mkdir(exist_ok=True)

    def calibrated(runs: RunSet, arms: Sequence[Any], *given: Any) -> None:
        one = {"seconds": 1.0, "flops": 1.0, "tokens_per_second": 1.0, "threads": 1}
        write_json(runs.out / cost.FILE, {arm.name: one for arm in arms})

    def end(*given: Any) -> None:
        raise Ended

    module = ladder_run if kind == "a ladder" else ablate
    monkeypatch.setattr(module, "prepare_data", prepared)
    monkeypatch.setattr(*((ladder_run, "calibrate") if kind == "a ladder" else (cost, "calibrate")), calibrated)
    where = cost if point == "calibrate" and kind != "a ladder" else module
    monkeypatch.setattr(where, point, end)
    for _ in range(2):
        with pytest.raises(Ended):
            call()


def test_a_directory_with_other_files_is_not_taken(tmp_path: Path) -> None:
    for name in ("thesis.txt", "data", "ladder.yaml"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(UserError, match="holds files and is not a ladder"):
            run_set.take_directory(folder, "a ladder")
        assert [path.name for path in folder.iterdir()] == [name]
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "lock").touch()
    run_set.take_directory(tmp_path / "locked", "a ladder")


def test_jobs_that_start_together_measure_once(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of two measurements differ, and budgets of equal time follow from them. The second waits for the first."""
    experiment = open_experiment(str(ablation(tiny.recipe, tmp_path)), Options())
    prepare_data(experiment, lambda event: None, lambda line: None)
    measured: list[float] = []

    def measure(recipe: Any, batches: Sequence[Batch], patience: float, flops: Callable[[int], float]) -> Speed:
        time.sleep(0.02)
        measured.append(1e9 * (1 + len(measured)))
        return Speed({batch.tokens.shape[1]: measured[-1] for batch in batches}, measured[-1], measured[-1])

    monkeypatch.setattr("lmworks.ablate.cost.measure_apart", measure)
    monkeypatch.setattr("lmworks.io.files._POLL", 0.01)
    arms, waited, found = list(experiment.arms.values()), list[str](), list[dict[str, float]]()
    ready = threading.Barrier(2)

    def job() -> None:
        ready.wait()
        cost.calibrate(experiment, arms, 1, lambda: waited.append("waited"))
        found.append(cost.speeds(experiment.out))

    jobs = [threading.Thread(target=job) for _ in range(2)]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join(PATIENCE)
    assert len(measured) == 3 * len(arms) and len(waited) == 1
    assert found[0] == found[1] and list(found[0]) == ["small", "wide"]
    cost.calibrate(experiment, arms, 1)
    assert len(measured) == 3 * len(arms), "what is known stays"


@pytest.mark.slow
def test_an_array_of_equal_time_trains_all_arms(tiny: Tiny, tmp_path: Path) -> None:
    """Two processes that start together, whose speeds are measured: both take the tokens that follow from one measurement."""
    file, out = ablation(tiny.run_dir, tmp_path), tmp_path / "out"
    command = [sys.executable, "-m", "lmworks.cli.main", "ablate", str(file), "--index"]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    jobs = [subprocess.Popen([*command, f"{number}/2"], **pipes) for number in range(2)]
    said = [one.communicate(timeout=2 * PATIENCE)[1] for one in jobs]
    assert [one.returncode for one in jobs] == [0, 0], said
    arms = open_experiment(str(file), Options()).arms
    assert arms["small"].tokens == 5120
    for name, arm in arms.items():
        assert read(out / "arms" / name / "seed-1")[-1]["train/tokens"] == arm.tokens
    assert json.loads((out / "ablation.json").read_text())["unfinished"] == []


def test_a_file_that_another_process_replaces_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_bytes(b"12345")
    monkeypatch.setattr(os, "walk", lambda top: [(str(top), [], ["gone", "there"])])
    assert shared_bytes([tmp_path]) == 5


def test_nothing_is_recorded_for_a_set_with_an_arm_that_has_changed(tiny: Tiny, tmp_path: Path) -> None:
    """An arm before it would else be recorded as changed, and undoing the change would be refused."""
    file = ladder(tiny.recipe, tmp_path)
    save_arms(ladder_run.resolve(file))
    whole = file.read_text()
    longer = whole.replace("- 8192 tokens\n", "- 8192 tokens\n- 16384 tokens\n")
    file.write_text(longer.replace("intermediate_size=256", "intermediate_size=512"))
    with pytest.raises(UserError, match=r"arm w256-trunk has changed since its runs began: model.intermediate_size"):
        save_arms(ladder_run.resolve(file))
    file.write_text(whole)
    save_arms(ladder_run.resolve(file))


def test_a_trunk_grows_by_longer_horizons_only(tiny: Tiny, tmp_path: Path) -> None:
    """The runs of before keep their recipes, their tokenizer and its place."""
    file = ladder(tiny.recipe, tmp_path)
    whole, before = file.read_text(), ladder_run.resolve(file)
    save_arms(before)
    file.write_text(whole.replace("- 4096 tokens\n", "- 3072 tokens\n- 4096 tokens\n"))
    with pytest.raises(UserError, match=r"arm w16-trunk has changed since .*; only horizons longer than all others can be added"):
        save_arms(ladder_run.resolve(file))
    file.write_text(whole.replace("- 8192 tokens\n", "- 8192 tokens\n- 16384 tokens\n"))
    after = ladder_run.resolve(file)
    save_arms(after)
    assert set(after.arms) - set(before.arms) == {"w16-16384", "w64-16384", "w256-16384"}
    for name, arm in before.arms.items():
        now = after.arms[name].recipe
        assert now.tokenizer.path == arm.recipe.tokenizer.path
        kept = now.train.phases[: len(arm.recipe.train.phases)]
        assert kept == arm.recipe.train.phases and (len(now.train.phases) > len(kept)) == name.endswith("trunk")
