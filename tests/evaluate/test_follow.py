"""A process that follows a run evaluates each checkpoint once, whatever the run does meanwhile, and writes nothing of the run's."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lmworks.checkpoint import Checkpoints, listing
from lmworks.errors import UserError
from lmworks.evaluate import follow as module
from lmworks.evaluate.follow import FILE, follow
from lmworks.io import jsonl
from lmworks.io.files import sha256_file
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.pages.read_run import read_run
from lmworks.recipe.changes import as_tree
from lmworks.ui.terminal import Interrupted
from lmworks.watch.ledger import Ledger
from lmworks.weights.frozen_tokenizer import META
from lmworks.weights.open import OpenModel
from saved_run import save_run
from tiny_run import Tiny

METRIC = "eval/arc-easy/cloze-0-shot"
ALL = [("pretrain", 4), ("pretrain", 30), ("tune", 8)]


@pytest.fixture(scope="module")
def saved(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("follow") / "run"
    save_run(tiny, to)
    return to


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """Base checkpoints of the steps 4 and 30, a tuned one of step 8; the ledger says that pretraining has begun."""
    shutil.copytree(saved, tmp_path / "run")
    tell(tmp_path / "run", "start", stage="pretrain", steps=40)
    return tmp_path / "run"


def tell(run: Path, event: str, **fields: object) -> None:
    with Ledger(run / "ledger.jsonl") as ledger:
        ledger.write(event, **fields)


def finish(run: Path) -> None:
    tell(run, "finish", stage="pretrain", step=40)
    tell(run, "start", stage="tune", steps=8)
    tell(run, "finish", stage="tune", step=8)


def save(run: Path, tiny: Tiny, step: int, seed: int = 7) -> None:
    recipe = tiny.resolve().recipe
    meta = {META: sha256_file(run / "tokenizer" / "tokenizer.json"), "phase": "long"}
    with Checkpoints(run / "checkpoints", recipe.checkpoints, {}, recipe=as_tree(recipe)) as checkpoints:
        model = initialize(Transformer(recipe.model), seed=seed)
        checkpoints.save(step, {"model": dict(model.state_dict())}, meta, wait=True)


def seen(run: Path) -> list[tuple[str, int]]:
    return [(one["stage"], one["step"]) for one in jsonl.read(run / FILE)]


def one_weight(opened: OpenModel) -> dict[str, float]:
    """A value that tells checkpoints apart."""
    return {METRIC: abs(opened.model.embedding.weight[0, 0].item())}


def test_each_checkpoint_once_and_only_its_own_file(run: Path) -> None:
    finish(run)
    before = {path: sha256_file(path) for path in run.rglob("*") if path.is_file()}
    assert follow(run, one_weight, "cpu") == 3
    assert seen(run) == ALL
    records = jsonl.read(run / FILE)
    assert len({one[METRIC] for one in records}) == len({one["content"] for one in records}) == 3
    assert follow(run, one_weight, "cpu") == 0
    assert seen(run) == ALL
    after = {path: sha256_file(path) for path in run.rglob("*") if path.is_file() and path.name != FILE}
    assert after == before


def test_a_clock_that_is_set_changes_no_duration(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither the seconds of an evaluation nor what is said of the rest: the clock goes on by a day whenever it is read."""
    times = itertools.count(2_000_000_000, 86_400)
    monkeypatch.setattr(module.time, "time", lambda: float(next(times)))
    assert follow(run, one_weight, "cpu", wait=0.01, poll=0.005) == 3
    assert all(0 <= one["seconds"] < 600 for one in jsonl.read(run / FILE))
    assert re.search(r"ETA of pretrain \d+:\d\d\)", " ".join(capfd.readouterr().err.split())), "minutes and no hours"


def test_new_checkpoints_are_waited_for_until_the_run_is_done(run: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run / "tune")
    steps: list[Callable[[], None]] = [
        lambda: save(run, tiny, 34),
        lambda: (run / "checkpoints" / ".step-00000038.part").mkdir(),  # being written
        lambda: (run / "checkpoints" / "step-00000036").mkdir(),  # without a manifest
        lambda: save(run, tiny, 40, seed=8),
        lambda: tell(run, "finish", stage="pretrain", step=40),
        lambda: save(run, tiny, 44, seed=9),  # the run was extended
        lambda: finish(run),
    ]
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        steps.pop(0)()

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert follow(run, one_weight, "cpu", wait=600, poll=5) == 5
    assert seen(run) == [("pretrain", step) for step in (4, 30, 34, 40, 44)]
    assert steps == [] and max(sleeps) == 5


def test_a_pruned_checkpoint_is_passed_over(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finish(run)

    def prune(opened: OpenModel) -> dict[str, float]:
        shutil.rmtree(run / "checkpoints" / "step-00000030", ignore_errors=True)  # while step 4 is evaluated, 30 is pruned
        return one_weight(opened)

    real = module.checkpoints
    assert follow(run, prune, "cpu") == 2
    assert seen(run) == [("pretrain", 4), ("tune", 8)]
    assert [one.step for one in real(run)] == [4, 8]


def test_a_checkpoint_pruned_while_it_is_read(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    finish(run)
    real = module.open_model

    def late(path: Path, device: object) -> OpenModel:
        if listing.step_of(path) == 30:
            shutil.rmtree(path)
        return real(path, "cpu")

    monkeypatch.setattr(module, "open_model", late)
    assert follow(run, one_weight, "cpu") == 2
    assert "step 30 of pretrain was removed by the run before it was read" in " ".join(capfd.readouterr().err.split())


def test_a_damaged_checkpoint_is_left_out(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finish(run)
    file = next((run / "checkpoints" / "step-00000030").glob("data-*"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert follow(run, one_weight, "cpu") == 2
    assert "step 30 of pretrain is left out" in " ".join(capfd.readouterr().err.split())


def test_a_step_that_was_trained_again_is_evaluated_again(run: Path, tiny: Tiny) -> None:
    finish(run)
    follow(run, one_weight, "cpu")
    shutil.rmtree(run / "checkpoints" / "step-00000030")
    save(run, tiny, 30, seed=11)
    assert follow(run, one_weight, "cpu") == 1
    assert seen(run) == [*ALL, ("pretrain", 30)]
    first, last = [one[METRIC] for one in jsonl.read(run / FILE) if one["step"] == 30]
    points = read_run(run).training["pretrain"].series[METRIC].means()
    assert points[-1] == (30, last) and last != first
    assert [step for step, _ in points] == [4, 30]


def test_ctrl_c_keeps_what_is_done(run: Path) -> None:
    finish(run)

    def interrupted(opened: OpenModel) -> dict[str, float]:
        if opened.name.endswith("@30"):
            raise KeyboardInterrupt
        return one_weight(opened)

    with pytest.raises(Interrupted, match=r"evaluated 1 checkpoints.*the same command evaluates the others"):
        follow(run, interrupted, "cpu")
    assert seen(run) == ALL[:1]
    with open(run / FILE, "a", encoding="utf-8") as torn:  # and a kill in the middle of a line
        torn.write('{"stage": "pretr')
    assert follow(run, one_weight, "cpu") == 2
    assert seen(run) == ALL


def test_one_follower_at_a_time(run: Path) -> None:
    finish(run)
    inside, go = threading.Event(), threading.Event()

    def slow(opened: OpenModel) -> dict[str, float]:
        inside.set()
        go.wait(60)
        return one_weight(opened)

    first = threading.Thread(target=follow, args=(run, slow, "cpu"))
    first.start()
    assert inside.wait(60)
    try:
        with pytest.raises(UserError, match="is followed by another process"):
            follow(run, one_weight, "cpu")
    finally:
        go.set()
        first.join()
    assert seen(run) == ALL


def test_an_idle_run_is_left(run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert follow(run, one_weight, "cpu", wait=0) == 3  # what is there, without waiting
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] < 40:  # a run that writes is active
            with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write("{}\n")

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert follow(run, one_weight, "cpu", wait=60, poll=10) == 0
    assert now[0] == 90  # 60 s after the last line, at 30
    assert "has changed for 1:00" in " ".join(capfd.readouterr().err.split())


def test_bad_input(run: Path, tmp_path: Path, tiny: Tiny) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        follow(tmp_path, one_weight)
    with pytest.raises(KeyError, match="is no metric"):
        follow(run, lambda opened: {"typo": 1.0}, "cpu")
    with pytest.raises(UserError, match="lists no multiple-choice set; name some: --tasks"):
        module.scores_in_loop(tiny.resolve().recipe)
