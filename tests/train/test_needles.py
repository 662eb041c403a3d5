"""Loss by position and needles, on a run and on models that are known to find, to guess and to read only what came last."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from lmworks.errors import UserError
from lmworks.recipe.changes import harmless
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from lmworks.tokenizer import load
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.build import build_model
from lmworks.train.curriculum import phase_settings
from lmworks.train.observe.long_context import (
    DEPTHS,
    FACTS,
    LongContextEvaluator,
    Needle,
    evaluate_needles,
    make_needles,
    position_ranges,
    positions,
)
from tiny_run import Tiny, curve

LENGTH = 512


@pytest.fixture(scope="module")
def tokenizer(tiny: Tiny) -> Tokenizer:
    return load(tiny.run_dir / "tokenizer")


@pytest.fixture(scope="module")
def asked(tokenizer: Tokenizer) -> list[Needle]:
    filler = np.array(tokenizer.encode("It was a day like any other, and nothing of note was said. " * 20), np.int32)
    return make_needles(tokenizer, filler, [256, LENGTH], seed=3)


class Reader:
    """A model that knows every sentence, and prefers what `choose` says of the places at which a value stands in the row."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose

    def summed_cross_entropies(self, batches: Iterable[Batch]) -> list[float]:
        return list(map(self._nats, batches))

    def _nats(self, batch: Batch) -> float:
        row, learned = batch.tokens[0].tolist(), batch.labels[0] != IGNORE
        value = batch.labels[0][learned].tolist()
        text = [*row, value[-1]][: -len(value)]
        places = [at for at in range(len(text)) if text[at : at + len(value)] == value]
        assert places, "every value offered stands in the row"
        return float(self.choose(text, places[-1]))


def test_a_row_is_full_and_its_facts_lie_where_they_should(tokenizer: Tokenizer, asked: list[Needle]) -> None:
    assert {needle.length for needle in asked} == {256, LENGTH}
    for needle in asked:
        assert len(needle.ends) == FACTS
        true = needle.ends[needle.right]
        assert all(end.tokens.shape == end.labels.shape == (1, needle.length) for end in needle.ends)
        assert len({end.valid_tokens for end in needle.ends}) == 1, "no value is longer than another"
        text = tokenizer.decode([*true.tokens[0].tolist(), int(true.labels[0, -1])])
        question, _, value = text[-80:].rpartition(" The code of the ")[2].partition(" is")
        fact = f" The code of the {question} is{value}"
        assert text.count(fact) == 2, "once in the text and once in the end"
        assert text.count("The code of the") == FACTS + 1
        assert abs(text.index(fact) / (len(text) - len(fact)) - needle.depth / 100) < 0.25
    assert {needle.depth for needle in asked} == set(DEPTHS)


def test_who_looks_finds_and_who_takes_the_last_guesses(tokenizer: Tokenizer, asked: list[Needle]) -> None:
    def looks(text: list[int], place: int) -> float:
        """Likelier the more tokens before the value are those before the end."""
        same = 0
        while same < 20 and text[place - 1 - same] == text[len(text) - 1 - same]:
            same += 1
        return -same

    model: Any = Reader(looks)
    found = evaluate_needles(model, asked)
    assert found["needle/accuracy"] == 1.0 and found["needle/chance"] == 0.25
    assert set(found) == {"needle/accuracy", "needle/chance", *(f"needle/{length}/{depth}" for length in (256, LENGTH) for depth in DEPTHS)}
    last: Any = Reader(lambda text, place: -place)
    by_depth = evaluate_needles(last, asked)
    assert by_depth[f"needle/{LENGTH}/10"] == 0.0, "four facts in the row, and the first one is never the last"
    assert by_depth["needle/accuracy"] < 0.6


def test_they_are_the_same_each_time(tokenizer: Tokenizer, asked: list[Needle]) -> None:
    filler = np.array(tokenizer.encode("It was a day like any other, and nothing of note was said. " * 20), np.int32)
    again = make_needles(tokenizer, filler, [256, LENGTH], seed=3)
    assert all(np.array_equal(a.ends[0].tokens, b.ends[0].tokens) and a.right == b.right for a, b in zip(asked, again, strict=True))
    other = make_needles(tokenizer, filler, [256], seed=4)
    assert any(not np.array_equal(a.ends[0].tokens, b.ends[0].tokens) for a, b in zip(asked, other, strict=False))


def test_stretches_of_positions() -> None:
    assert list(position_ranges(64)) == [(0, 64)]
    assert list(position_ranges(1024)) == [(0, 64), (64, 256), (256, 1024)]
    assert list(position_ranges(1500)) == [(0, 64), (64, 256), (256, 1024), (1024, 1500)]


def test_losses_by_position_add_up_to_the_loss_of_the_rows(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tolerance 1e-6: sums in another order."""
    monkeypatch.setattr("lmworks.train.observe.long_context._FIRST", 16)
    recipe = tiny.resolve().recipe
    batches = Batches(recipe, tiny.run_dir / "shards")
    model = build_model(recipe)
    far = LongContextEvaluator(batches, recipe, load(tiny.run_dir / "tokenizer"))
    phase = phase_settings(recipe, batches.order.timeline)[1]
    found = far.evaluate(model, phase)
    assert set(found) == {"validation/position/0", "validation/position/16"}
    rows = far._rows[64]
    place = np.concatenate([positions(row) for row in rows])
    valid = np.concatenate([row.labels for row in rows]) != IGNORE
    near, total = int((valid & (place < 16)).sum()), int(valid.sum())
    model.eval()
    expected = sum(map(model.summed_cross_entropy, rows))
    summed = found["validation/position/0"] * near + found["validation/position/16"] * (total - near)
    assert summed == pytest.approx(expected, rel=1e-6)
    assert abs(found["validation/position/0"] - math.log(512)) < 0.5, "an untrained model guesses"


def test_a_run_measures_them(tiny_copy: Tiny) -> None:
    """The second phase has no room for needles at 64 tokens; at 256 it has."""
    with pytest.raises(UserError, match="sequences of 64 tokens have no room for needles"):
        tiny_copy.copy(tiny_copy.run_dir.parent / "short").pretrain("train.phases.long.needle=true")
    longer = ("train.phases.long.needle=true", "train.phases.long.sequence_length=256 tokens", "train.validate_every=100%")
    tiny_copy.pretrain(*longer)
    last = curve(tiny_copy.run_dir)[-1]
    assert 0 <= last["needle/accuracy"] <= 1 and last["needle/chance"] == 0.25
    assert "validation/position/64" in last
    assert harmless("train.phases.long.needle")


def test_positions_begin_anew_with_each_document(tiny: Tiny) -> None:
    recipe = tiny.resolve().recipe
    row = next(iter(Batches(recipe, tiny.run_dir / "shards").validation("docs", 32, 2)))
    place = positions(row).flatten()
    starts = row.cu_seqlens[:-1]
    assert (place[starts] == 0).all() and (place == 0).sum() == len(starts)
    assert (np.diff(place)[np.isin(np.arange(1, len(place)), starts, invert=True)] == 1).all()
