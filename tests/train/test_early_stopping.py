"""Early stopping: the stage ends after so many validations without an improvement, also across a resume, and the run goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint import listing
from lmworks.checkpoint.state import load
from lmworks.errors import UserError
from lmworks.export.card import write_card
from lmworks.model import Transformer
from lmworks.recipe.schema.train import EarlyStopping as Options
from lmworks.recipe.weights import find_start_weights
from lmworks.run.copy import copy_run, restore_run
from lmworks.train.validation import EarlyStopper, Validator
from lmworks.ui.terminal import Interrupted
from lmworks.watch.ledger import read_ledger
from lmworks.weights.run_models import final_checkpoint, load_checkpoint, load_model
from tiny_run import STEPS, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# No validation improves by 1.5 bits per byte on the first: the third after it is the last.
EARLY = ("train.early_stopping.patience=3", "train.early_stopping.min_delta=1.5", "train.validate_every=4 steps")
LAST = 16


def observed(options: Options, losses: list[float]) -> tuple[int, EarlyStopper]:
    """The number of the validation after which it stops (0 if it does not)."""
    found = EarlyStopper(options)
    for step, loss in enumerate(losses, 1):
        found.observe(step, {"validation/loss": loss})
        if found.stops:
            return step, found
    return 0, found


@pytest.mark.parametrize(("losses", "min_delta", "last"), [
    ([3.0, 2.0, 1.0, 0.5], 0.0, 0),
    ([3.0, 2.0, 2.0, 2.5, 1.0], 0.0, 4),
    ([3.0, 2.9, 2.8, 2.7], 0.15, 0),  # compared with the best that counted, not with the one before: 2.8 counts
    ([3.0, 2.9, 2.8, 2.7], 0.5, 3),
    ([3.0, float("nan"), float("nan")], 0.0, 3),
    ([float("nan"), 3.0, 2.0], 0.0, 0),
])  # fmt: skip
def test_two_validations_without_an_improvement(losses: list[float], min_delta: float, last: int) -> None:
    assert observed(Options(patience=2, min_delta=min_delta), losses)[0] == last


def test_without_options_nothing_stops() -> None:
    found = EarlyStopper(None)
    for step in range(99):
        found.observe(step, {"validation/loss": 1.0})
    assert not found.stops


def test_a_run_stops_early_and_goes_on_to_the_next_stage(tiny_copy: Tiny) -> None:
    both = (*EARLY, "tune.early_stopping.patience=1", "tune.early_stopping.min_delta=9", "tune.tokens=4Ki")
    told = tiny_copy.walk(*both, last="tune")
    assert [stage for stage, what in told if what == "end"] == ["pretrain", "tune"]
    events = [event for event in read_ledger(tiny_copy.run_dir / "ledger.jsonl") if event["event"] in ("early_stop", "finish")]
    assert [(event["event"], event["stage"], event["step"]) for event in events] == [
        ("early_stop", "pretrain", LAST), ("finish", "pretrain", LAST), ("early_stop", "tune", 8), ("finish", "tune", 8),
    ]  # fmt: skip
    first = next(line for line in curve(tiny_copy.run_dir) if "validation/bits_per_byte" in line)
    assert (events[0]["best"], events[0]["best_step"]) == (first["validation/bits_per_byte"], 4)
    assert listing.step_of(listing.directories(tiny_copy.run_dir / "checkpoints")[-1]) == LAST
    assert [line["step"] for line in curve(tiny_copy.run_dir)] == list(range(1, LAST + 1))
    assert not [stage for stage, what in tiny_copy.walk(*both, last="tune") if what == "begin"]
    recipe, card = tiny_copy.resolve(*both).recipe, tiny_copy.run_dir.parent / "card"
    write_card(recipe, load_model(tiny_copy.run_dir), tiny_copy.run_dir, card, gguf=False)
    ends = (("pretrain", events[0], f"{events[0]['tokens']:,}"), ("tune", events[2], "2,048"))
    for stage, event, tokens in ends:
        used, step = event["used_step"], event["step"]
        best = "" if used == step else f"; the weights are its best, those of step {used} of {step}"
        assert f"Early stopping ended `{stage}` after {tokens} tokens{best}." in (card / "README.md").read_text()
    undisturbed = tiny_copy.copy(tiny_copy.run_dir.parent / "whole")
    undisturbed.walk("train.validate_every=4 steps", last="pretrain", allow=["train.early_stopping"])
    assert [line["step"] for line in curve(undisturbed.run_dir)] == list(range(1, STEPS + 1)), "without it the run goes on"


@pytest.mark.parametrize("stop", [9, pytest.param(LAST - 1, marks=pytest.mark.slow)])
def test_a_resumed_run_stops_at_the_same_step(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """Interrupted between two validations, and in the very step that is the last."""
    undisturbed = tiny_copy.copy(tiny_copy.run_dir.parent / "undisturbed")
    undisturbed.pretrain(*EARLY)
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == stop else None)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*EARLY)
    tiny_copy.pretrain(*EARLY)
    assert curve(tiny_copy.run_dir) == curve(undisturbed.run_dir)
    assert curve(tiny_copy.run_dir)[-1]["step"] == LAST
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []
    tiny_copy.pretrain(*EARLY)  # killed before the stage was stamped
    assert curve(tiny_copy.run_dir) == curve(undisturbed.run_dir)


def test_what_follows_an_early_end_has_the_best_weights(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The checkpoint of the lowest validation, which save_every alone would not have saved, and which is not among the last."""
    losses = {2: 3.0, 3: 2.0, 4: 2.5, 5: 2.4}
    honest = Validator.run

    def validation(self: Validator, step: int, ema: Any) -> dict[str, float]:
        monkeypatch.setattr(self, "_validate", lambda after: {"validation/bits_per_byte": losses.get(step, 4.0)})
        return honest(self, step, ema)

    early = ("train.early_stopping.patience=2", "train.validate_every=1 steps", "train.save_every=2 steps", "tune.tokens=256 tokens")
    with monkeypatch.context() as patch:
        patch.setattr(Validator, "run", validation)
        tiny_copy.walk(*early, last="pretrain")
    place = tiny_copy.run_dir / "checkpoints"
    assert [listing.step_of(path) for path in listing.directories(place)] == [3, 4, 5]
    (ended,) = [event for event in read_ledger(tiny_copy.run_dir / "ledger.jsonl") if event["event"] == "early_stop"]
    assert (ended["step"], ended["used_step"], ended["lowest"]) == (5, 3, 2.0)
    used = load_model(tiny_copy.run_dir, "base")  # evaluation, export and serving load by this
    saved = {step: dict(Transformer(used.config).state_dict()) for step in (3, 5)}
    for step, state in saved.items():
        load(place / listing.name_of(step), {"model": state})
    weights = {name: tensor.cpu() for name, tensor in used.state_dict().items()}
    assert {step: all(torch.equal(weights[name], state[name]) for name in weights) for step, state in saved.items()} == {3: True, 5: False}
    write_card(tiny_copy.resolve(*early).recipe, used, tiny_copy.run_dir, tiny_copy.run_dir.parent / "card", gguf=False)
    assert "; the weights are the best ones, of step 3 of 5." in (tiny_copy.run_dir.parent / "card" / "README.md").read_text()
    tiny_copy.walk(*early, last="tune")
    assert listing.read_meta(listing.directories(tiny_copy.run_dir / "tune" / "checkpoints")[-1])["meta"]["base"] == "step-00000003"
    assert find_start_weights(str(tiny_copy.run_dir)).path.name == "step-00000003", "start_from: RUN"
    # Pretraining ended in its first phase, long before the second changes theta.
    assert [phase.rope and phase.rope.theta for phase in tiny_copy.resolve(*early).recipe.train.phases] == [None, 50_000.0]
    tuned = listing.directories(tiny_copy.run_dir / "tune" / "checkpoints")[-1]
    for model in (used, load_model(tiny_copy.run_dir, "tuned"), load_checkpoint(find_start_weights(str(tuned)))):
        assert model.rope.theta == 10_000.0
    told: list[str] = []
    copy_run(tiny_copy.run_dir, str(tmp_path / "copy"), told.append)
    restore_run(str(tmp_path / "copy"), tmp_path / "back", told.append)
    assert [path.name for path in listing.directories(tmp_path / "back" / "checkpoints")] == ["step-00000003", "step-00000005"]
    assert "pretrain: step-00000003, whose weights are those of the stage" in told
    assert final_checkpoint(tmp_path / "back", "base").name == "step-00000003"
    (tmp_path / "copy" / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    restore_run(str(tmp_path / "copy"), tmp_path / "without", told.append)
    missing = "it is not complete (manifest.json is missing)"
    assert f"pretrain: step-00000003, whose weights are those of the stage, is not used: {missing}" in told


def test_a_metric_that_is_not_measured_is_named(tiny_copy: Tiny) -> None:
    said = (
        "early_stopping.metric: validation/poems/loss is not measured by this run, which measures validation/bits_per_byte, validation/code"
    )
    with pytest.raises(UserError, match=said):
        tiny_copy.pretrain("train.early_stopping.metric=validation/poems/loss", "train.validate_every=1 steps")
