"""Best-fit packing: whole documents where they fit, every label once per epoch, any batch at once."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batches import same
from test_order import recipe_of
from token_shards import write_token_shards

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE
from lmworks.shards.batches import Batches
from lmworks.shards.order import MixtureOverride

BEST_FIT = {"packing": "best_fit", "max_epochs": 1e6}


def segments(batches: Batches, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of each segment of a step."""
    batch = batches.batch(step)
    cut = batch.cu_seqlens[1:-1]
    return list(zip(np.split(batch.tokens.reshape(-1), cut), np.split(batch.labels.reshape(-1), cut), strict=True))


@given(lengths=st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=30), min_size=1, max_size=3), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_every_label_comes_once_per_epoch_and_no_document_that_fits_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], seed: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    write_token_shards(folder, {"a": [[40, 2], *lengths]})
    rows = Batches(recipe_of([("p", 1, 16, {"a": 1.0})], seed, shards=BEST_FIT), folder).order.shares()[0].sequences
    phase = {
        "name": "p",
        "tokens": f"{2 * rows * 16} tokens",
        "mixture": {"a": 1.0},
        "sequence_length": "16 tokens",
        "global_batch_tokens": "16 tokens",
    }
    tree = recipe_of([("p", 1, 16, {"a": 1.0})], seed, shards=BEST_FIT).model_dump()
    batches = Batches(Recipe.model_validate(tree | {"train": {"phases": [phase]}}), folder)
    expected: Counter[int] = Counter()
    at, fitting = 0, set()
    for length in [40, 2, *(length for shard in lengths for length in shard)]:
        expected.update(range(at + 1, at + length))
        if 2 <= length <= 17:
            fitting.add((at, length - 1))
        at += length
    for epoch in range(2):
        seen: Counter[int] = Counter()
        whole = set()
        for step in range(epoch * rows, (epoch + 1) * rows):
            for tokens, labels in segments(batches, step):
                if (labels == IGNORE).all():
                    row = batches.batch(step).tokens[0]
                    assert (row[-len(tokens) :] == np.resize(row[: -len(tokens)], len(tokens))).all(), "padding repeats its row"
                    continue
                assert (labels == tokens + 1).all(), "within a segment each label is the token that follows in its document"
                seen.update(labels.tolist())
                whole.add((int(tokens[0]), len(tokens)))
        assert seen == expected, f"epoch {epoch}"
        assert fitting <= whole


LENGTHS = {"a": [[20, 300, 7, 64, 65, 66, 1, 128] * 5, [33] * 40], "b": [[100] * 20, [5] * 100, [64] * 10]}
PHASES = [("one", 4, 64, {"a": 0.5, "b": 0.5}), ("two", 3, 128, {"a": 0.8, "b": 0.2})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shards")
    write_token_shards(made, LENGTHS)
    return made


def test_phases_share_no_document_and_divide_all_of_them(folder: Path) -> None:
    batches = Batches(recipe_of([(name, 40, length, mixture) for name, _, length, mixture in PHASES], shards=BEST_FIT), folder)
    seen: list[set[int]] = [set(), set()]
    for step in range(batches.steps):
        for _, labels in segments(batches, step):
            seen[batches.order.phase_of(step)].update(labels[labels != IGNORE].tolist())
    assert not seen[0] & seen[1]
    ends, starts, at = set(), set(), 0
    for shards in LENGTHS.values():
        for length in (length for shard in shards for length in shard):
            starts.add(at)
            at += length
            ends.add(at)
    assert seen[0] | seen[1] == set(range(at)) - starts, "both phases together read all there is"
    assert batches.shared_documents() == []


def test_ranks_and_micro_batches_change_nothing_and_fresh_readers_agree(folder: Path, tmp_path: Path) -> None:
    recipe = recipe_of(PHASES, shards=BEST_FIT)
    batches = Batches(recipe, folder)
    other = Path(shutil.copytree(folder, tmp_path / "shards", ignore=shutil.ignore_patterns("packing")))
    fresh = Batches(recipe, other)
    for step in reversed(range(batches.steps)):
        whole = batches.batch(step)
        assert same(whole, fresh.batch(step))
        assert same(whole.rows(2, 5), batches.batch(step, 2, 5))
    plans = [path.relative_to(other) for path in (other / "packing").rglob("*.rows")]
    assert plans
    assert all((folder / path).read_bytes() == (other / path).read_bytes() for path in plans)


def test_a_change_of_the_mixture_leaves_packed_batches_before_it(folder: Path) -> None:
    recipe = recipe_of([("one", 10, 64, {"a": 1.0}), ("two", 10, 64, {"b": 1.0})], shards=BEST_FIT)
    before, after = Batches(recipe, folder), Batches(recipe, folder, [MixtureOverride(4, {"a": 0.5, "b": 0.5})])
    assert all(same(before.batch(step), after.batch(step)) for step in range(4))
    assert not same(before.batch(4), after.batch(4))
    assert after.order.share(0, "b").sequences > 0


def test_a_packing_that_is_cut_off_is_named(folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "shards"))
    recipe = recipe_of(PHASES, shards=BEST_FIT)
    Batches(recipe, copied)
    for path in (copied / "packing").rglob("*.rows"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"\.rows is cut off; delete the folder .*packing.* and run the same command again"):
        Batches(recipe, copied).batch(0)
