"""A mixture that is changed while a run is at work: taken up once, kept through restarts, and no batch before it moves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches
from lmworks.shards.order import MixtureOverride
from lmworks.train import trainer
from lmworks.train.data.mixture import next_step, read_changes, request_change, validate_change
from lmworks.train.pretrain import pretrain
from lmworks.ui.terminal import Interrupted
from lmworks.watch.ledger import read_ledger
from tiny_run import FIRST, STEPS, Tiny, before_each_step, checkpoint, curve, same_bits, training_context

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
AT = 8
MORE_DOCS = MixtureOverride(AT, {"code": 0.25, "docs": 0.75})


@pytest.fixture(scope="module")
def changed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Asked for in step 2, while the run was at work."""
    made = tiny.copy(tmp_path_factory.mktemp("changed") / "run")
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, lambda step: request_change(made.run_dir, MORE_DOCS) and None if step == 2 else None)
        made.pretrain()
    return made


def events(run: Tiny, name: str) -> list[dict[str, object]]:
    return [line for line in read_ledger(run.run_dir / "ledger.jsonl") if line["event"] == name]


def test_a_change_is_taken_up_by_the_run_that_is_at_work(changed: Tiny, tiny_copy: Tiny) -> None:
    tiny_copy.pretrain()
    before, after = curve(tiny_copy.run_dir), curve(changed.run_dir)
    assert before[:AT] == after[:AT], "nothing before it moves"
    assert before[AT]["train/loss"] != after[AT]["train/loss"]
    (line,) = events(changed, "mixture_changed")
    assert (line["step"], line["mixture"]) == (AT, MORE_DOCS.mixture)
    assert read_changes(changed.run_dir).applied == [MORE_DOCS]
    batches = Batches(changed.resolve().recipe, changed.run_dir / "shards", read_changes(changed.run_dir).all)
    drawn = [row.source for step in range(AT, FIRST) for row in batches.documents(step)]
    assert abs(drawn.count("docs") - 0.75 * len(drawn)) <= 1
    assert {row.source for row in batches.documents(FIRST)} == {"docs"}, "the next phase has its own mixture"


def test_a_run_that_was_stopped_goes_on_with_the_change_bit_for_bit(changed: Tiny, tiny_copy: Tiny) -> None:
    request_change(tiny_copy.run_dir, MORE_DOCS)
    for stop in (7, AT + 2):
        with pytest.MonkeyPatch.context() as patch:
            before_each_step(patch, lambda step, stop=stop: os.kill(os.getpid(), signal.SIGINT) if step == stop else None)
            with pytest.raises(Interrupted):
                tiny_copy.pretrain()
    tiny_copy.pretrain()
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(changed.run_dir)) == []
    assert curve(tiny_copy.run_dir) == curve(changed.run_dir)
    assert len(events(tiny_copy, "mixture_changed")) == 1


def test_a_change_whose_step_has_passed_holds_from_the_next_batch_on(tiny_copy: Tiny) -> None:
    with pytest.MonkeyPatch.context() as patch:
        before_each_step(
            patch, lambda step: request_change(tiny_copy.run_dir, MixtureOverride(3, {"code": 1.0})) and None if step == 5 else None
        )
        tiny_copy.pretrain()
    (line,) = events(tiny_copy, "mixture_changed")
    assert 5 < int(str(line["step"])) <= 5 + 5, "behind what was read ahead, and no further"


def read_by_a_rank(tiny: Tiny, change: MixtureOverride, when: int, slow: int) -> list[tuple[int, bytes]]:
    """Pretrain as one of two ranks; what this one read, by step. In step `when` the first rank's user asks for the change, at which moment
    the rank `slow` is behind with reading and the other far ahead."""
    rank, read = dist.get_rank(), []
    honest = trainer.train_step

    def step(model: Any, optimizer: Any, batch: Batch, **options: Any) -> Any:
        read.append((batch.step, batch.tokens.tobytes()))
        if batch.step == when and rank == 0:
            request_change(tiny.run_dir, change)
        return honest(model, optimizer, batch, **options)

    honest_batch = Batches.batch

    def make(self: Batches, *args: Any) -> Batch:
        if rank == slow:
            time.sleep(0.05)
        return honest_batch(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", step)
        patch.setattr(Batches, "batch", make)
        layout = Layout(dp_shard=2)
        recipe = tiny.resolve("layout.dp_shard=2").recipe
        pretrain(training_context(recipe, tiny.run_dir, ranks=Ranks(layout)))
    return read


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_all_ranks_take_a_change_up_at_the_same_step(ranks, tiny_copy: Tiny, slow: int) -> None:
    """The two halves of every batch are those that anybody reads of the run afterwards: no rank changed a step early or late."""
    told = ranks.run(read_by_a_rank, 2, tiny_copy, MixtureOverride(2, {"docs": 1.0}), 6, slow)
    (line,) = events(tiny_copy, "mixture_changed")
    at = int(str(line["step"]))
    assert 6 < at <= 6 + 5
    batches = Batches(tiny_copy.resolve().recipe, tiny_copy.run_dir / "shards", read_changes(tiny_copy.run_dir).applied)
    assert {row.source for row in batches.documents(at)} == {"docs"} != {row.source for row in batches.documents(at - 1)}
    for step, halves in enumerate(zip(*told, strict=True)):
        assert [number for number, _ in halves] == [step, step]
        assert b"".join(half for _, half in halves) == batches.batch(step).tokens.tobytes(), step


def test_a_change_that_cannot_be_is_refused_and_the_run_goes_on(tiny_copy: Tiny) -> None:
    request_change(tiny_copy.run_dir, MixtureOverride(4, {"poems": 1.0}))
    request_change(tiny_copy.run_dir, MixtureOverride(STEPS, {"docs": 1.0}))
    tiny_copy.pretrain()
    reasons = [str(line["reason"]) for line in events(tiny_copy, "mixture_refused")]
    assert "names source poems, which has no tokens" in reasons[0]
    assert f"step {STEPS} does not exist" in reasons[1]
    assert not events(tiny_copy, "mixture_changed")
    assert read_changes(tiny_copy.run_dir).pending == {}


def test_what_is_asked_for_is_checked_first(changed: Tiny, tmp_path: Path) -> None:
    assert next_step(changed.run_dir) == STEPS
    with pytest.raises(UserError, match=rf"step 3 was trained already; the run is at step {STEPS}"):
        validate_change(changed.run_dir, 3, ["code=1"])
    for weights, message in ((["code=0.5"], "sum to 0.5"), (["code=x"], "write SOURCE=WEIGHT"), (["code=1.5", "docs=-0.5"], "positive")):
        with pytest.raises(UserError, match=message):
            validate_change(tmp_path, 0, weights)
    assert validate_change(tmp_path, 0, ["code=0.5", "docs=0.5"]) == {"code": 0.5, "docs": 0.5}
