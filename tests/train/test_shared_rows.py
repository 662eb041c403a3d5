"""`train/shared_rows`: rows of a step that several ranks have read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.train.fault_handler import FaultHandler
from lmworks.watch.monitors import SlowRanks


class _Gathered:
    """What ranks say to each other: this rank's rows, and those of the others by the number of the reader."""

    is_first = True

    def __init__(self, others: dict[int, list[int]]) -> None:
        self._others, self.size = others, 1 + len(others)

    def all_gather(self, own: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return [own, *((*own[:4], reader, rows) for reader, rows in self._others.items())]


@pytest.mark.parametrize(
    ("others", "share"),
    [
        ({1: [3, 4]}, 0.0),
        ({1: [2, 3]}, 0.25),
        ({1: [1, 2]}, 0.5),
        ({1: [1, 2], 2: [1, 2]}, 2 / 3),
        ({0: [1, 2]}, 0.0),  # ranks of one reader, as of tensor parallelism, read the same
        ({1: []}, 0.0),
    ],
)
def test_the_share_of_rows_that_several_readers_have_read(others: dict[int, list[int]], share: float) -> None:
    handler = FaultHandler.__new__(FaultHandler)
    handler._communicator = _Gathered(others)  # type: ignore[assignment]
    handler._slow = {what: SlowRanks(5.0) for what in ("arithmetic", "data and host")}
    found = handler.compare_ranks(20, 0.1, 0.2, 0.0, 0, [1, 2], torch.device("cpu"))
    assert found["train/shared_rows"] == pytest.approx(share)
    assert "train/repeated_rows" not in found, "a rank's own copies are another metric"
