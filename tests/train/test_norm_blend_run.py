"""QK norm that a phase adds, from the command line: up to the first step of the phase the run has the bits of one without it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from cli.command import Done, Lmworks
from lmworks.errors import UserError
from lmworks.recipe.families.registry import class_for
from lmworks.recipe.weights import find_weights
from lmworks.weights.run_models import load_checkpoint
from saved_run import save_run
from tiny_run import BRIEF, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHORT = (*BRIEF, "train.phases.long.tokens=1024 tokens", "train.save_every=1 steps", "checkpoints.keep_last=20")
FIRST = 5  # steps of the first phase; the second has 4
ADDED = ("model.use_qk_norm=true", "train.phases.long.qk_norm_steps=2 steps")


def command(lmworks: Lmworks, tiny: Tiny, *changes: str) -> Done:
    return lmworks("pretrain", tiny.recipe, *(word for one in (f"run_dir={tiny.run_dir}", *SHORT, *changes) for word in ("--set", one)))


def losses(tiny: Tiny) -> list[float]:
    return [line["train/loss"] for line in curve(tiny.run_dir) if "train/loss" in line]


def test_a_phase_adds_it(tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    plain, stopped, lmworks = tiny_copy.copy(tmp_path / "plain"), tiny_copy.copy(tmp_path / "stopped"), Lmworks(monkeypatch, capfd)
    assert command(lmworks, plain, "model.use_qk_norm=false").code == 0
    assert command(lmworks, tiny_copy, *ADDED).code == 0
    without, with_it = losses(plain), losses(tiny_copy)
    assert with_it[: FIRST + 1] == without[: FIRST + 1] and len(with_it) == FIRST + 4
    assert all(one != other for one, other in zip(with_it[FIRST + 1 :], without[FIRST + 1 :], strict=True))

    ids = torch.arange(40)[None]
    for step, blend in ((FIRST, 0.0), (FIRST + 1, 0.0), (FIRST + 2, 0.5), (FIRST + 3, 1.0)):
        model = load_checkpoint(find_weights(tiny_copy.run_dir / "checkpoints" / f"step-{step:08d}"), device=torch.device("cpu"))
        assert model.config.qk_norm_blend == blend
        if blend < 1:
            with pytest.raises(UserError, match="only partly blended in"):
                class_for(model.config)
        else:
            class_for(model.config)
            whole = model(ids)
            model.set_norm_blend(0.25)
            assert not torch.equal(model(ids), whole)

    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == FIRST + 1 else None)
        assert command(lmworks, stopped, *ADDED).code != 0
    assert command(lmworks, stopped, *ADDED).code == 0
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(stopped.run_dir)) == []


def test_a_run_that_began_without_it_goes_on_with_it(
    tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """`start_from` a checkpoint without the norms: they begin as ones, and the first step computes what the old model does."""
    save_run(tiny_copy, tmp_path / "old", "model.use_qk_norm=false")
    start, lmworks = f"start_from={tmp_path}/old/checkpoints/step-00000030", Lmworks(monkeypatch, capfd)
    found = []
    for name, change in (("as_before", "model.use_qk_norm=false"), ("fixed", "train.phases.general.qk_norm_steps=2 steps")):
        run = tiny_copy.copy(tmp_path / name)
        done = command(lmworks, run, start, change)
        assert done.code == 0, done.err
        found.append(losses(run))
    assert found[0][0] == found[1][0] and found[0][1:] != found[1][1:]
    assert "model.use_qk_norm is true in the recipe" in command(lmworks, tiny_copy, start).error


@pytest.mark.parametrize(("changes", "says"), [
    (("model.use_qk_norm=false", "train.phases.long.qk_norm_steps=2 steps"), "there is no norm to add"),
    (("train.phases.long.qk_norm_steps=2 steps", "train.phases.general.qk_norm_steps=1 steps"), "an earlier phase has added the norm"),
    (("train.phases.long.qk_norm_steps=4 steps",), "so that the phase ends with the whole norm"),
    (("model.qk_norm_blend=0.5",), "leave it out, and set train.phases.qk_norm_steps"),
    (("model.use_qk_norm=false", "model.qk_norm_blend=0.5"), "the share of a norm that is not there"),
])  # fmt: skip
def test_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], changes: tuple[str, ...], says: str
) -> None:  # fmt: skip
    assert says in command(Lmworks(monkeypatch, capfd), tiny, *changes).error
