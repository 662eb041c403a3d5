"""Windows of skipped steps at every border: of the run, of a phase, of a checkpoint; and a process that is killed while it rolls back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmworks.checkpoint import listing
from lmworks.checkpoint import publish as names
from lmworks.recipe.phases import in_force
from lmworks.recipe.weights import recorded
from lmworks.run.checkpoint_commands import rollback
from lmworks.train.trainer import Trainer
from tiny_run import FIRST, STEPS, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EVERY = ("train.save_every=1 steps", "checkpoints.keep_last=99", "train.sample_every=100%")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The undisturbed run with a checkpoint of every step."""
    made = tiny.copy(tmp_path_factory.mktemp("borders") / "run")
    made.pretrain(*EVERY)
    return made


def steps_of(run: Tiny) -> list[int]:
    return [line["step"] - 1 for line in curve(run.run_dir) if "train/loss" in line]  # the end is measured even if its step is skipped


@pytest.mark.parametrize(("to_step", "window"), [
    (1, (1, FIRST)), (FIRST - 2, (FIRST - 1, FIRST + 1)), (FIRST, (FIRST, STEPS)), (STEPS - 1, (STEPS - 1, STEPS)),
    *(pytest.param(*one, marks=slow) for one in (
        (1, (1, 2)), (1, (2, STEPS)), (1, (1, 10 * STEPS)), (FIRST - 1, (FIRST - 1, FIRST)), (FIRST, (FIRST, FIRST + 1)),
        (FIRST - 1, (FIRST, STEPS - 1)), (FIRST + 1, (FIRST + 5, STEPS + 1)), (STEPS - 2, (STEPS - 1, STEPS)), (STEPS, (STEPS, STEPS + 5)),
    )),
], ids=str)  # fmt: skip
def test_what_is_trained_and_what_is_saved_follow_from_the_window(
    run: Tiny, tmp_path: Path, to_step: int, window: tuple[int, int]
) -> None:
    """Each step outside of the window is trained once, in its phase; the last checkpoint is of the last step, and describes its weights."""
    copy = run.copy(tmp_path / "run")
    rollback(copy.run_dir, "base", to_step, window)
    copy.pretrain(*EVERY)
    trained = [step for step in range(STEPS) if not window[0] <= step < window[1]]
    assert steps_of(copy) == trained
    newest = listing.directories(copy.run_dir / "checkpoints")[-1]
    meta, phase = listing.read_meta(newest)["meta"], int(trained[-1] >= FIRST)
    assert listing.step_of(newest) == STEPS
    assert (meta["phase"], meta["architecture"]) == (("general", "long")[phase], recorded(in_force(copy.resolve().recipe)[phase]))
    assert (meta["architecture"]["rope"]["theta"] == 50_000.0) is bool(phase)
    before = min(window[0], STEPS)  # up to the window the weights are those of the undisturbed run
    assert same_bits(checkpoint(copy.run_dir, before), checkpoint(run.run_dir, before)) == []
    if window[1] >= STEPS:
        assert same_bits(checkpoint(copy.run_dir), checkpoint(copy.run_dir, trained[-1] + 1)) == []
    elif window[1] > window[0]:
        assert same_bits(checkpoint(copy.run_dir), checkpoint(run.run_dir))
    lines = curve(copy.run_dir)
    copy.pretrain(*EVERY)
    assert curve(copy.run_dir) == lines, "nothing was left to do"


@pytest.mark.parametrize("killed", [
    "after the line in the ledger", pytest.param("between two renames", marks=slow),
    pytest.param("before the first save after it", marks=slow),
])  # fmt: skip
def test_a_roll_back_that_is_killed_is_finished_by_the_next_run(
    run: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    copy, whole = run.copy(tmp_path / "run"), run.copy(tmp_path / "whole")
    window = (STEPS - 4, STEPS - 2)
    rollback(whole.run_dir, "base", STEPS - 5, window)
    whole.pretrain(*EVERY)
    renames: list[Path] = []
    with monkeypatch.context() as patch:
        honest = names.set_aside

        def set_aside(path: Path, why: str) -> Path:
            if len(renames) == {"after the line in the ledger": 0, "between two renames": 2}.get(killed, 99):
                raise ZeroDivisionError
            renames.append(path)
            return honest(path, why)

        patch.setattr(names, "set_aside", set_aside)
        if killed == "before the first save after it":
            rollback(copy.run_dir, "base", STEPS - 5, window)
            before_each_step(patch, lambda step: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                copy.pretrain(*EVERY)
        else:
            with pytest.raises(ZeroDivisionError):
                rollback(copy.run_dir, "base", STEPS - 5, window)
    copy.pretrain(*EVERY)
    assert same_bits(checkpoint(copy.run_dir), checkpoint(whole.run_dir)) == []
    assert curve(copy.run_dir) == curve(whole.run_dir)


def test_the_phase_that_a_rollback_leaves_is_in_force_no_more() -> None:
    """Or a window that reaches the end would be saved with the positions of that phase, and the weights of an earlier one."""
    nothing = lambda *_: None  # noqa: E731
    trainer: Any = SimpleNamespace(
        step=9, _boundary=SimpleNamespace(phase=SimpleNamespace(first_step=5)), _saver=SimpleNamespace(wait=nothing, saved=2),
        _faults=SimpleNamespace(roll_back=lambda *_: True), _load=dict, _advance=nothing, _log=SimpleNamespace(rewind=nothing),
        files=SimpleNamespace(sampler=SimpleNamespace(truncate=nothing)), _metrics=SimpleNamespace(restart_clock=nothing),
        _details=SimpleNamespace(event=lambda: None), growth=None, curriculum=SimpleNamespace(tokens_before=lambda step: 0),
    )  # fmt: skip
    request: Any = None
    bar: Any = SimpleNamespace(advance=nothing)
    assert Trainer._roll_back(trainer, request, bar)
    assert trainer._boundary.phase is None
