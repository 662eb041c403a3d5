"""A change of the recipe of a run that has begun: what was trained is not trained again, and nothing is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.recipe.checks import phase_refusals
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.changed_order import require_same_past
from lmworks.shards.batches import Batches
from lmworks.shards.order import KeptRanges, Order, epoch_warnings
from lmworks.train.data.mixture import read_changes
from lmworks.watch.ledger import read_ledger
from tiny_run import Tiny, before_each_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DATA = {"a": 9_000, "b": 4_000, "c": 3_000}
MIXTURES = [{"a": 0.7, "b": 0.3}, {"a": 0.3, "b": 0.7}, {"c": 1.0}]


@pytest.fixture(scope="module")
def killed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A run that was killed in its first phase, after 10 steps; its newest checkpoint is of step 8."""
    run = tiny.copy(tmp_path_factory.mktemp("killed") / "run")

    def kill(step: int) -> None:
        if step == 10:
            raise RuntimeError("the power went")

    with pytest.MonkeyPatch.context() as patch:
        before_each_step(patch, kill)
        with pytest.raises(RuntimeError, match="the power went"):
            run.walk(last="pretrain")
    return run


@pytest.fixture
def stopped(killed: Tiny, tmp_path: Path) -> Tiny:
    return killed.copy(tmp_path / "run")


Tree = dict[str, Any]
Log = list[tuple[str, int, tuple[str, int, int, int]]]


def phase(name: str, steps: int, length: int, mixture: int = 0, batch: int = 8) -> Tree:
    return {
        "name": name, "tokens": f"{steps * batch * length} tokens", "mixture": MIXTURES[mixture], "sequence_length": f"{length} tokens",
        "global_batch_tokens": f"{batch * length} tokens",
    }  # fmt: skip


def tree(seed: int = 1) -> Tree:
    return {"name": "changed", "seed": seed, "train": {"phases": [phase("one", 12, 16), phase("two", 8, 32)]}}


def _tokens(value: str, factor: float) -> str:
    return f"{int(int(value.split()[0]) * factor)} tokens"


def _of_phase(key: str, new: Callable[[Tree], Any]) -> Callable[[Tree, int], None]:
    def change(recipe: Tree, number: int) -> None:
        chosen = recipe["train"]["phases"][number % len(recipe["train"]["phases"])]
        chosen[key] = new(chosen)

    return change


def _add(length: int) -> Callable[[Tree, int], None]:
    return lambda recipe, number: recipe["train"]["phases"].append(phase(f"more{len(recipe['train']['phases'])}", 6, length, number % 2))


CHANGES: dict[str, Callable[[Tree, int], None]] = {
    "more tokens": _of_phase("tokens", lambda one: _tokens(one["tokens"], 1.5)),
    "fewer tokens": _of_phase("tokens", lambda one: _tokens(one["tokens"], 0.6)),
    "larger batch": _of_phase("global_batch_tokens", lambda one: _tokens(one["global_batch_tokens"], 2)),
    "smaller batch": _of_phase("global_batch_tokens", lambda one: _tokens(one["global_batch_tokens"], 0.5)),
    "batch ramp": _of_phase("batch_ramp", lambda one: {"start_tokens": one["sequence_length"], "over": "50%"}),
    "sequence length": _of_phase("sequence_length", lambda one: _tokens(one["sequence_length"], 0.5)),
    "mixture": _of_phase("mixture", lambda one: MIXTURES[1]),
    "new source": _of_phase("mixture", lambda one: MIXTURES[2]),
    "mixture change": _of_phase("mixture_changes", lambda one: [{"at": "40%", "mixture": MIXTURES[1]}]),
    "name": _of_phase("name", lambda one: one["name"] + "x"),
    "phase of the same length": _add(32),
    "phase of another length": _add(64),
    "no last phase": lambda recipe, number: recipe["train"].update(phases=recipe["train"]["phases"][:-1]),
    "other places": lambda recipe, number: recipe["train"]["phases"].reverse(),
    "seed": lambda recipe, number: recipe.update(seed=recipe["seed"] + 1),
    "packing": lambda recipe, number: recipe.update(shards={"packing": "best_fit"}),
}


def rows(order: Order, first: int, stop: int) -> Iterator[tuple[str, int, tuple[str, int, int, int]]]:
    """What steps read: the phase, the number in the phase, and (source, its first token, length, epoch) of each sequence."""
    for step in range(first, stop):
        number, (begin, count) = order.phase_of(step), order.sequences(step)
        of = order.timeline.phases[number]
        found = order.locate(number, np.arange(begin, begin + count))
        for at in range(count):
            place = int(found.start[at]), of.sequence_length, int(found.epoch[at])
            yield of.name, begin + at, (order.sources[found.source[at]], *place)


@example(
    [("phase of the same length", 3, 6), ("phase of another length", 0, 9), ("more tokens", 2, 4), ("phase of the same length", 1, 4)], 4
)
@example([("seed", 0, 7)], 1)
@example([("more tokens", 1, 7), ("phase of the same length", 0, 9), ("phase of another length", 1, 9)], 1)
@example([("phase of the same length", 1, 9), ("more tokens", 0, 0), ("more tokens", 2, 9)], 2)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=3), st.integers(0, 5)
)
@settings(max_examples=3, deadline=None)
def test_no_change_trains_text_twice_or_leaves_it_out(changes: list[tuple[str, int, int]], seed: int) -> None:
    """A run whose recipe is changed up to three times: each change is refused, or the rows of all its steps together are those of one
    order, each once, and what is trained more often than once is said."""
    now, kept, at = tree(seed), list[KeptRanges](), 0
    order, read = Order(Recipe.model_validate(now), DATA), Log()
    for what, number, steps in changes:
        until = min(at + steps, order.steps)
        read += rows(order, at, until)
        at = until
        wanted = yaml.safe_load(yaml.safe_dump(now))
        CHANGES[what](wanted, number)
        try:
            before, recipe = Recipe.model_validate(now), Recipe.model_validate(wanted)
            require_same_past(Order(before, DATA, kept), Order(recipe, DATA, kept), before, recipe, at, "lmworks data mixture")
            more = [*kept, order.kept(at)]
            order = Order(recipe, DATA, more)
        except (UserError, ValidationError):
            continue
        now, kept = wanted, more
    read += rows(order, at, order.steps)
    assert read == list(rows(order, 0, order.steps)), "what was trained is what the order of the last recipe says"
    assert [one[:2] for one in read] == [(one.name, g) for one in order.timeline.phases for g in range(one.sequences)]
    again = {source for _, source, _ in order.read_again()} | {one.source for one in order.shares() if one.planned > one.sequences}
    again |= {source for _, _, (source, _, _, epoch) in read if epoch}
    for source, tokens in DATA.items():
        counts = np.zeros(tokens, np.int64)
        for _, _, (name, start, length, _) in read:
            if name == source and order.packing == "concatenate":
                counts[start + 1 : start + length + 1] += 1
        assert source in again or counts.max() <= 1


def test_a_phase_that_is_added_reads_what_one_of_its_length_has_not_read() -> None:
    """Where one phase has all text of a source: without this, the added one would read part of its range again, and the first one another
    range than before."""
    long, short = (
        Recipe.model_validate({"name": "x", "train": {"phases": [phase("one", 12, 16), phase("two", 6, one)]}}) for one in (32, 16)
    )
    before = Recipe.model_validate({"name": "x", "train": {"phases": [phase("one", 12, 16)]}})
    kept = Order(before, DATA).kept(7)
    same, other = Order(short, DATA, [kept]), Order(long, DATA, [kept])
    for order in (same, other):
        assert list(rows(order, 0, 12)) == list(rows(Order(before, DATA), 0, 12))
    read = [place for _, _, place in rows(same, 0, 18)]
    assert len(read) == len(set(read)) == 18 * 8 and not list(epoch_warnings(same, 4))
    assert [one.split(" was")[0] for one in epoch_warnings(other, 4)] == ["phase two"] * 2
    assert "which have read 12% of it" in next(epoch_warnings(other, 4))


def test_a_tenth_more_than_what_is_unread_is_still_divided() -> None:
    recipe = Recipe.model_validate(tree())
    order = Order(recipe, DATA, [Order(recipe, DATA).kept(1)])
    once, twice = (
        [order._is_used_up(unread=100, left=left, tokens=1000, use=use) for left in (100, 110, 111, 220, 221)] for use in (1000, 2000)
    )
    assert once == [False, False, True, True, True], "a source that is read once on average"
    assert twice == [False, False, False, False, True], "and twice"
    assert not Order(recipe, DATA)._is_used_up(unread=100, left=111, tokens=1000, use=1000), "nothing was kept"


def test_a_phase_that_goes_on_with_another_keeps_its_range() -> None:
    """Behind it lies the range of a phase of another length, by which it is not extended."""
    three, longer = ([phase("one", 12, 16), phase("two", 8, 32), phase("three", steps, 16)] for steps in (6, 9))
    recipes = [Recipe.model_validate({"name": "x", "train": {"phases": phases}}) for phases in (three[:2], three, longer)]
    added = Order(recipes[1], DATA, [Order(recipes[0], DATA).kept(20)])
    order = Order(recipes[2], DATA, [added.kept(22)])
    assert order.share(0, "a").stop == order.share(1, "a").start < order.share(1, "a").stop == DATA["a"]
    assert order.share(2, "a").borders == order.share(0, "a").borders


def test_a_change_of_what_was_trained_is_refused_though_it_is_allowed(finished: Tiny) -> None:
    before = {path: path.read_bytes() for path in finished.run_dir.glob("*.json*")}
    for change, said in {
        "long.global_batch_tokens=128 tokens": r"2,048 tokens in 8 steps, which would be 1,024 .*\.tokens='2048 tokens' and add one",
        "general.batch_ramp=null": r"which would be [\d,]+ tokens .* Undo train.phases.general.batch_ramp; for another batch from now on",
        "general.mixture={code: 0.3, docs: 0.7}": r"has read 88 sequences with its mixture; undo the change of train.phases.general.mix",
        "general.tokens=6016 tokens": r"general ended after 2,816 tokens, and later phases have begun; keep train.phases.general.tokens",
        "long.lr_schedule.warmup=100 steps": r"lr_schedule.warmup of 100 steps is longer",  # asked for after the order, which it keeps
    }.items():
        with pytest.raises(UserError, match=said):
            finished.walk(f"train.phases.{change}", last="pretrain", allow=["train.phases"])
    assert {path: path.read_bytes() for path in finished.run_dir.glob("*.json*")} == before, "nothing is recorded as done"


def test_the_mixture_of_a_phase_that_is_trained_changes_by_a_request(stopped: Tiny) -> None:
    said = rf"undo .*; to change it from now on: lmworks data mixture {stopped.run_dir} --at 10 --set code=0.3 --set docs=0.7$"
    with pytest.raises(UserError, match=said):
        stopped.walk("train.phases.general.mixture={code: 0.3, docs: 0.7}", last="pretrain", allow=["train.phases"])


def test_more_text_for_a_later_phase_keeps_what_the_first_one_reads(stopped: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    more = "train.phases.long.tokens=400000 tokens"

    def no_training(*_: object) -> None:
        raise UserError("no training")

    monkeypatch.setattr("lmworks.run.runner._record_layout", no_training)  # the first thing after what is recorded of the change
    before = Batches(stopped.resolve().recipe, stopped.run_dir / "shards").order
    with pytest.raises(UserError, match="no training"):
        stopped.walk(more, last="pretrain", allow=["train.phases.long.tokens"])
    events = [line["event"] for line in read_ledger(stopped.run_dir / "ledger.jsonl")]
    assert events[-2:] == ["ranges_kept", "recipe_changed"]
    recipe, shards, changes = stopped.resolve(more).recipe, stopped.run_dir / "shards", read_changes(stopped.run_dir).order
    assert list(rows(Batches(recipe, shards, changes).order, 0, 8)) == list(rows(before, 0, 8))
    assert list(rows(Batches(recipe, shards).order, 0, 8)) != list(rows(before, 0, 8)), "its range would be another one"
    (shards / "manifest.json").rename(shards / "aside")
    with pytest.raises(UserError, match=r"shards is missing, by which the text that was read is known; make it again first"):
        stopped.walk(more, last="pretrain", allow=["train.phases.long.tokens"])


def test_a_trainer_of_its_own_refuses_a_checkpoint_of_other_steps(stopped: Tiny) -> None:
    with pytest.raises(UserError, match=r"of step 8 was saved after 1,536 tokens, and by the recipe that step comes after 2,048"):
        stopped.pretrain("train.phases.general.batch_ramp=null")


def test_a_phase_may_be_cut_short_where_its_schedule_spans_the_next_one() -> None:
    """As the refusal of another batch advises."""
    schedule = {"warmup": "4 steps", "decay": "4 steps"}
    alone, spanning = (
        Recipe.model_validate(
            {"name": "x", "train": {"phases": [{**phase("one", 5, 16), "lr_schedule": one}, phase("two", 8, 16, batch=4)]}}
        )
        for one in (schedule, {**schedule, "phases": 2})
    )
    assert len(list(phase_refusals(alone))) == 1 and not list(phase_refusals(spanning))
