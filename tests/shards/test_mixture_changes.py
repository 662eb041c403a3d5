"""Changes of the mixture, planned in the recipe or asked for on the way: what was read stays, what comes is exact."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import recipe_of

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.epochs import EpochOrder
from lmworks.shards.order import MixtureOverride, Order

DATA = {"a": 60_000, "b": 30_000, "c": 20_000}
PHASES = [("one", 100, 16, {"a": 0.7, "b": 0.3}), ("two", 60, 32, {"a": 0.5, "b": 0.2, "c": 0.3})]


def everything(order: Order, phase: int) -> list[tuple[str, int, int]]:
    found = order.locate(phase, np.arange(order.timeline.phases[phase].sequences))
    names = [order.sources[index] for index in found.source.tolist()]
    return list(zip(names, found.epoch.tolist(), found.start.tolist(), strict=True))


def planned(recipe: Recipe, *changes: tuple[str, dict[str, float]]) -> Recipe:
    tree = recipe.model_dump()
    tree["train"]["phases"][0]["mixture_changes"] = [{"at": at, "mixture": mixture} for at, mixture in changes]
    return Recipe.model_validate(tree)


weights = st.sampled_from([(1, 0, 0), (0, 1, 0), (1, 1, 8), (6, 1, 0), (0, 0, 1)])  # few, since a table is made for each mixture


@given(step=st.integers(0, 159), parts=weights, later=st.integers(1, 80), other=weights, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_nothing_before_a_change_moves_and_what_follows_is_exact(
    step: int, parts: tuple[int, ...], later: int, other: tuple[int, ...], seed: int
) -> None:
    recipe = recipe_of(PHASES, seed, shards={"max_epochs": 1000})
    mixtures = [{name: part / sum(some) for name, part in zip("abc", some, strict=True) if part} for some in (parts, other)]
    changes = [MixtureOverride(step, mixtures[0]), MixtureOverride(min(step + later, 159), mixtures[1])]
    orders = [Order(recipe, DATA), Order(recipe, DATA, changes[:1]), Order(recipe, DATA, changes)]
    for before, after, change in zip(orders, orders[1:], changes, strict=False):
        phase, (first, _) = before.phase_of(change.step), before.sequences(change.step)
        for number in range(phase):
            assert everything(before, number) == everything(after, number)
        assert everything(before, phase)[:first] == everything(after, phase)[:first]
    last, change = orders[-1], changes[-1]
    phase, (first, _) = last.phase_of(change.step), last.sequences(change.step)
    taken = everything(last, phase)[first:]
    slots = sum(change.mixture.values())
    for upto in (1, len(taken) // 2, len(taken)):
        for name, count in Counter(source for source, _, _ in taken[:upto]).items():
            assert abs(count - change.mixture[name] / slots * upto) <= 1 + upto / 10_000, "exact to the new weights from the step on"


@given(step=st.integers(1, 159), parts=weights, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_none_comes_again_while_others_are_unread_and_phases_stay_apart(step: int, parts: tuple[int, ...], seed: int) -> None:
    recipe = recipe_of(PHASES, seed, shards={"max_epochs": 1000})
    order = Order(recipe, DATA, [MixtureOverride(step, {name: part / sum(parts) for name, part in zip("abc", parts, strict=True) if part})])
    phase_of_change, (first, _) = order.phase_of(step), order.sequences(step)
    owner = {name: np.full(tokens, -1) for name, tokens in DATA.items()}
    for phase, length in enumerate((16, 32)):
        read: dict[str, Counter[int]] = {name: Counter() for name in DATA}
        for number, (source, _, start) in enumerate(everything(order, phase)):
            stretch = owner[source][start : start + length + 1]
            assert np.isin(stretch, (-1, phase)).all()
            stretch[:] = phase
            if (phase, number) >= (phase_of_change, first) and read[source][start]:
                assert len(read[source]) == order.share(phase, source).sequences, "again only when all were read"
            read[source][start] += 1


def test_a_source_that_gains_weight_is_given_text_that_later_phases_have_not_begun() -> None:
    recipe = recipe_of([("one", 100, 16, {"a": 0.5, "b": 0.5}), ("two", 100, 16, {"b": 1.0})])
    before = Order(recipe, DATA)
    after = Order(recipe, DATA, [MixtureOverride(50, {"b": 1.0})])
    old, new = before.share(0, "b"), after.share(0, "b")
    assert new.borders[:2] == old.borders
    assert new.stop > old.stop, "it reads more of b, and takes it from what the second phase would have read"
    assert after.share(1, "b").start == new.stop
    assert new.epochs == pytest.approx(after.share(1, "b").epochs, rel=0.01), "both phases repeat b equally often"
    assert after.share(0, "a").borders == before.share(0, "a").borders
    assert after.share(0, "a").planned == before.share(0, "a").planned // 2


def test_a_source_that_was_in_no_mixture_can_be_added_on_the_way() -> None:
    recipe = recipe_of([("one", 100, 16, {"a": 1.0})])
    before, after = Order(recipe, DATA), Order(recipe, DATA, [MixtureOverride(50, {"a": 0.4, "c": 0.6})])
    assert everything(before, 0)[:400] == everything(after, 0)[:400]
    share = after.share(0, "c")
    assert (share.start, share.stop, share.planned) == (0, 20_000, 240)
    starts = [start for source, _, start in everything(after, 0) if source == "c"]
    assert len(set(starts)) == len(starts) == 240


def test_a_planned_change_is_made_at_the_first_step_after_its_moment() -> None:
    base = recipe_of([("one", 100, 16, {"a": 1.0})])
    for at, step in (("1 steps", 1), ("25 steps", 25), ("3200 tokens", 25), ("3201 tokens", 26), ("25%", 25)):
        order = Order(planned(base, (at, {"a": 0.5, "b": 0.5})), DATA)
        sources = [source for source, _, _ in everything(order, 0)]
        assert "b" not in sources[: step * 8]
        assert sources[step * 8 :].count("b") == (100 - step) * 4
    assert Order(planned(base, ("25 steps", {"b": 1.0})), DATA).fingerprint() != Order(base, DATA).fingerprint()


def test_the_step_from_which_on_a_mixture_holds_is_known() -> None:
    other = {"a": 0.2, "b": 0.8}
    recipe = planned(recipe_of(PHASES, shards={"max_epochs": 100}), ("30 steps", other))
    order = Order(recipe, DATA, [MixtureOverride(70, other), MixtureOverride(120, {"c": 1.0})])
    expected = [0] * 30 + [30] * 40 + [70] * 30 + [100] * 20 + [120] * 40
    assert [order.mixture_since(step) for step in range(160)] == expected


def test_planned_changes_divide_the_text_by_the_whole_plan() -> None:
    recipe = planned(recipe_of([("one", 100, 16, {"a": 1.0}), ("two", 50, 16, {"b": 1.0})]), ("50%", {"b": 1.0}))
    order = Order(recipe, DATA)
    assert order.share(0, "b").stop == order.share(1, "b").start == 15_000, "400 sequences each"


def test_a_change_outside_its_phase_or_out_of_order_is_refused() -> None:
    base = recipe_of([("one", 100, 16, {"a": 1.0})])
    for changes in ([("0 steps", {"b": 1.0})], [("100 steps", {"b": 1.0})], [("30 steps", {"b": 1.0}), ("20 steps", {"a": 1.0})]):
        message = r"phase one: the mixture change at .* falls on step \d+ of the phase's 100; changes must be in order"
        with pytest.raises(UserError, match=message):
            Order(planned(base, *changes), DATA)
    with pytest.raises(UserError, match=r"step 5: the mixture names source z, which has no tokens; available: a, b, c"):
        Order(base, DATA, [MixtureOverride(5, {"z": 1.0})])
    with pytest.raises(UserError, match=r"step 100 does not exist"):
        Order(base, DATA, [MixtureOverride(100, {"b": 1.0})])
    with pytest.raises(UserError, match=r"more often than shards.max_epochs 40 \(c 6\d\.\d times in phase one\)"):
        Order(recipe_of([("one", 100_000, 16, {"a": 1.0})]), {"a": 10**8, "c": 200_000}, [MixtureOverride(1000, {"c": 1.0})])


def test_readings_count_all_phases_together() -> None:
    order = Order(recipe_of([("one", 100, 16, {"a": 1.0}), ("two", 100, 32, {"a": 0.5, "b": 0.5})]), {"a": 12_800, "b": 12_800})
    assert order.epochs_by_source() == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize("taken", [0, 4, 10, 15])
def test_what_is_added_to_a_source_is_read_before_anything_is_read_again(taken: int) -> None:
    order = EpochOrder(1, "long", "web", 10)
    before = order.locate(np.arange(taken))
    order.extend(taken, 16)
    first = max(taken, 10)  # what was not read of the old range comes before
    found, epoch = order.locate(np.arange(first + 6 + 16))
    assert all((found[:taken] == before[0]) & (epoch[:taken] == before[1]))
    assert sorted(found[:10]) == [*range(10)]
    assert sorted(found[first : first + 6]) == [*range(10, 16)]
    assert set(epoch[first : first + 6]) == {0}
    assert sorted(found[first + 6 :]) == [*range(16)]
    read = -(-first // 10)  # how often the oldest was
    assert set(epoch[first + 6 :]) == {read}
    order.extend(first + 6 + 20, 17)
    assert set(order.locate(first + 6 + np.arange(16, 20))[1]) == {read + 1}
    assert set(order.locate(first + 6 + 20 + 1 + np.arange(17))[1]) == {read + 2}, "once, and a quarter of it again"


def test_a_source_that_had_no_part_is_read_for_the_first_time() -> None:
    order = EpochOrder(1, "long", "web", 0)
    order.extend(0, 16)
    found, epoch = order.locate(np.arange(32))
    assert sorted(found[:16]) == sorted(found[16:]) == [*range(16)]
    assert epoch.tolist() == [0] * 16 + [1] * 16
