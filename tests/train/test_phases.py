"""Phase boundaries inside one run: what changes does so at the first step of the phase, and what has been learnt stays."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.metrics.log import read
from lmworks.model import Transformer
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.plan.counts import flops_per_token
from lmworks.recipe.phases import in_force
from lmworks.recipe.weights import find_weights
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches
from lmworks.train import trainer
from lmworks.train.step import micro_batch_of
from lmworks.ui.terminal import Interrupted
from lmworks.watch.ledger import read_ledger
from lmworks.weights.run_models import load_model
from tiny_run import BRIEF, FIRST, SECOND, STEPS, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EVERY = ("train.save_every=1 steps", "checkpoints.keep_last=99")


@pytest.fixture(scope="module")
def run(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The undisturbed run with a checkpoint of every step."""
    made = tiny.copy(tmp_path_factory.mktemp("phases") / "run")
    made.pretrain(*EVERY)
    return made


def test_length_batch_and_phase_change_at_the_first_step(run: Tiny) -> None:
    """Also that the ramp grows as the recipe says and the budget of each phase is kept."""
    lines = curve(run.run_dir)
    assert [line["train/phase"] for line in lines] == [0] * FIRST + [1] * (STEPS - FIRST)
    assert [line["train/sequence_length"] for line in lines] == [32] * FIRST + [64] * (STEPS - FIRST)
    assert [line["train/batch_tokens"] for line in lines] == [32 * rows for rows in (4, 4, 5, 6, 6, 7)] + [256] * (STEPS - 6)
    assert lines[FIRST - 1]["train/tokens"] == 2816  # as many whole steps as 3,008 tokens pay for
    assert lines[-1]["train/tokens"] == 2816 + 2048
    recipe = run.resolve().recipe
    longest = recipe.train.micro_batch_sequences or 0
    assert [micro_batch_of(recipe, length) for length in (32, 64)] == [2 * longest, longest]


def test_the_mixture_changes_at_the_first_step(run: Tiny) -> None:
    batches = Batches(run.resolve().recipe, run.run_dir / "shards")
    sources = [[row.source for row in batches.documents(step)] for step in range(STEPS)]
    assert {name for names in sources[FIRST:] for name in names} == {"docs"}
    assert all("code" in names for names in sources[:FIRST])
    drawn = [name for names in sources[:FIRST] for name in names]
    assert abs(drawn.count("code") - 0.7 * len(drawn)) <= 1


def test_the_rate_goes_on_from_where_the_phase_before_ended(run: Tiny) -> None:
    """No cold restart: a warm-up of 2 steps from 10% of the peak to 50% of it, then down."""
    rates = [line["optim/learning_rate"] / 0.01 for line in curve(run.run_dir)]
    assert rates[FIRST - 1] == pytest.approx(0.1)
    assert rates[FIRST : FIRST + 3] == pytest.approx([0.3, 0.5, 0.5 - 0.5 * 0.9 / (SECOND - 2)])
    assert rates[-1] == pytest.approx(0.05)
    assert max(abs(after - before) for before, after in zip(rates[FIRST - 1 :], rates[FIRST:], strict=False)) < 0.21


def test_the_optimizer_goes_on(run: Tiny) -> None:
    """Its count, and a momentum that is 19 parts the old one."""
    before, after = checkpoint(run.run_dir, FIRST), checkpoint(run.run_dir, FIRST + 1)
    assert int(before["optimizer/count"]) == FIRST and int(after["optimizer/count"]) == FIRST + 1
    for name in ("momentum.layers.0.attention.query.weight", "first.head.weight", "second.head.weight"):
        old, new = before[f"optimizer/{name}"].flatten(), after[f"optimizer/{name}"].flatten()
        assert float(old.norm()) > 0
        assert float(torch.cosine_similarity(old, new, dim=0)) > 0.8


def test_balancing_changes_its_rate_at_the_first_step(run: Tiny) -> None:
    """The sign rule moves each bias by the rate of its phase: 0.01, then 0.001."""
    name = "model/layers.1.ffn.router.bias"
    for step, rate in ((FIRST - 1, 0.01), (FIRST, 0.001), (STEPS - 1, 0.001)):
        moved = checkpoint(run.run_dir, step + 1)[name] - checkpoint(run.run_dir, step)[name]
        assert moved.abs().max() == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("stop", [FIRST, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (None, FIRST - 1, FIRST + 6))])
def test_positions_change_at_the_first_step(tiny_copy: Tiny, run: Tiny, monkeypatch: pytest.MonkeyPatch, stop: int | None) -> None:
    """Also after a resume at the border exactly, behind it (in one go up to there), and in the middle of the phase; and the weights are
    those of one go."""
    seen: dict[int, tuple[float, float]] = {}
    honest, now = Transformer.loss, {"step": 0}

    def watched(self: Transformer, *inputs: torch.Tensor) -> object:
        if self.training:
            seen[now["step"]] = (self.rope.theta, float(self.inverse_frequencies[-1]))
        return honest(self, *inputs)

    monkeypatch.setattr(Transformer, "loss", watched)

    def act(step: int) -> None:
        now["step"] = step
        if step == stop:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        before_each_step(patch, act)
        if stop is not None:
            with pytest.raises(Interrupted):
                tiny_copy.pretrain()
            stop = None
        tiny_copy.pretrain()
    bases = [10_000.0] * FIRST + [50_000.0] * (STEPS - FIRST)
    assert [seen[step][0] for step in range(STEPS)] == bases
    # the slowest frequency of a head of 16 dims
    assert [seen[step][1] for step in range(STEPS)] == pytest.approx([theta ** (-14 / 16) for theta in bases])
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(run.run_dir)) == []


def test_the_distance_between_checkpoints_may_change(tiny_copy: Tiny) -> None:
    """Counted from the phase's first step, in steps or as a share of the phase; what is saved is what is saved anyway."""
    tiny_copy.pretrain("train.save_every=6 steps", "train.phases.long.save_every=33%", "checkpoints.keep_last=99")
    saved = [event["step"] for event in read_ledger(tiny_copy.run_dir / "ledger.jsonl") if event["event"] == "checkpoint"]
    assert saved == [6, 12, FIRST + 3, FIRST + 6, STEPS]


def test_routers_warm_up(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their temperature in the forward pass of each step, also after a resume, and what the metrics say of it."""
    seen: dict[int, set[float]] = {}
    honest = trainer.train_step

    def observed(model: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        result = honest(model, optimizer, batch, **options)
        seen[batch.step] = {float(layer.router.temperature) for layer in model.moe_layers()}
        if batch.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    warm = ("model.moe.temperature=3", "model.moe.temperature_steps=8", "train.phases.general.tokens=2048 tokens")
    monkeypatch.setattr(trainer, "train_step", observed)
    with pytest.raises(Interrupted):
        tiny_copy.pretrain(*warm)
    tiny_copy.pretrain(*warm)
    expected = [3 - 2 * min(step / 8, 1) for step in range(len(seen))]
    assert len(seen) > 8 and [seen[step] for step in range(len(seen))] == [{value} for value in expected]
    assert [line["experts/temperature"] for line in curve(tiny_copy.run_dir)] == expected


def test_tuning_does_not_repeat_the_warm_up_of_the_routers(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    honest = trainer.train_step

    def observed(model: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        seen.extend(float(layer.router.temperature) for layer in model.moe_layers())
        return honest(model, optimizer, batch, **options)

    warm = (*BRIEF, "model.moe.temperature=3", "model.moe.temperature_steps=4")
    tiny_copy.walk(*warm, last="pretrain")
    monkeypatch.setattr(trainer, "train_step", observed)
    tiny_copy.walk(*warm, last="tune")
    assert seen and set(seen) == {1.0}
    assert not any("experts/temperature" in line for line in curve(tiny_copy.run_dir / "tune"))
    with pytest.raises(UserError, match=r"model\.moe\.temperature_steps 7 are not over when the run ends after 7 steps"):
        tiny_copy.walk(*warm, "model.moe.temperature_steps=7", f"run_dir={tiny_copy.run_dir}-long", last="pretrain")


def test_the_ledger_has_the_phases(run: Tiny) -> None:
    phases = [event for event in read_ledger(run.run_dir / "ledger.jsonl") if event["event"] == "phase"]
    assert [(event["phase"], event["step"], event["sequence_length"]) for event in phases] == [("general", 0, 32), ("long", FIRST, 64)]


def test_experts_are_counted_once(run: Tiny, tiny: Tiny, tmp_path: Path) -> None:
    """However often the run validates and samples, however the step is cut, and also where layers are computed again."""
    for number, overrides in enumerate((("train.micro_batch_sequences=1",), ("train.activation_checkpointing=full",))):
        other = tiny.copy(tmp_path / str(number))
        other.pretrain(*BRIEF, "train.validate_every=3 steps", "train.sample_every=3 steps", *overrides)
        assert checkpoint(other.run_dir)["experts/counts"].sum(-1).tolist() == [2 * (1280 + 512)]
    assert checkpoint(run.run_dir)["experts/counts"].sum(-1).tolist() == [2 * (2816 + 2048)]


def test_looking_at_the_model_changes_nothing(run: Tiny, tiny_copy: Tiny) -> None:
    """Validation and samples after every step against almost none, with dropout so that a random number too many would show."""
    seldom, often = tiny_copy.copy(tiny_copy.run_dir.parent / "seldom"), tiny_copy
    phases = ("train.phases.general.tokens=1728 tokens", "train.phases.long.tokens=1024 tokens")  # 8 steps and 4
    options = ("model.residual_dropout=0.1", "checkpoints.keep_last=9", *phases)
    seldom.pretrain("train.validate_every=100%", "train.sample_every=100%", *options)
    often.pretrain("train.validate_every=1 steps", "train.sample_every=1 steps", *options)
    assert same_bits(checkpoint(often.run_dir), checkpoint(seldom.run_dir)) == []
    lines = curve(often.run_dir)
    assert len(lines) == 12 and all("validation/bits_per_byte" in line for line in lines)
    assert sum("validation/bits_per_byte" in line for line in curve(seldom.run_dir)) == 1
    assert same_bits(checkpoint(often.run_dir, 4), checkpoint(run.run_dir, 4)) != []  # the dropout was there


CHANGES = {
    "sliding_window": "8 tokens", "no_rope_layer_interval": 2, "mask_documents": False,
    "rope": {"theta": 50_000.0, "partial_rotary_factor": 0.5},
    "balance": {"method": "aux", "aux_loss_weight": 0.5, "sequence_aux_loss_weight": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("stop", [pytest.param(None, marks=pytest.mark.slow), FIRST])
def test_windows_positions_masks_and_balancing_change_at_the_first_step(
    tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, stop: int | None
) -> None:
    """And hold for whatever reads the checkpoints: later stages, evaluation, export. Also after a resume at the border."""
    changes = [f"train.phases.long.{key}={json.dumps(value)}" for key, value in CHANGES.items()] + ["checkpoints.keep_last=9"]
    seen: dict[int, tuple[Any, ...]] = {}
    honest = trainer.train_step

    def watched(model: ParallelModel, optimizer: Any, batch: Batch, **options: Any) -> Any:
        (part,), moe = model.parts, model.config.moe
        assert moe is not None and all(ffn.router.moe is moe for ffn in part.moe_layers())
        attentions = [block.attention for block in part.layers]
        seen[batch.step] = (
            model.config.sliding_window, [one.slides for one in attentions], [one.uses_rope for one in attentions],
            len(part.inverse_frequencies), moe.balance.method, len(batch.cu_seqlens) == len(batch.tokens) + 1,
        )  # fmt: skip
        if batch.step == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return honest(model, optimizer, batch, **options)

    monkeypatch.setattr(trainer, "train_step", watched)
    if stop is not None:
        with pytest.raises(Interrupted):
            tiny_copy.walk(*changes, last="pretrain")
    tiny_copy.walk(*changes, last="tune")
    before, after = (None, [False] * 2, [True] * 2, 8, "bias"), (8, [True] * 2, [True, False], 4, "aux")
    assert seen.pop(0)[:-1] == after, "tuning, which has the last step 0, keeps what it starts from"
    assert [seen[step][:-1] for step in (FIRST - 1, FIRST, STEPS - 1)] == [before, after, after]
    whole = [seen[step][-1] for step in range(1, STEPS)]
    assert not all(whole[:FIRST - 1]) and all(whole[FIRST - 1:]), "documents do not end the attention of the second phase"
    for model in ("base", "tuned"):
        config = load_model(tiny_copy.run_dir, model).config
        assert (config.sliding_window, config.no_rope_layer_interval, config.rope.partial_rotary_factor) == (8, 2, 0.5), model
    first = min(listing.directories(tiny_copy.run_dir / "checkpoints"), key=listing.step_of)
    assert find_weights(first).model.sliding_window is None and find_weights(first).phase == "general"


def test_changes_that_do_not_fit_the_model_are_refused_with_their_key(tiny: Tiny) -> None:
    for change, said in (
        ("train.phases.long.rope={partial_rotary_factor: 0.01}", "phases.long.rope: .*rotates none"),
        ("train.phases.long.lr_schedule={phases: 2}", "phases.long.lr_schedule.phases: there are 1 phases from long on, not 2"),
        ("train.phases.general.lr_schedule={phases: 2}", "phases.(1|long).lr_schedule: the schedule of phase general spans long too"),
        ("tune.lr_schedule={phases: 2}", "tune.lr_schedule.phases: tune is one phase"),
    ):
        with pytest.raises(UserError, match=said):
            tiny.resolve(change)
    with pytest.raises(UserError, match="balance: there are no experts to balance"):
        tiny.resolve("model.moe=null", "train.phases.long.balance={method: aux}")


def test_mfu_counts_the_operations_of_the_phase_of_each_step(tiny_copy: Tiny) -> None:
    """A window of 8 tokens in the first phase and none in the second, and a line over the last step of one and the first of the other."""
    changed = (
        "model.sliding_window=8 tokens", "train.phases.long.sliding_window=full", "train.log_every=2 steps",
        "train.phases.general.tokens=832 tokens", "train.phases.general.lr_schedule={warmup: 1 steps, decay: 1 steps}",
        "train.phases.general.batch_ramp=null", "train.phases.general.global_batch_tokens=64 tokens",
        "train.phases.long.tokens=768 tokens", "train.phases.long.sequence_length=32 tokens", "train.save_every=100%",
        "train.validate_every=100%",
    )  # fmt: skip
    tiny_copy.walk(*changed, last="pretrain")
    recipe = tiny_copy.resolve(*changed).recipe
    first, second = (
        flops_per_token(model, 32).total * tokens for model, tokens in zip(in_force(recipe), (64, 256), strict=True)
    )
    done, seen = 0, set()
    for line in (line for line in read(tiny_copy.run_dir) if "perf/mfu" in line):  # others have details of layers alone
        steps = range(done, line["step"])
        wanted = sum(first if step < 13 else second for step in steps)
        found = line["perf/mfu"] * 1e11 * line["perf/step_seconds"] * len(steps)
        assert found == pytest.approx(wanted, rel=1e-9), line["step"]
        seen.add((steps[0] < 13) + (steps[-1] < 13))
        done = line["step"]
    assert seen == {0, 1, 2}
