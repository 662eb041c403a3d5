"""A batch that grows as the loss falls: each growth is decided once, and kills, ranks, rollbacks and readers follow the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_stability import high_loss, spoil_steps

from growing_run import GROWING, RAMP, grown
from lmworks.ablate.branches import find_start
from lmworks.api.recipes import load_recipe
from lmworks.api.runs import Run
from lmworks.errors import UserError
from lmworks.ladder.comparable import Course
from lmworks.pages.read_run import read_run
from lmworks.pages.timeline import timeline
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.timeline import Timeline
from lmworks.run.checkpoint_commands import rollback
from lmworks.shards.order import MixtureOverride
from lmworks.train.curriculum import phase_settings
from lmworks.train.data.mixture import request_change
from lmworks.train.pretrain import pretrain
from lmworks.watch import trends
from lmworks.watch.batch_growth import read_growths, timeline_of
from lmworks.watch.evidence import Evidence
from lmworks.watch.ledger import read_ledger
from lmworks.watch.run_files import open_run
from tiny_run import Tiny, before_each_step, checkpoint, curve, same_bits, training_context

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SPIKED = (*GROWING, "stability.spike.window_steps=8", "stability.spike.min_rise_nats=3", "stability.spike.norm_factor=1000",
          "stability.spike.action=rollback", "train.save_every=6 steps", "checkpoints.keep_best=false")  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    run = tiny.copy(tmp_path_factory.mktemp("undisturbed") / "run")
    run.walk(*GROWING, last="pretrain")
    return run


@pytest.fixture(scope="module")
def growths(undisturbed: Tiny) -> list[tuple[int, int]]:
    found = grown(undisturbed)
    assert [tokens for _, tokens in found] == [128, 256]
    return found


def die_in(run: Tiny, step: int, *overrides: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, lambda now: 1 // 0 if now == step else None)
        with pytest.raises(ZeroDivisionError):
            run.pretrain(*overrides)


def test_each_growth_follows_from_the_losses_before_it(undisturbed: Tiny, growths: list[tuple[int, int]]) -> None:
    """The first step at which the mean of the last three losses is low enough; and no token is lost by it."""
    lines = curve(undisturbed.run_dir)
    losses = [line["train/loss"] for line in lines]
    means = [float(np.mean(losses[step - 3 : step])) for step in range(3, len(losses))]
    assert growths == [(3 + next(n for n, mean in enumerate(means) if mean <= most), size) for most, size in ((6.0, 128), (5.6, 256))]
    sizes = [line["train/batch_tokens"] for line in lines if line["step"] <= 26]
    first, second = growths[0][0], growths[1][0]
    assert sizes[:-1] == [64] * first + [128] * (second - first) + [256] * (len(sizes) - 1 - second)
    assert lines[-1]["train/tokens"] == 3008 + 1024 == sum(line["train/batch_tokens"] for line in lines)
    rates = [line["optim/learning_rate"] for line in lines]
    assert rates[first] / rates[first - 1] == pytest.approx(2**0.5), "the rate follows the size, by the root"


def test_a_run_that_dies_before_and_after_a_growth_ends_with_the_same_bits(
    undisturbed: Tiny, tiny_copy: Tiny, growths: list[tuple[int, int]]
) -> None:
    """Before the first growth; after it, with a checkpoint before it; after the second, with a checkpoint of the step of the growth."""
    (first, _), (second, _) = growths
    die_in(tiny_copy, first - 1, *GROWING, f"train.save_every={first - 1} steps")  # the window of losses reaches back before the checkpoint
    assert grown(tiny_copy) == []
    die_in(tiny_copy, first + 1, *GROWING)
    assert grown(tiny_copy) == growths[:1] and first % 4
    die_in(tiny_copy, second + 1, *GROWING, f"train.save_every={second} steps")
    tiny_copy.pretrain(*GROWING)
    assert grown(tiny_copy) == growths, "each is decided once"
    assert curve(tiny_copy.run_dir) == curve(undisturbed.run_dir)
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []


@pytest.mark.slow
def test_a_ledger_that_was_lost_is_written_again_from_the_checkpoint(undisturbed: Tiny, tiny_copy: Tiny, growths: list[Any]) -> None:
    die_in(tiny_copy, growths[1][0] + 4, *GROWING)
    (tiny_copy.run_dir / "ledger.jsonl").unlink()
    tiny_copy.pretrain(*GROWING)
    assert grown(tiny_copy) == growths
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(undisturbed.run_dir)) == []


def test_a_resumed_run_follows_the_ledger_and_does_not_decide_again(tiny_copy: Tiny, growths: list[tuple[int, int]]) -> None:
    """As on another layout, whose losses are rounded otherwise: here any loss is low enough for both sizes."""
    first = growths[0][0]
    die_in(tiny_copy, first + 1, *GROWING, f"train.save_every={first - 1} steps")
    tiny_copy.pretrain(*GROWING, f"train.phases.general.batch_ramp={RAMP.replace('6.0', '9.0').replace('5.6', '8.9')}")
    assert grown(tiny_copy) == [growths[0], (first + 1, 256)]


def trained(tiny: Tiny, to: Path, layout: Layout) -> None:
    recipe = tiny.resolve(f"run_dir={to}", *GROWING, "optimizer.kind=adamw", "optimizer.eps=0.001", *layout.overrides()).recipe
    pretrain(training_context(recipe, to, ranks=Ranks(layout)))


def test_two_ranks_decide_as_one_process(ranks: Any, tiny: Tiny, tiny_copy: Tiny, tmp_path: Path) -> None:
    alone = tiny.copy(tmp_path / "alone")
    trained(tiny, alone.run_dir, Layout())
    ranks.run(trained, 2, tiny, tiny_copy.run_dir, Layout(dp_shard=2, zero=3))
    assert grown(tiny_copy) == grown(alone) and len(grown(alone)) == 2
    names = ("step", "train/batch_tokens", "train/tokens")
    found, expected = (curve(run.run_dir) for run in (tiny_copy, alone))
    assert [[line[name] for name in names] for line in found] == [[line[name] for name in names] for line in expected]
    for line, other in zip(found, expected, strict=True):
        assert line["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)


def test_a_rollback_forgets_the_growth_and_skips_the_data_that_was_read_with_it(
    tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, growths: list[tuple[int, int]], tmp_path: Path
) -> None:
    """A spike after the growth leads back to the checkpoint of step 12. What was read since then is not read again, and no more is left
    out: the run goes on with the first sequence behind it, and with the smaller batch."""
    first = growths[0][0]
    high, back = first + 1, 12
    spoil_steps(monkeypatch, [high], high_loss)
    read = 2 * first + 4 * 2  # sequences before the growth, and in the two steps after it
    stop = -(-read // 2)
    die_in(tiny_copy, stop + 2, *SPIKED)
    (line,) = [one for one in read_ledger(tiny_copy.run_dir / "ledger.jsonl") if one["event"] == "rollback"]
    assert (line["step"], line["to_step"], line["skip"]) == (high, back, [back, stop])
    assert [(line["step"], line["train/batch_tokens"]) for line in curve(tiny_copy.run_dir)][-2:] == [(stop + 1, 64), (stop + 2, 64)]
    assert read_growths(tiny_copy.run_dir) == ()
    assert timeline_of(tiny_copy.resolve(*GROWING).recipe, tiny_copy.run_dir).sequences(stop) == (read, 2)
    other = tiny_copy.copy(tmp_path / "other")
    tiny_copy.pretrain(*SPIKED)
    die_in(other, stop + 4, *SPIKED)
    other.pretrain(*SPIKED)
    assert same_bits(checkpoint(other.run_dir), checkpoint(tiny_copy.run_dir)) == [] and curve(other.run_dir) == curve(tiny_copy.run_dir)
    again = grown(tiny_copy)
    assert again[0] == (first, 128) and again[1][0] >= stop, "it grows again by the losses since"
    trained = [line for line in curve(tiny_copy.run_dir) if line["step"] <= timeline_of(tiny_copy.resolve(*GROWING).recipe,
               tiny_copy.run_dir).first_step(1)]  # fmt: skip
    assert trained[-1]["train/tokens"] == 3008 - (read - 2 * back) * 32 == sum(line["train/batch_tokens"] for line in trained)


def test_a_rollback_by_hand_keeps_the_same_data_out(undisturbed: Tiny, tmp_path: Path, growths: list[tuple[int, int]]) -> None:
    first = growths[0][0]
    copy = undisturbed.copy(tmp_path / "run")
    done = rollback(copy.run_dir, "base", 12, (first + 1, first + 3))
    assert done["skip"] == [12, -(-(2 * first + 4 * 3) // 2)] and read_growths(copy.run_dir) == ()
    kept = undisturbed.copy(tmp_path / "kept")
    assert rollback(kept.run_dir, "base", 12, (first - 1, first))["skip"] == [first - 1, first], "all before the growth"
    plain = undisturbed.copy(tmp_path / "plain")
    assert rollback(plain.run_dir, "base", 12, None)["skip"] is None
    plain.pretrain(*GROWING)
    assert grown(plain)[2:] == growths, "the same losses have the same growths"
    assert same_bits(checkpoint(plain.run_dir), checkpoint(undisturbed.run_dir)) == []


@pytest.mark.slow
def test_deleted_checkpoints_start_over_without_the_growths(tiny_copy: Tiny, growths: list[tuple[int, int]]) -> None:
    die_in(tiny_copy, growths[1][0] + 1, *GROWING)
    for path in (tiny_copy.run_dir / "checkpoints").iterdir():
        path.rename(tiny_copy.run_dir / f"away-{path.name}")
    die_in(tiny_copy, 5, *GROWING)
    assert read_growths(tiny_copy.run_dir) == ()


def test_the_batch_does_not_grow_before_a_change_of_the_mixture_that_is_fixed_by_its_step(
    tiny_copy: Tiny, growths: list[tuple[int, int]]
) -> None:
    at = growths[0][0] + 3
    change = MixtureOverride(at, {"code": 0.5, "docs": 0.5})
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, lambda step: request_change(tiny_copy.run_dir, change) and None if step == 5 else None)
        die_in(tiny_copy, at + 8, *GROWING)
    assert grown(tiny_copy) and grown(tiny_copy)[0][0] >= at + 3, "losses of the mixture before are not counted either"


def test_every_reader_of_the_run_follows_the_growths(undisturbed: Tiny, growths: list[tuple[int, int]]) -> None:
    first, steps = growths[0][0], len(curve(undisturbed.run_dir))
    opened = Run(undisturbed.run_dir)
    assert opened.batches().steps == steps
    assert [len(opened.batch(step).tokens) for step in (first - 1, first, growths[1][0])] == [2, 4, 8]
    numbers = [row.number for step in range(26) for row in opened.batches().documents(step)]
    assert numbers[: 3008 // 32] == list(range(3008 // 32)), "every sequence of the phase once, in its order"
    evidence = Evidence(open_run(undisturbed.run_dir))
    assert evidence.steps == steps
    rates = evidence.series("optim/learning_rate").finite
    planned = trends.planned_rates(evidence, rates.steps)
    assert planned is not None and np.allclose(planned, rates.values, rtol=1e-6)
    shown = read_run(undisturbed.run_dir)
    part = shown.training["pretrain"]
    assert part.planned_steps == steps and f"batch of {128} tokens" in [mark.text for mark in part.marks if mark.step == first]
    entries = [entry for day in timeline(shown)["days"] for entry in day["entries"] if entry["title"] == "The batch grew"]
    assert [f"step {first:,}" in entries[0]["text"], "128 tokens per step at a loss of 5.9" in entries[0]["text"]] == [True, True]


def test_intervals_do_not_move_when_the_batch_grows(undisturbed: Tiny, growths: list[tuple[int, int]]) -> None:
    recipe = undisturbed.resolve(*GROWING, "train.phases.general.save_every=25%").recipe
    grown, planned = timeline_of(recipe, undisturbed.run_dir), Timeline(recipe.train.phases)
    assert [phase_settings(recipe, one)[0].save_every for one in (grown, planned)] == [12, 12] and grown.steps < planned.steps


def test_what_does_not_combine_is_refused(tiny: Tiny, undisturbed: Tiny) -> None:
    recipe = tiny.resolve(*GROWING).recipe
    with pytest.raises(UserError, match=r"phase general: its batch grows with the loss \(batch_ramp.kind\), and laws of the loss hold"):
        Course.of(recipe)
    with pytest.raises(UserError, match=r"checkpoint: the batch of phase general grows with the loss .* follow from no recipe"):
        find_start(str(undisturbed.run_dir / "checkpoints" / "step-00000012"), recipe)
    with pytest.raises(UserError, match=r"phase general: in a loop of your own no batch grows with the loss; set batch_ramp"):
        load_recipe(tiny.recipe, [*GROWING, f"run_dir={undisturbed.run_dir}"]).training_session()
    later = "{kind: loss, start_tokens: 64 tokens, sizes: [256 tokens], losses: [5.0]}"
    spanning = ("train.phases.general.batch_ramp=null", "train.phases.general.lr_schedule={phases: 2, warmup: 10%, decay: 5 steps}",
                "train.phases.long.learning_rate_scale=1.0", "train.phases.long.lr_schedule={}",
                f"train.phases.long.batch_ramp={later}")  # fmt: skip
    with pytest.raises(UserError, match=r"5 steps are not known where the schedule spans long, whose batch grows with the loss"):
        tiny.resolve(*spanning)
