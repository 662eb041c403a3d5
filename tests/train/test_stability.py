"""Spikes, rollbacks and what they leave out; a run decides alike whether it was interrupted or not."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from unsteady import AnotherOrder

from lmworks.api.runs import Run
from lmworks.checkpoint import listing
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.save import CheckpointWriter
from lmworks.errors import UserError
from lmworks.io import jsonl
from lmworks.metrics.log import read
from lmworks.model import Transformer
from lmworks.model.layers import SwiGLU
from lmworks.model.transformer import Loss
from lmworks.shards.order import MixtureOverride
from lmworks.train import fault_handler, trainer
from lmworks.train.curriculum import PretrainingCurriculum
from lmworks.train.data.mixture import read_changes, request_change
from lmworks.train.saving import Saver
from lmworks.ui.terminal import Interrupted, Preempted
from lmworks.watch import policy
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import Ledger, read_ledger
from lmworks.watch.monitors import Starvation
from lmworks.watch.policy import Limits
from tiny_run import STEPS, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# Wide enough for the noise of four short sequences, and far below what is planted.
SPIKE = ("stability.spike.window_steps=8", "stability.spike.min_rise_nats=3", "stability.spike.norm_factor=1000")
EVERY = ("train.save_every=1 steps", "checkpoints.keep_last=99")
HIGH = 10


def high_loss(loss: Loss) -> Loss:
    return replace(loss, head=loss.head._replace(cross_entropy=loss.head.cross_entropy * 50))


def nan_loss(loss: Loss) -> Loss:
    return replace(loss, total=loss.total * float("nan"))


def spoil_steps(patch: pytest.MonkeyPatch, steps: Collection[int], spoil: Callable[[Loss], Loss]) -> None:
    """Spoil what the loss of these steps of training is taken for."""
    honest, now = Transformer.loss, {"step": -1}

    def spoiled(self: Transformer, *inputs: torch.Tensor) -> Any:
        loss = honest(self, *inputs)
        return spoil(loss) if now["step"] in steps and torch.is_grad_enabled() else loss

    before_each_step(patch, lambda step: now.update(step=step))
    patch.setattr(Transformer, "loss", spoiled)


def events(run: Tiny, name: str) -> list[dict[str, Any]]:
    return [line for line in read_ledger(run.run_dir / "ledger.jsonl") if line["event"] == name]


def save_only(patch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    """Checkpoints of these steps, besides that of the last."""
    patch.setattr(Saver, "is_due", lambda self, step, phase: step in steps)


def steps_of(run: Tiny) -> list[int]:
    return [line["step"] for line in curve(run.run_dir)]


def left_out(start: int, stop: int) -> list[int]:
    """The steps in the curve of a run that left out [start, stop); lines count from 1."""
    return [step for step in range(1, STEPS + 1) if not start < step <= stop]


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    run = tiny.copy(tmp_path_factory.mktemp("undisturbed") / "run")
    run.pretrain()
    return run


@pytest.fixture(scope="module")
def rolled_back(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A spike in step 10 leads back to the checkpoint of step 8."""
    run = tiny.copy(tmp_path_factory.mktemp("rolled_back") / "run")
    with pytest.MonkeyPatch.context() as patch:
        spoil_steps(patch, [HIGH], high_loss)
        run.pretrain(*SPIKE, "stability.spike.action=rollback")
    return run


# Long enough for the recipe's own limits, which need 32 steps behind the warm-up; one short phase follows.
LONG = ("train.phases.general.tokens=10688 tokens", "train.phases.long.tokens=1024 tokens", "shards.max_epochs=99")
WARM, KNOWN, LONG_STEPS = 4, 32, 47


def limits_of(patch: pytest.MonkeyPatch) -> dict[int, Limits]:
    """The limits that each step of training is judged by, as they come."""
    honest, seen = trainer.train_step, {}

    def observed(model: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        seen[batch.step] = options["limits"]
        return honest(model, optimizer, batch, **options)

    patch.setattr(trainer, "train_step", observed)
    return seen


def steep_loss(loss: Loss) -> Loss:
    return replace(loss, total=loss.total * 300)


def test_an_undisturbed_run_is_not_touched_by_the_policies(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limits of a recipe that says nothing about them; every step that they can judge is judged."""
    limits = limits_of(monkeypatch)
    tiny_copy.pretrain(*LONG)
    names = {line["event"] for line in read_ledger(tiny_copy.run_dir / "ledger.jsonl")}
    assert not names & {"spike", "rollback", "bad_step", "save_failed", "slow_rank"}
    assert steps_of(tiny_copy) == list(range(1, LONG_STEPS + 1))
    first = WARM + KNOWN
    judged = [step for step, limit in limits.items() if max(limit.loss, limit.grad_norm) < float("inf")]
    assert judged == list(range(first, LONG_STEPS - 4)), "all of the first phase, none of the next, which is too short"
    lines = curve(tiny_copy.run_dir)
    assert all(lines[step]["train/loss"] < limits[step].loss and lines[step]["optim/grad_norm"] < limits[step].grad_norm for step in judged)


def test_a_gradient_norm_that_jumps_is_a_spike_though_the_loss_is_not(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the recipe's own limits: ten times the usual norm."""
    steep = WARM + KNOWN + 4
    spoil_steps(monkeypatch, [WARM + 2, steep], steep_loss)
    save_only(monkeypatch, [WARM + 2, WARM + 3, steep, steep + 1])
    tiny_copy.pretrain("checkpoints.keep_last=9", *LONG)
    run = tiny_copy.run_dir
    (line,) = events(tiny_copy, "spike")  # the first one comes before anything is known to be usual
    assert (line["step"], line["action"]) == (steep, "skip")
    assert line["loss"] < line["loss_limit"] and line["grad_norm"] > line["grad_norm_limit"]
    assert same_bits(checkpoint(run, steep + 1), checkpoint(run, steep)) == []
    assert "model/head.weight" in same_bits(checkpoint(run, WARM + 3), checkpoint(run, WARM + 2))


def test_the_update_of_a_spike_is_not_applied(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_steps(monkeypatch, [HIGH], high_loss)
    save_only(monkeypatch, [HIGH, HIGH + 1, HIGH + 2])
    tiny_copy.pretrain("checkpoints.keep_last=9", *SPIKE)
    run = tiny_copy.run_dir
    assert same_bits(checkpoint(run, HIGH + 1), checkpoint(run, HIGH)) == []
    assert "model/head.weight" in same_bits(checkpoint(run, HIGH + 2), checkpoint(run, HIGH + 1))
    (line,) = events(tiny_copy, "spike")
    assert (line["step"], line["action"]) == (HIGH, "skip")
    assert line["loss"] > 3 * line["loss_limit"]
    assert curve(run)[-1]["train/spikes"] == 1


def test_a_lowered_rate_comes_back(undisturbed: Tiny, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = ("stability.spike.action=reduce_lr", "stability.spike.reduced_lr_factor=0.5", "stability.spike.reduced_lr_steps=2")
    spoil_steps(monkeypatch, [HIGH], high_loss)
    tiny_copy.pretrain(*SPIKE, *lower)
    plain, lowered = ([line["optim/learning_rate"] for line in curve(run.run_dir)] for run in (undisturbed, tiny_copy))
    shares = [round(after / before, 9) for before, after in zip(plain, lowered, strict=True)]
    assert shares == [1] * (HIGH + 1) + [0.5, 0.75] + [1] * (STEPS - HIGH - 3)


def test_a_rollback_leaves_the_window_out(rolled_back: Tiny) -> None:
    (line,) = events(rolled_back, "rollback")
    assert (line["step"], line["to_step"], line["skip"]) == (HIGH, 8, [8, 11])
    assert line["reason"] == "1 spike in a row (stability.spike)"
    assert steps_of(rolled_back) == left_out(8, 11)
    assert [step for step in range(STEPS) if Run(rolled_back.run_dir).batch(step).left_out] == [8, 9, 10]
    whole = sum(line["train/batch_tokens"] for line in curve(rolled_back.run_dir))
    assert curve(rolled_back.run_dir)[-1]["train/tokens"] == whole, "what is counted is what was trained on"


def test_a_rollback_in_the_run_equals_one_by_hand(rolled_back: Tiny, tiny_copy: Tiny) -> None:
    """Stopped where the checkpoint is, told in the ledger what to leave out, and started again: the same bits."""
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 7 else None)
        with pytest.raises(Interrupted, match="saved at step 8"):
            tiny_copy.pretrain()
    with Ledger(tiny_copy.run_dir / "ledger.jsonl") as ledger:
        ledger.write("rollback", stage="pretrain", step=HIGH, to_step=8, skip=[8, 11])
    tiny_copy.pretrain()
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(rolled_back.run_dir)) == []
    assert [line["train/loss"] for line in curve(tiny_copy.run_dir)] == [line["train/loss"] for line in curve(rolled_back.run_dir)]


@pytest.mark.parametrize("when", ["some steps later", pytest.param("before the checkpoint is loaded", marks=pytest.mark.slow)])
def test_a_run_that_dies_after_a_rollback_goes_on_alike(
    rolled_back: Tiny, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    spoil_steps(monkeypatch, [HIGH], high_loss)
    with monkeypatch.context() as patch:
        if when == "some steps later":
            before_each_step(patch, lambda step: 1 // 0 if step == 13 else None)
        else:
            patch.setattr(Checkpoints, "load", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            tiny_copy.pretrain(*SPIKE, "stability.spike.action=rollback")
    tiny_copy.pretrain(*SPIKE, "stability.spike.action=rollback")
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(rolled_back.run_dir)) == []
    assert curve(tiny_copy.run_dir) == curve(rolled_back.run_dir)
    assert len(events(tiny_copy, "rollback")) == 1


def test_bad_steps_in_a_row_lead_back_and_what_was_saved_in_between_is_undone(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_steps(monkeypatch, [10, 11, 12], nan_loss)
    tiny_copy.pretrain(*EVERY, "stability.max_bad_steps=3")
    (line,) = events(tiny_copy, "rollback")
    assert (line["step"], line["to_step"], line["skip"]) == (12, 10, [10, 13])
    assert steps_of(tiny_copy) == left_out(10, 13)
    assert [os.path.basename(line["renamed"]) for line in events(tiny_copy, "checkpoint_undone")] == [
        "step-00000012.undone-1", "step-00000011.undone-1",
    ]  # fmt: skip
    assert "model/head.weight" in same_bits(checkpoint(tiny_copy.run_dir, 14), checkpoint(tiny_copy.run_dir, 10))


def test_a_rollback_that_does_not_help_goes_further_back_and_the_last_one_stops(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_steps(monkeypatch, range(4, 99), nan_loss)
    said = r"stopped at step 13 after 2 rollbacks: the gradient norm was not finite in 3 steps in a row \(stability.max_bad_steps\);"
    with pytest.raises(UserError, match=said):
        tiny_copy.pretrain(*EVERY, "stability.max_bad_steps=3", "stability.max_rollbacks=2")
    assert [(line["to_step"], line["skip"]) for line in events(tiny_copy, "rollback")] == [(4, [4, 7]), (3, [3, 10])]
    assert events(tiny_copy, "stopped")[-1]["step"] == 12


def test_saves_during_bad_steps_leave_the_checkpoints_that_a_rollback_needs(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `keep_last: 2`, the saves after steps 8 and 10 would remove those of 4 and 6; the second rollback goes to 4."""
    spoil_steps(monkeypatch, range(6, 16), nan_loss)
    options = ("checkpoints.keep_last=2", "checkpoints.keep_best=false", "train.save_every=2 steps")
    tiny_copy.pretrain(*options, "stability.max_bad_steps=5")
    found = [(line["step"], line["to_step"], line["skip"]) for line in events(tiny_copy, "rollback")]
    assert found == [(10, 6, [6, 11]), (15, 4, [4, 16])]
    assert [listing.step_of(path) for path in listing.directories(tiny_copy.run_dir / "checkpoints")] == [20, STEPS], "kept no longer"


def test_no_spike_leads_back_at_the_beginning(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three spikes in a row, which roll back elsewhere, are skipped before `rollback_after`, and then accepted; later ones roll back."""
    spoil_steps(monkeypatch, [6, 7, 8, HIGH + 2], high_loss)
    early = ("stability.spike.rollback_after=40%", "stability.spike.action=rollback", "stability.spike.max_in_a_row=3")
    tiny_copy.pretrain(*SPIKE, *early)
    assert [(line["step"], line["action"]) for line in events(tiny_copy, "spike")] == [
        (6, "skip"), (7, "skip"), (8, "skip"), (HIGH + 2, "rollback"),
    ]  # fmt: skip
    assert [line["step"] for line in events(tiny_copy, "spike_accepted")] == [8]
    assert [line["step"] for line in events(tiny_copy, "rollback")] == [HIGH + 2]


def test_deleted_checkpoints_start_the_run_over(
    undisturbed: Tiny, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a former course has skipped, spent on rollbacks and changed in its mixture does not hold for the next."""
    with monkeypatch.context() as patch:
        spoil_steps(patch, [HIGH], high_loss)
        before_each_step(patch, lambda step: step != 3 or request_change(tiny_copy.run_dir, MixtureOverride(6, {"docs": 1.0})))
        tiny_copy.pretrain(*SPIKE, "stability.spike.action=rollback", "stability.max_rollbacks=1")
    assert steps_of(tiny_copy) != steps_of(undisturbed)
    shutil.rmtree(tiny_copy.run_dir / "checkpoints")
    tiny_copy.pretrain()
    assert "has no checkpoint any more, so pretrain starts over from step 0" in " ".join(capsys.readouterr().err.split())
    assert curve(tiny_copy.run_dir) == curve(undisturbed.run_dir)
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []
    assert [line["step"] for line in events(tiny_copy, "start_over")] == [STEPS]
    assert not Run(tiny_copy.run_dir).batch(HIGH).left_out and not read_changes(tiny_copy.run_dir).applied


def test_a_level_that_stays_is_accepted_when_no_rollback_is_left(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_steps(monkeypatch, range(HIGH, 99), high_loss)
    tiny_copy.pretrain(*SPIKE, "stability.max_rollbacks=0", "stability.spike.max_in_a_row=2")
    assert [line["step"] for line in events(tiny_copy, "spike_accepted")] == [HIGH + 1]
    assert steps_of(tiny_copy) == list(range(1, STEPS + 1))


def test_a_window_up_to_the_end_still_ends_the_run(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_steps(monkeypatch, [STEPS - 1], high_loss)
    tiny_copy.pretrain(*SPIKE, "stability.spike.action=rollback")
    run = tiny_copy.run_dir
    assert steps_of(tiny_copy)[-2:] == [STEPS - 1, STEPS], "the weights that it ends with are measured, and answer"
    assert "validation/bits_per_byte" in curve(run)[-1] and jsonl.last(run / "samples.jsonl")["step"] == STEPS
    assert same_bits(checkpoint(run), checkpoint(run, STEPS - 1)) == []
    before = curve(run)
    tiny_copy.pretrain(*SPIKE, "stability.spike.action=rollback")
    assert curve(run) == before


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Preempted), (signal.SIGUSR1, Preempted), (signal.SIGINT, Interrupted)])
def test_a_scheduler_that_asks_is_told_apart_from_a_person(
    tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, kind: type[Interrupted]
) -> None:
    before_each_step(monkeypatch, lambda step: os.kill(os.getpid(), number) if step == 5 else None)
    with pytest.raises(Interrupted, match=f"stopped by {number.name} and saved at step 6") as stopped:
        tiny_copy.pretrain()
    assert type(stopped.value) is kind


def fail_saves(patch: pytest.MonkeyPatch, steps: Collection[int]) -> None:
    """The disk is full whenever one of these steps is saved."""
    honest = CheckpointWriter._write_data

    def full(self: CheckpointWriter, aside: Any, *rest: Any) -> Any:
        if int(aside.name.split(".")[1].removeprefix("step-")) in steps:
            raise OSError(28, "No space left on device")
        return honest(self, aside, *rest)

    patch.setattr(CheckpointWriter, "_write_data", full)


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_full_disk_is_waited_out(undisturbed: Tiny, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    fail_saves(monkeypatch, range(8, 12))
    tiny_copy.pretrain(f"checkpoints.asynchronous={str(background).lower()}")
    failed = events(tiny_copy, "save_failed")
    assert 1 <= len(failed) < 5
    assert "is full" in failed[0]["reason"]
    saved = [line["step"] for line in events(tiny_copy, "checkpoint")]
    assert saved[0] == 4
    assert 12 <= saved[1] <= 16, "as soon as there is room"
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []


def test_a_save_that_failed_in_the_background_is_made_again_before_the_run_stops(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, failed = CheckpointWriter._write_data, [8]

    def full_once(self: CheckpointWriter, aside: Any, *rest: Any) -> Any:
        if f"step-{failed[-1]:08d}" in aside.name:
            failed.append(-1)
            raise OSError(28, "No space left on device")
        return honest(self, aside, *rest)

    monkeypatch.setattr(CheckpointWriter, "_write_data", full_once)
    before_each_step(monkeypatch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 7 else None)
    with pytest.raises(Interrupted, match="saved at step 8"):
        tiny_copy.pretrain("checkpoints.asynchronous=true")
    assert len(events(tiny_copy, "save_failed")) == 1 and checkpoint(tiny_copy.run_dir, 8)


def test_a_disk_that_stays_full_ends_the_run_and_leaves_what_was_saved(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_saves(monkeypatch, range(8, 99))
    with pytest.raises(UserError, match=r"is full .* \(it failed 3 times in a row: stability.max_failed_saves\)"):
        tiny_copy.pretrain("stability.max_failed_saves=3", "checkpoints.asynchronous=false")
    assert [line["step"] for line in events(tiny_copy, "save_failed")] == [8, 10, 11]
    assert checkpoint(tiny_copy.run_dir, 4)


# Nine steps, of which the last is in a phase of its own.
SHORT = ("train.phases.general.tokens=1600 tokens", "train.phases.general.lr_schedule={warmup: 2 steps, decay: 2 steps}",
         "train.phases.long.tokens=256 tokens", "train.phases.long.lr_schedule={kind: constant, warmup: 0 steps}")  # fmt: skip


def fail_last_save(patch: pytest.MonkeyPatch, times: int, act: Callable[[], None] = lambda: None) -> None:
    """So many saves of the last step of `SHORT` find no room; `act` is called in each."""
    honest, left = CheckpointWriter._write_data, [times]

    def full(self: CheckpointWriter, aside: Any, *rest: Any) -> Any:
        if "step-00000009" in aside.name and left[0]:
            left[0] -= 1
            act()
            raise OSError(28, "No space left on device")
        return honest(self, aside, *rest)

    patch.setattr(CheckpointWriter, "_write_data", full)
    patch.setattr(fault_handler, "SHORTEST_PAUSE", 0.01)


@pytest.mark.parametrize("background", ["false", "true"])
def test_the_last_save_waits_for_room_too(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, background: str) -> None:
    fail_last_save(monkeypatch, 2)
    tiny_copy.pretrain(*SHORT, f"checkpoints.asynchronous={background}")
    assert [(line["step"], line["in_a_row"]) for line in events(tiny_copy, "save_failed")] == [(9, 1), (9, 2)]
    assert [line["step"] for line in events(tiny_copy, "checkpoint")][-1] == 9 and events(tiny_copy, "finish")
    assert checkpoint(tiny_copy.run_dir, 9)


@pytest.mark.parametrize("stopped", [False, True])
def test_the_last_save_does_not_wait_for_ever(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """It ends after as many failures as any other, and at once where the run is asked to stop."""
    fail_last_save(monkeypatch, 99, lambda: os.kill(os.getpid(), signal.SIGINT) if stopped else None)
    times = "" if stopped else r".*it failed 3 times in a row: stability.max_failed_saves"
    with pytest.raises(UserError, match=rf"step 9 was not saved: .* is full.*step-00000008, is intact{times}"):
        tiny_copy.pretrain(*SHORT, "stability.max_failed_saves=3", "checkpoints.asynchronous=false")
    assert len(events(tiny_copy, "save_failed")) == (1 if stopped else 3)


def fill_disk(patch: pytest.MonkeyPatch, steps: Collection[int], name: str) -> None:
    """During these steps nothing can be appended to files of this name, or written beside batches."""
    honest, honest_path, now = jsonl.append, policy.atomic_path, {"step": -1}

    def append(fd: int, record: dict[str, Any]) -> None:
        if now["step"] in steps and os.readlink(f"/proc/self/fd/{fd}").endswith(name):
            raise OSError(28, "No space left on device")
        honest(fd, record)

    def atomic_path(path: Path) -> Any:
        if now["step"] in steps:
            raise OSError(28, "No space left on device")
        return honest_path(path)

    before_each_step(patch, lambda step: now.update(step=step))
    patch.setattr(jsonl, "append", append)
    patch.setattr(policy, "atomic_path", atomic_path)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux only")
def test_metrics_events_batches_and_samples_wait_for_room(
    tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save while they wait has failed, and the next has all of them; only the batch of a bad step and samples are lost, and named."""
    undisturbed = tiny_copy.copy(tiny_copy.run_dir.parent / "undisturbed")
    spoil_steps(monkeypatch, [9], nan_loss)
    undisturbed.pretrain("train.sample_every=9 steps")
    with monkeypatch.context() as patch:
        fill_disk(patch, range(6, 11), ".jsonl")
        tiny_copy.pretrain("train.sample_every=9 steps")
    assert [line["step"] for line in events(tiny_copy, "save_failed")] == [8, 10, 11]
    assert "is full" in events(tiny_copy, "save_failed")[0]["reason"]
    assert [line["step"] for line in events(tiny_copy, "checkpoint")][:3] == [4, 12, 16]
    assert curve(tiny_copy.run_dir) == curve(undisturbed.run_dir)
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []
    assert [line["batch"] for line in events(tiny_copy, "bad_step")] == [None]
    said = " ".join(capsys.readouterr().err.split())
    assert "the batch of step 9 was not saved for replay" in said and "the samples of step 9 were not written" in said


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="Linux only")
@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_metrics_or_events_that_find_no_room_end_the_run_as_saves_do(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with monkeypatch.context() as patch:
        fill_disk(patch, range(6, 99), name)
        spoil_steps(patch, [7], nan_loss)  # an event
        with pytest.raises(UserError, match=r"is full .* \(it failed 3 times in a row: stability.max_failed_saves\)"):
            tiny_copy.pretrain("stability.max_failed_saves=3")
    assert [listing.step_of(path) for path in listing.directories(tiny_copy.run_dir / "checkpoints")] == [4]
    tiny_copy.pretrain()
    assert steps_of(tiny_copy) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("action", ["rollback", pytest.param("stop", marks=pytest.mark.slow)])
def test_arithmetic_that_does_not_repeat_is_noticed(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """One bit of the loss differs the second time that a micro-batch is run, in step 9, the first time that it is trained."""
    undisturbed = tiny_copy.copy(tiny_copy.run_dir.parent / "undisturbed")
    recheck = ("stability.recheck_every=5 steps", f"stability.on_corruption={action}", "train.micro_batch_sequences=2")
    undisturbed.pretrain(*recheck)
    honest, now, planted = Transformer.loss, {"step": -1, "calls": 0}, []

    def flipping(self: Transformer, *inputs: torch.Tensor) -> Any:
        loss = honest(self, *inputs)
        now["calls"] += torch.is_grad_enabled()
        if now["step"] == 9 and now["calls"] == 4 and not planted:  # two micro-batches are trained, then one is run twice
            planted.append(True)
            return replace(loss, head=loss.head._replace(cross_entropy=torch.nextafter(loss.head.cross_entropy, torch.tensor(9e9))))
        return loss

    before_each_step(monkeypatch, lambda step: now.update(step=step, calls=0))
    monkeypatch.setattr(Transformer, "loss", flipping)
    if action == "stop":
        said = "stopped at step 10: silent corruption on rank 0: the loss was another one when the same micro-batch was run again"
        with pytest.raises(UserError, match=said):
            tiny_copy.pretrain(*recheck)
    else:
        tiny_copy.pretrain(*recheck)
        (line,) = events(tiny_copy, "rollback")
        assert (line["to_step"], line["skip"]) == (8, None)
        assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []
        assert curve(tiny_copy.run_dir) == curve(undisturbed.run_dir)
    assert planted
    assert events(tiny_copy, "corruption")[0]["ranks"] == [0]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_gradients_that_need_not_repeat_are_no_corruption_on_gpus(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    honest = SwiGLU.forward
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x: AnotherOrder.apply(honest(self, x), 2**-20))
    if device == "gpu":
        monkeypatch.setattr("lmworks.train.corruption._repeats", lambda device: False)
        tiny_copy.pretrain("stability.recheck_every=5 steps")
        assert events(tiny_copy, "corruption") == []
    else:
        with pytest.raises(UserError, match="silent corruption on rank 0: the gradient of"):
            tiny_copy.pretrain("stability.recheck_every=5 steps")


def test_kernels_that_repeat_are_asked_for_while_training(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    before_each_step(monkeypatch, lambda step: seen.append(torch.are_deterministic_algorithms_enabled()))
    try:
        tiny_copy.pretrain("train.deterministic=true")
        assert len(seen) == STEPS and all(seen) and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_hunger_for_data_is_told_once(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.train.fault_handler.Starvation", lambda share: Starvation(share, 10))
    honest, step, taken = PretrainingCurriculum.batch, trainer.train_step, [0.05]

    def timed(*given: Any, **options: Any) -> Any:
        began = time.monotonic()
        result = step(*given, **options)
        taken[0] = max(0.05, time.monotonic() - began)
        return result

    def late(self: PretrainingCurriculum, *given: Any) -> Any:
        time.sleep(2 * taken[0])  # reading takes longer than computing did, however slow the machine is
        return honest(self, *given)

    monkeypatch.setattr(trainer, "train_step", timed)
    monkeypatch.setattr(PretrainingCurriculum, "batch", late)
    tiny_copy.pretrain("stability.starved_fraction=0.05")
    (line,) = events(tiny_copy, "data_starved")
    assert line["share"] > 0.05


def test_waiting_for_data_is_measured(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch is made only half a second after the trainer has begun to wait for it."""
    slow, waiting = 7, threading.Event()
    honest_batch, honest_beat = PretrainingCurriculum.batch, Heartbeat.beat

    def beat(self: Heartbeat, step: int, doing: str, *rest: Any) -> None:
        honest_beat(self, step, doing, *rest)
        if (step, doing) == (slow, "data"):
            waiting.set()

    def late(self: PretrainingCurriculum, step: int, *rows: int) -> Any:
        if step == slow:
            assert waiting.wait(60)
            time.sleep(0.5)
        return honest_batch(self, step, *rows)

    monkeypatch.setattr(Heartbeat, "beat", beat)
    monkeypatch.setattr(PretrainingCurriculum, "batch", late)
    tiny_copy.pretrain()
    waits = {line["step"]: line["perf/data_wait"] for line in read(tiny_copy.run_dir)}
    seconds = {line["step"]: line["perf/step_seconds"] for line in read(tiny_copy.run_dir)}
    assert 0.25 < waits[slow + 1] <= seconds[slow + 1]


def test_weights_that_are_no_numbers_are_never_saved(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the way, where a run would be rolled back to them, nor at the end, where all later stages would start from them."""
    honest = trainer.train_step

    def poisoned(model: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        result = honest(model, optimizer, batch, **options)
        if batch.step == 17:
            with torch.no_grad():
                next(iter(model.parts[0].parameters())).fill_(math.nan)
            if stopped:
                os.kill(os.getpid(), stopped.pop())
        return result

    stopped = [signal.SIGINT]
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "train_step", poisoned)
        with pytest.raises(Interrupted, match="and saved at step 16; resume with"):  # not 18, at which it stops
            tiny_copy.pretrain("checkpoints.keep_last=9")
        with pytest.raises(UserError, match="after step 21 are not finite, and were not saved; the newest checkpoint is of step 16"):
            tiny_copy.pretrain("checkpoints.keep_last=9")
    assert [listing.step_of(path) for path in listing.directories(tiny_copy.run_dir / "checkpoints")][-1] == 16
    found = [line["step"] for line in read_ledger(tiny_copy.run_dir / "ledger.jsonl") if line["event"] == "weights_not_finite"]
    assert found == [18, 20, 21]
    tiny_copy.pretrain("checkpoints.keep_last=9")
    assert all(tensor.isfinite().all() for name, tensor in checkpoint(tiny_copy.run_dir).items() if name.startswith("model/"))
