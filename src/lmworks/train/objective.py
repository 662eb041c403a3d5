"""What a stage of training minimizes, where that is not the loss of the next token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lmworks.shards.read.batch import Batch


@dataclass(frozen=True)
class Update:
    """One optimizer update of a step. `batch`: the rows that this rank trains on, with weights; `rows`: of all ranks. The weighted loss is
    divided by `normalizer`; `loss` is the objective's value, `labels` and `tokens` count all ranks' labels and tokens."""

    batch: Batch
    rows: int
    normalizer: float
    loss: Tensor
    labels: int
    tokens: int


class Objective(Protocol):
    """Makes the updates of a step. Dropout, router losses, the z-loss and the losses of multi-token prediction are off: a token has the
    same probability when it is generated, scored and learned. All methods are collective."""

    def updates(self, step: int) -> Iterator[Update]:
        """The updates of a step, each to be applied before the next is asked for: a function of the weights, the seed and the step."""

    def metrics(self) -> dict[str, float]:
        """Metrics of the last step."""
