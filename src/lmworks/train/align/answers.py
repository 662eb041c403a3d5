"""Answers as the rows of a step, and their scores.

Every objective of this folder is a function of the log-probabilities of the tokens of whole answers, so its gradient is a sum over tokens
of a weight times the gradient of the token's log-probability. A step therefore has three parts, which work on every layout: score all
labels without gradients (`ParallelModel.token_cross_entropy`), differentiate the objective with respect to these scores (`weigh`), and run
the backward pass with the derivatives as the weights of the labels (`Batch.weights`).

Shapes: B rows, T tokens, n answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lmworks.shards.format.labels import IGNORE, PADDING
from lmworks.shards.packing.best_fit import best_fit
from lmworks.shards.read.batch import Batch


@dataclass(frozen=True)
class Answer:
    """The ids (n,) of a prompt and its answer, and which of them were written by the assistant in this answer (n,) bool."""

    ids: np.ndarray
    learned: np.ndarray

    @property
    def inputs(self) -> int:
        """Tokens that a row needs for it: the last one is only a label."""
        return len(self.ids) - 1


@dataclass(frozen=True)
class PackedAnswers:
    """Answers in the rows of a batch, each a document of its own. `owner_BT` is the answer that a label belongs to, -1 without one."""

    batch: Batch
    owner_BT: Tensor
    count: int

    @property
    def mask_BT(self) -> Tensor:
        """Which positions have a label."""
        return self.owner_BT >= 0

    def sums(self, values_BT: Tensor) -> Tensor:
        """The sum of the values of each answer's labels; (n,), differentiable."""
        mask = self.mask_BT
        return values_BT.new_zeros(self.count).index_add(0, self.owner_BT[mask], values_BT[mask])

    def lengths(self) -> Tensor:
        """Labels of each answer; (n,)."""
        return self.sums(torch.ones(self.owner_BT.shape, dtype=torch.float64))

    def spread(self, values_n: Tensor) -> Tensor:
        """The value of each answer at all of its labels, 0 elsewhere; (B, T)."""
        return values_n[self.owner_BT.clamp(min=0)] * self.mask_BT

    def place(self, values: Sequence[np.ndarray]) -> Tensor:
        """The values of each answer's labels, in order, at their positions, 0 elsewhere; (B, T) float64."""
        found = torch.zeros(self.owner_BT.shape, dtype=torch.float64).flatten()
        owner = self.owner_BT.flatten()
        where = torch.nonzero(owner >= 0)[:, 0]
        where = where[torch.argsort(owner[where], stable=True)]
        found[where] = torch.from_numpy(np.concatenate([np.asarray(one, np.float64) for one in values]))
        return found.view(self.owner_BT.shape)


def rows_of(answers: Sequence[Answer], length: int) -> np.ndarray:
    """The row of each answer, packed by best fit into rows of `length` tokens; (n,)."""
    return best_fit(np.array([answer.inputs for answer in answers], np.int64), length)


def pack(answers: Sequence[Answer], length: int, step: int) -> PackedAnswers:
    """Pack answers into rows of `length` tokens. An answer has at least one label, and at most `length` inputs."""
    row_of = rows_of(answers, length)
    rows = int(row_of.max()) + 1 if len(row_of) else 1
    tokens, labels = np.full((rows, length), PADDING, np.int32), np.full((rows, length), IGNORE, np.int32)
    owner, used, begins = np.full((rows, length), -1, np.int64), [0] * rows, []
    for number, (answer, row) in enumerate(zip(answers, row_of.tolist(), strict=True)):
        at, count = used[row], answer.inputs
        assert answer.learned[1:].any(), "an answer without tokens has no score"
        tokens[row, at : at + count] = answer.ids[:-1]
        labels[row, at : at + count] = np.where(answer.learned[1:], answer.ids[1:], IGNORE)
        owner[row, at : at + count] = np.where(answer.learned[1:], number, -1)
        begins.append(row * length + at)
        used[row] += count
    begins += [row * length + end for row, end in enumerate(used) if end < length]  # padding is a document of its own
    batch = Batch(tokens, labels, np.array([*sorted(begins), tokens.size], np.int32), 0, step)
    return PackedAnswers(batch, torch.from_numpy(owner), len(answers))


def weigh(packed: PackedAnswers, nats_BT: Tensor, loss: Callable[[Tensor], Tensor], normalizer: float) -> tuple[Batch, Tensor]:
    """The batch with the weights of its labels, `normalizer` times the derivatives of the loss, and the loss.

    `nats_BT` are the scores of the labels; `loss` maps their log-probabilities (B, T) in float64 to a scalar. The weights are scaled so
    that their size does not depend on the size of the step, which a narrow floating-point type would round to zero.
    """
    logp_BT = (-nats_BT.double()).requires_grad_()
    value = loss(logp_BT)
    (gradient_BT,) = torch.autograd.grad(value, logp_BT)
    weights_BT = (-normalizer * gradient_BT * packed.mask_BT).float()
    return replace(packed.batch, weights=weights_BT.numpy()), value.detach()
