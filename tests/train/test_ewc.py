"""Elastic weight consolidation: the estimate and the penalty are the formula, a resume is bit-exact, and ranks agree with one process."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmworks.checkpoint import listing
from lmworks.checkpoint.save import CheckpointWriter
from lmworks.errors import UserError
from lmworks.optim.groups import local
from lmworks.optim.optimizer import build_optimizer
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.train import Ewc
from lmworks.run.copy import copy_run, restore_run
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches
from lmworks.train.build import build_model
from lmworks.train.curriculum import sample_sequences
from lmworks.train.ewc import EwcPenalty
from lmworks.train.pretrain import pretrain
from lmworks.train.step import train_step
from lmworks.ui.terminal import Interrupted
from lmworks.watch.ledger import read_ledger
from lmworks.watch.policy import Limits
from tiny_run import BRIEF, SECOND, Tiny, before_each_step, checkpoint, curve, same_bits, training_context

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
WEIGHT = 1e6  # so that its pull can be seen within eight steps
# A first phase of 5 steps, and the second phase as it is.
SHORT = ("train.phases.general.tokens=1280 tokens", "train.phases.general.batch_ramp=null",
         "train.phases.general.lr_schedule={warmup: 2 steps, decay: 2 steps}")  # fmt: skip
FIRST = 5
STEPS = FIRST + SECOND
EWC = (*SHORT, "train.phases.long.ewc.sequences=4")


def held(weight: float) -> tuple[str, ...]:
    return (*EWC, f"train.phases.long.ewc.weight={weight}")


def estimated(tiny: Tiny, *overrides: str) -> tuple[EwcPenalty, list[Batch], Any]:
    recipe = tiny.resolve(*overrides).recipe
    batches = Batches(recipe, tiny.run_dir / "shards")
    earlier = list(sample_sequences(batches, 0, 3))
    model = build_model(recipe, Ranks(recipe.layout))
    made = EwcPenalty(model, Ewc(weight=2.0))
    made.estimate(earlier)
    return made, earlier, model


def test_the_estimate_is_the_mean_square_of_gradients_of_sequences(tiny: Tiny) -> None:
    made, earlier, model = estimated(tiny, "model.residual_dropout=0.3")
    (plain,) = model.parts
    assert plain.training, "as it was"
    assert all(parameter.grad is None for parameter in plain.parameters())
    assert len({batch.step for batch in earlier}) == 3 and all(len(batch.tokens) == 1 for batch in earlier)
    plain.eval()
    expected = {name: torch.zeros_like(parameter) for name, parameter in plain.named_parameters()}
    for batch in earlier:
        arrays = (torch.from_numpy(getattr(batch, name)) for name in ("tokens", "labels", "cu_seqlens"))
        loss = plain.loss(*arrays).total
        for (name, _), grad in zip(plain.named_parameters(), torch.autograd.grad(loss, list(plain.parameters())), strict=True):
            expected[name] += grad.square()
    tokens = sum(batch.valid_tokens for batch in earlier)
    for name, value in expected.items():
        torch.testing.assert_close(made.fisher[name], value / tokens, rtol=1e-4, atol=1e-12)  # divided before and after squaring


def test_the_gradient_is_that_of_the_penalty(tiny: Tiny) -> None:
    made, _, model = estimated(tiny)
    (plain,) = model.parts
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    weights = dict(plain.named_parameters())
    penalty = 1.0 * sum((made.fisher[name] * (p - made.anchor[name]).square()).sum() for name, p in weights.items())
    expected = torch.autograd.grad(penalty, list(weights.values()))
    assert made.penalty() == pytest.approx(penalty.item(), rel=1e-5)
    for parameter in weights.values():
        parameter.grad = torch.ones_like(parameter)
    made.add_gradients()
    for (name, parameter), grad in zip(weights.items(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, 1 + grad, msg=name)


def test_the_gradient_is_clipped_with_that_of_the_loss(tiny: Tiny) -> None:
    """The norm that is reported and limited is that of both."""
    made, earlier, model = estimated(tiny)
    made.options = Ewc(weight=WEIGHT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    optimizer = build_optimizer(model, tiny.resolve().recipe.optimizer)
    given = {"micro_batch_size": 1, "lr_factor": 1.0, "max_grad_norm": 0.5, "bias_update_rate": 0.0}
    alone = train_step(model, optimizer, earlier[0], **given, limits=Limits(grad_norm=0.0))  # a step that changes nothing
    result = train_step(model, optimizer, earlier[0], **given, penalty=made)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-4)
    assert float(result.grad_norm) > 2 * float(alone.grad_norm)


def moved(run: Tiny) -> float:
    """How far the weights are from where the phase began, each square weighted by what it mattered."""
    state = run.run_dir / "checkpoints" / "ewc-long"
    kept, now = checkpoint(state.parent, folder=state.name), checkpoint(run.run_dir)
    names = [name.removeprefix("fisher/") for name in kept if name.startswith("fisher/")]
    return sum(float((kept[f"fisher/{name}"] * (now[f"model/{name}"] - kept[f"anchor/{name}"]).square()).sum()) for name in names)


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    run = tiny.copy(tmp_path_factory.mktemp("ewc") / "run")
    run.pretrain(*held(WEIGHT))
    return run


def test_a_phase_is_held_near_where_it_began(undisturbed: Tiny, tiny_copy: Tiny) -> None:
    """The larger the weight the nearer, and the metric is the penalty of the weights that were saved."""
    tiny_copy.pretrain(*held(1e-6))
    assert moved(undisturbed) < 0.5 * moved(tiny_copy)
    lines = curve(undisturbed.run_dir)
    assert ["train/ewc" in line for line in lines] == [False] * FIRST + [True] * (STEPS - FIRST)
    assert lines[-1]["train/ewc"] == pytest.approx(WEIGHT / 2 * moved(undisturbed), rel=1e-4)
    assert [line["train/loss"] for line in lines[: FIRST + 1]] == [line["train/loss"] for line in curve(tiny_copy.run_dir)[: FIRST + 1]]
    (event,) = [event for event in read_ledger(undisturbed.run_dir / "ledger.jsonl") if event["event"] == "ewc"]
    assert (event["phase"], event["step"], event["sequences"]) == ("long", FIRST, 4)


@pytest.mark.parametrize("stop", [FIRST, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (FIRST - 1, FIRST + 6))])
def test_a_resume_is_bit_exact(undisturbed: Tiny, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    """At the border, behind it, and in the middle, where the estimate is read and not made again."""
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == stop else None)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*held(WEIGHT))
    if stop >= FIRST:
        monkeypatch.setattr(EwcPenalty, "estimate", lambda *given: pytest.fail("made again"))
    tiny_copy.pretrain(*held(WEIGHT))
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []
    assert curve(tiny_copy.run_dir) == curve(undisturbed.run_dir)


@pytest.mark.parametrize("by_command", [False, True])
def test_the_estimate_travels_with_the_copies_of_the_checkpoints(
    undisturbed: Tiny, tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_command: bool
) -> None:
    """By `checkpoints.copy_to`, and by `lmworks copy`: a run that was restored on another machine resumes bit-exactly."""
    copies = str(tmp_path / "copies")
    options = held(WEIGHT) if by_command else [*held(WEIGHT), f"checkpoints.copy_to={copies}"]
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == FIRST + 6 else None)
        with pytest.raises(Interrupted):
            tiny_copy.walk(*options, last="pretrain")
    if by_command:
        copy_run(tiny_copy.run_dir, copies, print)
    elsewhere = replace(tiny_copy, run_dir=tmp_path / "elsewhere")
    restore_run(copies, elsewhere.run_dir, print)
    monkeypatch.setattr(EwcPenalty, "estimate", lambda *given: pytest.fail("made again"))
    elsewhere.walk(*options, last="pretrain")
    assert same_bits(checkpoint(elsewhere.run_dir), checkpoint(undisturbed.run_dir)) == []
    assert curve(elsewhere.run_dir) == curve(undisturbed.run_dir)


def test_an_estimate_that_finds_no_room_is_a_failed_save(undisturbed: Tiny, tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, and no checkpoint of the phase is saved before it."""
    honest, room, when = CheckpointWriter._write_data, FIRST + 4, {"step": -1}

    def full(self: CheckpointWriter, aside: Path, *rest: Any) -> Any:
        if self.directory.name == "ewc-long" and when["step"] < room:
            raise OSError(28, "No space left on device")
        return honest(self, aside, *rest)

    monkeypatch.setattr(CheckpointWriter, "_write_data", full)
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: when.update(step=step) or (step == FIRST + 6 and os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*held(WEIGHT))
    lines = read_ledger(tiny_copy.run_dir / "ledger.jsonl")
    failed = [line["step"] for line in lines if line["event"] == "save_failed"]
    assert failed[0] == FIRST and len(failed) < 5 and all(
        "ewc-long is full" in line["reason"] for line in lines if line["event"] == "save_failed"
    )
    saved = [line["step"] for line in lines if line["event"] == "checkpoint"]
    assert not [step for step in saved if FIRST < step <= room] and max(saved) > room
    monkeypatch.setattr(EwcPenalty, "estimate", lambda *given: pytest.fail("made again"))
    tiny_copy.pretrain(*held(WEIGHT))
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []


def test_a_lost_estimate_is_refused_in_one_line(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == FIRST + 1 else None)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*held(WEIGHT))
    (kept,) = listing.directories(tiny_copy.run_dir / "checkpoints" / "ewc-long")
    data = next(kept.glob("data-*"))
    data.write_bytes(data.read_bytes()[:-1])
    back = f"ckpt rollback {re.escape(str(tiny_copy.run_dir))} {FIRST}$"
    with pytest.raises(UserError, match=f"ewc-long does not hold what ewc estimated when the phase began .step {FIRST}.*{back}"):
        tiny_copy.pretrain(*held(WEIGHT))


@pytest.mark.parametrize(("overrides", "said"), [
    (["train.phases.general.ewc.weight=1"], "there is no phase before the first one to hold on to"),
    (["train.phases.long.ewc.weight=1", "train.deepspeed={}", "optimizer.kind=adamw"], "where no penalty can be added; leave ewc out"),
    (["train.phases.long.ewc.sequences=3"], "weight"),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(tiny: Tiny, overrides: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tiny.resolve(*overrides)


def test_tuning_holds_on_to_pretraining(tiny_copy: Tiny) -> None:
    tiny_copy.walk("tune.ewc.weight=5", "tune.ewc.sequences=2", *BRIEF, last="tune")
    lines = curve(tiny_copy.run_dir / "tune")
    assert all(line["train/ewc"] > 0 for line in lines[1:])
    place = tiny_copy.run_dir / "tune" / "checkpoints"
    kept, base = checkpoint(place, folder="ewc-tune"), checkpoint(tiny_copy.run_dir)
    assert all(torch.equal(value, base[f"model/{name.removeprefix('anchor/')}"]) for name, value in kept.items() if "anchor/" in name)


def test_the_estimate_is_made_with_the_positions_of_the_earlier_phase(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go, after a resume at the border, and in tuning, whose model is new."""
    seen: list[tuple[float, int]] = []

    def estimate(self: EwcPenalty, earlier: Any, loss_scale: float = 1.0) -> None:
        seen.append((self._model.parts[0].rope.theta, next(iter(earlier)).tokens.shape[1]))

    monkeypatch.setattr(EwcPenalty, "estimate", estimate)
    first = ("train.phases.general.rope={theta: 20000}", "tune.ewc.weight=1", *BRIEF, "train.phases.long.ewc={weight: 1, sequences: 4}")
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == FIRST - 1 else None)
        with pytest.raises(Interrupted):
            tiny_copy.walk(*first, last="pretrain")
    tiny_copy.walk(*first, last="tune")
    assert seen == [(20_000, 32)] * 2 + [(50_000, 64)], "made again where nothing of the phase had been trained"


def test_the_estimate_is_made_as_the_step_before_computed(tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temperature of routers, in one go and after a resume at the border; and in a first phase that adds QK norm, without it."""
    seen: list[tuple[float, float]] = []

    def estimate(self: EwcPenalty, earlier: Any, loss_scale: float = 1.0) -> None:
        seen.append((float(self._model.moe_layers()[0].router.temperature), self._model.config.qk_norm_blend))

    monkeypatch.setattr(EwcPenalty, "estimate", estimate)
    warm = (*BRIEF, "model.moe.temperature=4", "model.moe.temperature_steps=6", "train.phases.long.ewc={weight: 1, sequences: 4}")
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == FIRST - 1 else None)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*warm)
    tiny_copy.pretrain(*warm)
    assert [one for one, _ in seen] == pytest.approx([4 - 3 * (FIRST - 1) / 6] * 2)
    adds = (f"start_from={tiny_copy.run_dir}", "model.use_qk_norm=true", "train.phases.general.qk_norm_steps=2 steps",
            "train.phases.general.ewc={weight: 1, sequences: 4, mixture: {code: 1}}")  # fmt: skip
    replace(tiny_copy, run_dir=tmp_path / "other").walk(*BRIEF, *adds, last="pretrain")
    assert seen[2:] == [(1.0, 0.0)]


def fisher_here(tiny: Tiny, layout: Layout) -> dict[str, np.ndarray]:
    """What a rank holds of the estimate; whole where it holds whole parameters."""
    made, *_ = estimated(tiny, *layout.overrides())
    whole = {name: value.full_tensor() if hasattr(value, "full_tensor") else local(value) for name, value in made.fisher.items()}
    return {name: value.numpy() for name, value in whole.items()}


@pytest.mark.parametrize("layout", [
    Layout(dp_shard=2, zero=3),
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in (Layout(dp_shard=2, zero=1), Layout(dp_replicate=2))),
], ids=str)  # fmt: skip
def test_ranks_estimate_what_one_process_does(ranks: Any, tiny: Tiny, layout: Layout) -> None:
    (alone,) = ranks.run(fisher_here, 1, tiny, Layout())
    for shared in ranks.run(fisher_here, 2, tiny, layout):
        for name, value in alone.items():
            # fp32 sums in another order, squared
            np.testing.assert_allclose(shared[name], value, rtol=2e-3, atol=1e-9 * float(value.max()), err_msg=name)


def train_on(tiny: Tiny, to: Path, layout: Layout, stop: int | None) -> None:
    recipe = tiny.resolve(f"run_dir={to}", *held(WEIGHT), *layout.overrides()).recipe
    with pytest.MonkeyPatch.context() as patch:
        if stop is not None:
            before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == stop else None)
        try:
            pretrain(training_context(recipe, to, ranks=Ranks(layout)))
        except Interrupted:
            assert stop is not None


@pytest.mark.slow
def test_another_layout_goes_on_with_the_estimate(ranks: Any, undisturbed: Tiny, tiny_copy: Tiny) -> None:
    """Two ranks begin the phase and one process ends it; losses within rounding of one go."""
    ranks.run(train_on, 2, tiny_copy, tiny_copy.run_dir, Layout(dp_shard=2, zero=3), FIRST + 4)
    assert curve(tiny_copy.run_dir)[-1]["step"] == FIRST + 5
    tiny_copy.pretrain(*held(WEIGHT))
    found, expected = (curve(run.run_dir)[-1] for run in (tiny_copy, undisturbed))
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-2)
    assert found["train/ewc"] == pytest.approx(expected["train/ewc"], rel=0.1)
