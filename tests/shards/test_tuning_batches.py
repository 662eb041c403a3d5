from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lmworks.errors import UserError
from lmworks.shards.batch import IGNORE
from lmworks.shards.indexed import IndexedFile, IndexedWriter
from lmworks.shards.validation import TuningBatches

LENGTH = 32


@pytest.fixture
def prefixes(tmp_path: Path) -> dict[str, Path]:
    """Conversations of 4 to 40 tokens, each made of one number of its own; the second half is the assistant's."""
    rng = np.random.default_rng(0)
    own = 1
    for name, count in (("chats", 50), ("tasks", 30)):
        with IndexedWriter(tmp_path / name, np.dtype("<u2"), mask=True) as writer:
            for _ in range(count):
                size = int(rng.integers(4, 41))
                writer.add(np.full(size, own), np.arange(size) >= size // 2)
                own += 1
    return {"chats": tmp_path / "chats", "tasks": tmp_path / "tasks"}


def conversations(batch) -> list[tuple[int, int, int]]:
    """(own number, inputs, labels that count) of each segment with text; every segment must hold one conversation only."""
    found = []
    bounds = batch.cu_seqlens.tolist()
    for a, b in pairwise(bounds):
        tokens, labels = batch.tokens.reshape(-1)[a:b], batch.labels.reshape(-1)[a:b]
        learned = labels[labels != IGNORE]
        if not learned.size:
            row, used = divmod(a, LENGTH)
            assert (tokens == (np.resize(batch.tokens[row, :used], len(tokens)) if used else 0)).all(), "padding repeats its row"
            continue
        assert len(np.unique(tokens)) == 1
        assert (learned == tokens[0]).all()
        found.append((int(tokens[0]), b - a, len(learned)))
    return found


def test_each_epoch_holds_every_conversation_that_fits_once_and_whole(prefixes: dict[str, Path]) -> None:
    file = IndexedFile(prefixes["chats"])
    sizes = {int(file.document(number)[0]): len(file.document(number)) for number in range(file.documents)}
    fitting = {own: size for own, size in sizes.items() if size - 1 <= LENGTH}
    batches = TuningBatches({"chats": prefixes["chats"]}, LENGTH, LENGTH, 10**5, seed=3)
    assert batches.dropped == {"chats": len(sizes) - len(fitting)}
    assert batches.dropped["chats"] > 0, "the test needs one that is too long"
    rows = round(batches.steps / batches.epochs["chats"])
    orders = []
    for epoch in range(3):
        seen: Counter[int] = Counter()
        order = []
        for step in range(epoch * rows, (epoch + 1) * rows):
            for own, inputs, learned in conversations(batches.batch(step)):
                assert inputs == fitting[own] - 1
                assert learned == fitting[own] - fitting[own] // 2
                seen[own] += 1
                order.append(own)
        assert seen == Counter(fitting.keys())
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
    assert batches.filled > 0.85


def test_bodies_are_mixed_by_weight(prefixes: dict[str, Path]) -> None:
    batches = TuningBatches(prefixes, LENGTH, LENGTH * 4, LENGTH * 400, seed=3, weights={"chats": 3.0, "tasks": 1.0})
    assert batches.steps == 100
    rows = [conversations(batches.batch(step).rows(row, row + 1)) for step in range(100) for row in range(4)]
    assert sum(found[0][0] <= 50 for found in rows) == 300


def test_a_step_is_the_same_again(prefixes: dict[str, Path]) -> None:
    one, other = (TuningBatches(prefixes, LENGTH, LENGTH * 4, LENGTH * 400, seed=3) for _ in range(2))
    one.batch(3)
    assert np.array_equal(one.batch(70).tokens, other.batch(70).tokens)
    assert not np.array_equal(one.batch(70).tokens, TuningBatches(prefixes, LENGTH, LENGTH * 4, LENGTH * 400, seed=4).batch(70).tokens)


def test_what_cannot_work_is_refused(prefixes: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave no whole step"):
        TuningBatches(prefixes, LENGTH, LENGTH * 4, LENGTH, seed=3)
    with pytest.raises(UserError, match="no conversation of chats fits into sequence_length 2; raise it"):
        TuningBatches(prefixes, 2, 8, 100, seed=3)
    with pytest.raises(UserError, match="tuning step 5 does not exist"):
        TuningBatches(prefixes, LENGTH, LENGTH, LENGTH * 5, seed=3).batch(5)
    (tmp_path / "chats.mask").unlink()
    with pytest.raises(UserError, match=r"chats has no \.mask"):
        TuningBatches(prefixes, LENGTH, LENGTH, LENGTH * 5, seed=3)


def test_epochs_read_every_conversation_of_all_sets_exactly_as_often(prefixes: dict[str, Path]) -> None:
    """In another order each time; a batch may span two epochs, and the last one ends with blank rows."""
    names = {name: {int(file.document(n)[0]) for n in range(file.documents) if len(file.document(n)) - 1 <= LENGTH}
             for name, file in ((name, IndexedFile(prefix)) for name, prefix in prefixes.items())}  # fmt: skip
    wanted = set().union(*names.values())
    batches = TuningBatches(prefixes, LENGTH, LENGTH * 7, None, seed=3, weights={"chats": 3.0, "tasks": 1.0}, epochs=3)
    rows = [batches.batch(step).rows(row, row + 1) for step in range(batches.steps) for row in range(7)]
    found = [[own for own, _, _ in conversations(row)] for row in rows]
    last = max(number for number, held in enumerate(found) if held) + 1
    assert len(found) - last < 7 and last % 7, "the last batch is not full"
    assert last % 3 == 0
    epochs = [found[first : first + last // 3] for first in range(0, last, last // 3)]
    for epoch in epochs:
        assert Counter(own for held in epoch for own in held) == Counter(wanted)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sorted(map(tuple, epochs[0])) == sorted(map(tuple, epochs[1])), "the same rows"
    assert batches.epochs == {"chats": 3.0, "tasks": 3.0}
    with pytest.raises(UserError, match="does not exist"):
        batches.batch(batches.steps)
