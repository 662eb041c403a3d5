from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.timeline import Growth
from lmworks.shards.order import Order, epoch_warnings, sequences_of_rank


def recipe_of(phases: list[tuple[str, int, int, dict[str, float]]], seed: int = 1, **more: object) -> Recipe:
    """Phases as (name, steps, sequence length, mixture), 8 sequences per step."""
    return Recipe.model_validate({
        "name": "order", "seed": seed,
        "train": {"phases": [
            {"name": name, "tokens": f"{steps * 8 * length} tokens", "mixture": mixture, "sequence_length": f"{length} tokens",
             "global_batch_tokens": f"{8 * length} tokens"} for name, steps, length, mixture in phases
        ]},
        **more,
    })


three_sources = st.lists(st.integers(1, 20), min_size=3, max_size=3)


three_sizes = st.lists(st.integers(600, 9000), min_size=3, max_size=3)


@given(parts=three_sources, steps=st.integers(20, 120), seed=st.integers(0, 2**40), tokens=three_sizes)
@settings(max_examples=40, deadline=None)
def test_each_sequence_comes_exactly_once_per_epoch(parts: list[int], steps: int, seed: int, tokens: list[int]) -> None:
    mixture = {name: part / sum(parts) for name, part in zip("abc", parts, strict=True)}
    order = Order(recipe_of([("only", steps, 16, mixture)], seed), dict(zip("abc", tokens, strict=True)))
    found = order.locate(0, np.arange(steps * 8))
    for index, share in enumerate(order.shares()):
        assert share.sequences == (tokens[index] - 1) // 16
        mine = found.source == index
        readings = Counter(found.epoch[mine].tolist())
        for epoch, count in readings.items():
            seen = found.sequence[mine & (found.epoch == epoch)]
            assert len(np.unique(seen)) == count, "no sequence twice within an epoch"
            if epoch + 1 in readings:
                assert sorted(seen.tolist()) == list(range(share.sequences)), "a new epoch begins when all were read"
        assert share.planned == mine.sum()


@given(parts=three_sources, steps=st.lists(st.integers(10, 60), min_size=3, max_size=3), tokens=st.integers(8_000, 100_000))
@settings(max_examples=40, deadline=None)
def test_phases_never_see_the_same_tokens(parts: list[int], steps: list[int], tokens: int) -> None:
    mixture = {name: part / sum(parts) for name, part in zip("abc", parts, strict=True)}
    phases = [("p1", steps[0], 16, mixture), ("p2", steps[1], 32, {"a": 1.0}), ("p3", steps[2], 64, mixture)]
    order = Order(recipe_of(phases, shards={"max_epochs": 1000}), dict.fromkeys("abc", tokens))
    owner = np.full((3, tokens), -1)
    for phase, length in enumerate((16, 32, 64)):
        found = order.locate(phase, np.arange(order.timeline.phases[phase].sequences))
        for source, start in zip(found.source.tolist(), found.start.tolist(), strict=True):
            stretch = owner[source, start : start + length + 1]
            assert np.isin(stretch, (-1, phase)).all()
            stretch[:] = phase
    for source in "abc":
        ranges = [(share.start, share.stop) for share in order.shares() if share.source == source]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == tokens
        assert all(before[1] == after[0] for before, after in pairwise(ranges)), "nothing is left lying"


@given(st.integers(0, 50), st.integers(1, 9))
def test_ranks_read_each_sequence_of_a_step_once(count: int, ranks: int) -> None:
    parts = [range(*sequences_of_rank(count, rank, ranks)) for rank in range(ranks)]
    assert [number for part in parts for number in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_billion_steps_cost_what_ten_cost() -> None:
    """Objects and peak memory, not time: 4 * 10^15 tokens, and the same shape with ten steps."""
    peaks, sizes = [], []
    for steps in (10, 10**9):
        recipe = recipe_of([("web", steps, 512, {"a": 0.6, "b": 0.4}), ("end", steps, 512, {"b": 1.0})], shards={"max_epochs": 1e12})
        data = {"a": 10**7, "b": 10**6}
        order = Order(recipe, data)
        order.locate(1, np.arange(8))
        tracemalloc.start()
        order = Order(recipe, data)
        for step in (0, steps - 1, 2 * steps - 1):
            phase = order.phase_of(step)
            first, count = order.sequences(step)
            found = order.locate(phase, np.arange(first, first + count))
            assert found.sequence.max() < 10**6
            order.timeline.tokens_before(step)
        sizes.append(tracemalloc.get_traced_memory()[0])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert order.steps == 2 * 10**9
    assert peaks[1] < peaks[0] + 4096
    assert sizes[1] < sizes[0] + 4096
    assert peaks[1] < 10**6


def test_a_ramp_of_a_billion_steps_is_located_at_once() -> None:
    recipe = recipe_of([("web", 10**9, 512, {"a": 1.0})], shards={"max_epochs": 1e12})
    phase = recipe.train.phases[0].model_dump() | {"batch_ramp": {"start_tokens": "512 tokens", "over": f"{10**9} steps"}}
    recipe = Recipe.model_validate(recipe.model_dump() | {"train": {"phases": [phase]}})
    order = Order(recipe, {"a": 10**9})
    first, count = order.sequences(10**9 // 2)
    assert count == 1 + 7 // 2
    assert 1.0 < first / (10**9 // 2) < 4.0
    next_first, _ = order.sequences(10**9 // 2 + 1)
    assert next_first == first + count


def test_a_growth_of_the_batch_moves_no_range_and_no_sequence() -> None:
    """Only which step reads a sequence; a planned change of the mixture keeps its place, too."""
    ramp = {"kind": "loss", "start_tokens": "32 tokens", "sizes": ["64 tokens", "128 tokens"], "window_steps": 2}
    changes = [{"at": "40%", "mixture": {"a": 0.2, "b": 0.8}}]
    base = recipe_of([("p", 100, 16, {"a": 0.5, "b": 0.5}), ("q", 100, 16, {"a": 1.0})]).model_dump()
    base["train"]["phases"][0] |= {"batch_ramp": ramp, "mixture_changes": changes, "global_batch_tokens": "128 tokens"}
    recipe, data = Recipe.model_validate(base), {"a": 100_000, "b": 100_000}
    order = Order(recipe, data)
    grown = Order(recipe, data, growths=[Growth("p", 7, 64), Growth("p", 31, 128)])
    assert grown.steps < order.steps and grown.shares() == order.shares()
    total = order.timeline.phases[0].sequences
    for field in ("source", "epoch", "sequence", "start"):
        found, expected = (getattr(one.locate(0, np.arange(total)), field) for one in (grown, order))
        assert found.tolist() == expected.tolist()
    read = [number for step in range(grown.timeline.first_step(1)) for first, count in [grown.sequences(step)]
            for number in range(first, first + count)]  # fmt: skip
    assert read == list(range(total))
    assert grown.fingerprint() != order.fingerprint()


def test_seed_phase_source_and_epoch_each_change_the_order() -> None:
    data = {"a": 100_000, "b": 100_000}
    first = [("p", 100, 16, {"a": 0.5, "b": 0.5}), ("q", 100, 16, {"a": 0.5, "b": 0.5})]
    order, other_seed = Order(recipe_of(first), data), Order(recipe_of(first, seed=2), data)
    g = np.arange(800)
    runs = [order.locate(0, g), order.locate(1, g), other_seed.locate(0, g)]
    orders = [tuple(run.sequence[run.source == source].tolist()) for run in runs for source in (0, 1)]
    assert len(set(orders)) == len(orders)
    small = Order(recipe_of([("p", 100, 16, {"a": 1.0})]), {"a": 16 * 100 + 1}).locate(0, g)
    assert small.sequence[:100].tolist() != small.sequence[100:200].tolist()


def test_the_fingerprint_changes_with_what_decides_a_batch_and_with_nothing_else() -> None:
    data = {"a": 100_000, "b": 100_000}
    phases = [("p", 100, 16, {"a": 0.5, "b": 0.5})]
    base = Order(recipe_of(phases), data).fingerprint()
    assert Order(recipe_of(phases, optimizer={"learning_rate": 0.5}), data).fingerprint() == base
    assert Order(recipe_of([("p", 100, 16, {"b": 0.5, "a": 0.5})]), data).fingerprint() == base
    changed = [
        Order(recipe_of(phases, seed=2), data),
        Order(recipe_of([("q", 100, 16, {"a": 0.5, "b": 0.5})]), data),
        Order(recipe_of([("p", 101, 16, {"a": 0.5, "b": 0.5})]), data),
        Order(recipe_of([("p", 100, 16, {"a": 0.6, "b": 0.4})]), data),
        Order(recipe_of(phases), {"a": 100_001, "b": 100_000}),
    ]
    assert len({base, *(order.fingerprint() for order in changed)}) == 6
    other = Order(recipe_of(phases), data)
    other._hashes = {"a": ["hash of a file"]}
    assert other.fingerprint() != base


PROBE = """
import json, sys
import numpy as np
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.order import Order
from lmworks.shards.order import sequences_of_rank
order = Order(Recipe.model_validate_json(sys.argv[1]), json.loads(sys.argv[2]))
found = order.locate(0, np.arange(500))
print(json.dumps([order.fingerprint(), found.source.tolist(), found.epoch.tolist(), found.start.tolist()]))
"""


def test_a_fresh_process_finds_the_same(tmp_path: Path) -> None:
    recipe, data = recipe_of([("p", 100, 16, {"c": 0.2, "a": 0.5, "b": 0.3})]), {"b": 3000, "a": 3000, "c": 3000}
    found = []
    for hash_seed in ("0", "123"):
        command = [sys.executable, "-c", PROBE, recipe.model_dump_json(), json.dumps(data)]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, env=environment, cwd=tmp_path)
        found.append(json.loads(done.stdout))
    order = Order(recipe, data)
    here = order.locate(0, np.arange(500))
    expected = [order.fingerprint(), here.source.tolist(), here.epoch.tolist(), here.start.tolist()]
    assert found == [expected, expected]


def test_repetition_is_counted_and_limited() -> None:
    phases = [("p", 100, 16, {"a": 0.5, "b": 0.5})]
    shares = Order(recipe_of(phases), {"a": 16 * 200 + 1, "b": 16 * 800 + 1}).shares()
    assert [share.epochs for share in shares] == [2.0, 0.5]
    with pytest.raises(UserError, match=r"more often than shards\.max_epochs 40 \(a 80\.0 times in phase p\); add text"):
        Order(recipe_of(phases), {"a": 16 * 5 + 1, "b": 16 * 800 + 1})


def test_repetition_is_told_by_phase() -> None:
    data = {"a": 16 * 100 + 1, "b": 16 * 600 + 1}
    order = Order(recipe_of([("one", 50, 16, {"a": 0.5, "b": 0.5}), ("two", 50, 16, {"b": 1.0})]), data)
    assert max(order.epochs_by_source().values()) <= max(share.epochs for share in order.shares()) == 2.0
    assert [*epoch_warnings(order, 2.0)] == []
    assert [*epoch_warnings(order, 1.5)] == ["phase one reads source a 2.0 times, more than shards.warn_epochs 1.5"]


def test_a_share_smaller_than_a_sequence_is_refused() -> None:
    with pytest.raises(UserError, match=r"phase p: its share of source a is 16 tokens, less than one sequence of 16; add text"):
        Order(recipe_of([("p", 10, 16, {"a": 0.5, "b": 0.5})]), {"a": 16, "b": 5000})
    with pytest.raises(UserError, match=r"phase q: its share of source a is 9 tokens, less than one sequence of 16"):
        Order(recipe_of([("p", 10, 16, {"a": 0.5, "b": 0.5}), ("q", 2, 16, {"a": 0.5, "b": 0.5})]), {"a": 54, "b": 5000})


def test_a_source_without_tokens_is_named() -> None:
    with pytest.raises(UserError, match=r"phase p: the mixture names source b, which has no tokens; available: a, c"):
        Order(recipe_of([("p", 10, 16, {"a": 0.5, "b": 0.5})]), {"a": 5000, "c": 5000})


def test_an_optional_source_that_could_not_be_had_is_left_out() -> None:
    sources = [{"name": "b", "kind": "text", "path": "b", "license": "MIT", "optional": True}]
    recipe = recipe_of([("p", 100, 16, {"a": 0.2, "b": 0.5, "c": 0.3})], corpus={"sources": sources})
    order = Order(recipe, {"a": 50_000, "c": 50_000})
    assert order.left_out == ["b"]
    assert order.mixtures[0].segments[0][1].slots.tolist() == [4000, 6000]
    only_b = recipe_of([("p", 100, 16, {"b": 1.0})], corpus={"sources": sources})
    with pytest.raises(UserError, match=r"phase p: none of its sources is available \(b\)"):
        Order(only_b, {"a": 50_000})


def test_phases_share_a_source_in_proportion_to_their_tokens() -> None:
    """As many sequences of twice the length read twice the tokens, and so have two thirds of them."""
    order = Order(recipe_of([("short", 50, 16, {"a": 1.0}), ("long", 50, 32, {"a": 1.0})]), {"a": 30_000})
    short, long = order.shares()
    assert short.borders[0] == 0 and long.borders == (short.borders[-1], 30_000)
    assert short.borders[-1] == pytest.approx(10_000, abs=1)
