"""Who owns which matrix, who sends, and how much is under way at once; without processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from lmworks.optim.groups import Holders
from lmworks.optim.matrix_exchange import MatrixRun, _assign_owners, _cut, _runs, _stacks


def run(rows: int, cols: int, replicas: int = 2, shards: int = 2, count: int = 1) -> MatrixRun:
    """Matrices with `shards` parts by rows, on `replicas` times as many ranks."""
    places = np.indices((replicas, shards)).reshape(2, -1).T
    each = rows // shards
    boxes = np.array([[(0, count), (each * shard, each * (shard + 1)), (0, cols)] for _, shard in places])
    shape = (count, rows, cols) if count > 1 else (rows, cols)
    return MatrixRun("w", torch.empty(shape, device="meta"), 0, count, np.arange(replicas * shards), places, boxes)


def test_parts_come_from_the_owners_replica() -> None:
    """Replicas are farther apart than shards; the owner's own part does not travel."""
    assert [replace(run(8, 8), owner=owner).senders for owner in range(4)] == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    assert replace(run(8, 8, replicas=4, shards=1), owner=2).senders == {2}


def test_owners_have_alike_to_do() -> None:
    """The dearest first, each to the rank with the least: at most one matrix apart."""
    runs = [run(rows, 32) for rows in (8, 32, 16, 8, 24, 32, 8, 16, 8, 8, 24, 8)]
    load = np.zeros(4)
    for owned in _assign_owners(runs, 4):
        load[owned.owner_G] += owned.cost
    assert load.max() - load.min() <= min(one.cost for one in runs)


def test_what_a_run_of_matrices_has_and_costs() -> None:
    """All of their elements, and the cost of products of their smaller side."""
    for rows, cols, count in ((8, 32, 3), (32, 8, 1)):
        one = run(rows, cols, count=count)
        assert (one.shape, one.elements, one.cost) == ((8, 32), 256 * count, 8 * 256 * count)
        assert one.elements_H().tolist() == [128 * count] * 4


def test_a_stack_is_split_where_its_holders_change() -> None:
    """One rank has six matrices, two others have two and four of them, and a fourth has none."""
    boxes = np.array([[(begin, end), (0, 4), (0, 8)] for begin, end in ((0, 6), (0, 2), (2, 6), (6, 6))])
    found = Holders(np.array([3, 5, 7, 9]), np.arange(4)[:, None], boxes)
    runs = [*_runs("w", torch.empty(6, 4, 8, device="meta"), found, (3, 5, 7, 9), 1000)]
    assert [(one.first, one.count, one.members_H.tolist()) for one in runs] == [
        (0, 1, [0, 1]), (1, 1, [0, 1]), (2, 2, [0, 2]), (4, 2, [0, 2]),
    ]  # fmt: skip


def test_a_bucket_is_bounded() -> None:
    limit, size = 300, 4
    for replicas, shards in ((1, 4), (2, 2), (4, 1)):
        runs = _assign_owners([run(8, 16, replicas, shards) for _ in range(37)], size)
        buckets = _cut(runs, size, limit)
        assert [one for bucket in buckets for one in bucket] == runs
        for bucket in buckets:
            owned, held = np.zeros(size), np.zeros(size)
            for one in bucket:
                owned[one.owner_G] += one.elements
                held[one.members_H] += one.elements_H()
            assert owned.max() <= limit
            assert held.max() <= limit or len(bucket) <= size
        assert all(len(bucket) >= size for bucket in buckets[:-1])  # every rank has something to do


def test_a_stack_has_one_shape_and_is_bounded() -> None:
    runs = [run(rows, cols) for rows, cols in ((8, 16), (16, 8), (8, 8), (8, 16), (64, 64), (8, 16), (8, 8), (16, 8))]
    stacks = [[(one.shape, one.elements) for one in stack] for stack in _stacks(runs, 300)]
    assert stacks == [[((8, 16), 128)] * 2, [((8, 16), 128)] * 2, [((8, 16), 128)], [((8, 8), 64)] * 2, [((64, 64), 4096)]]
