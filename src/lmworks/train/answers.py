"""Answers as the rows of a step, their scores, and the steps of a stage that trains on them.

Every objective of `dpo` and `grpo` is a function of the log-probabilities of the tokens of whole answers, so its gradient is a sum over
tokens of a weight times the gradient of the token's log-probability. A step therefore has three parts, which work on every layout: score
all labels without gradients (`ParallelModel.token_cross_entropy`), differentiate the objective with respect to these scores
(`differentiate`), and run the backward pass with the derivatives as the weights of the labels (`Batch.weights`).

Reference scores are what the weights that a stage starts from give each answer, computed once and kept in the stage's folder:

    DIR/reference/manifest.json   what the scores depend on, and how many there are
    DIR/reference/00000.npy       summed log-probabilities of the first `PART` answers (float64), and so on

Each file is written atomically; a killed computation resumes after its last whole file. No second model is ever in memory.

Shapes: B rows, T tokens, n answers.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lmworks.checkpoint.communicator import Communicator
from lmworks.errors import UserError
from lmworks.io.files import read_json, write_bytes, write_json
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE, PADDING, Batch, fill_padding
from lmworks.shards.row_plans import best_fit
from lmworks.train.curriculum import PhaseSettings, StageCurriculum
from lmworks.ui import terminal


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
    for row, end in enumerate(used):
        fill_padding(tokens[row], end)
    batch = Batch(tokens, labels, np.array([*sorted(begins), tokens.size], np.int32), 0, step)
    return PackedAnswers(batch, torch.from_numpy(owner), len(answers))


def differentiate(packed: PackedAnswers, nats_BT: Tensor, loss: Callable[[Tensor], Tensor], normalizer: float) -> tuple[Batch, Tensor]:
    """The batch with the weights of its labels, `normalizer` times the derivatives of the loss, and the loss.

    `nats_BT` are the scores of the labels; `loss` maps their log-probabilities (B, T) in float64 to a scalar. The weights are scaled so
    that their size does not depend on the size of the step, which a narrow floating-point type would round to zero.
    """
    logp_BT = (-nats_BT.double()).requires_grad_()
    value = loss(logp_BT)
    (gradient_BT,) = torch.autograd.grad(value, logp_BT)
    weights_BT = (-normalizer * gradient_BT * packed.mask_BT).float()
    return replace(packed.batch, weights=weights_BT.numpy()), value.detach()


PART = 512


def reference_scores(
    model: ParallelModel, answers: Sequence[Answer], folder: Path, key: str, communicator: Communicator, *,
    length: int, micro_batch_size: int,
) -> torch.Tensor:  # fmt: skip
    """The summed log-probability of each answer (n,) in float64, on all ranks, which call it together.

    `key` identifies the answers, the weights and the precision: scores that are kept under another key are computed again.
    """
    manifest = {"key": key, "answers": len(answers), "part": PART}
    parts = [answers[start : start + PART] for start in range(0, len(answers), PART)]
    kept = model.ranks.first(lambda: _read(folder, manifest, len(parts)))
    found, was_training = list(kept), model.training
    model.eval()
    try:
        with terminal.bar("reference scores", len(answers), sum(map(len, found))) as bar:
            for number in range(len(found), len(parts)):
                packed = pack(parts[number], length, number)
                scores = -packed.sums(model.token_cross_entropy(packed.batch, micro_batch_size).double())
                found.append(scores.numpy())
                if communicator.is_first:
                    stream = io.BytesIO()
                    np.save(stream, found[-1])
                    write_bytes(folder / f"{number:05}.npy", stream.getvalue())
                bar.advance(len(parts[number]))
    finally:
        model.train(was_training)
    return torch.from_numpy(np.concatenate(found)) if found else torch.empty(0, dtype=torch.float64)


def _read(folder: Path, manifest: dict[str, object], count: int) -> list[np.ndarray]:
    """The whole files that a run with the same manifest has kept; the folder is made anew for another one."""
    try:
        same = read_json(folder / "manifest.json") == manifest
    except UserError:
        same = False
    if not same:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(folder / "manifest.json", manifest)
    found = []
    for number in range(count):
        try:
            found.append(np.load(folder / f"{number:05}.npy", allow_pickle=False))
        except (OSError, ValueError, EOFError):
            break
    return found


class AnswerCurriculum(StageCurriculum):
    """`rows[step]` rows in each step, which `batch` makes."""

    def __init__(
        self, name: str, recipe: Recipe, options: Dpo | Grpo, rows: Sequence[int], batch: Callable[[int], Batch]
    ) -> None:
        self._rows, self._batch = rows, batch
        self._tokens = [0, *(count * int(options.sequence_length) for count in accumulate(rows))]
        super().__init__(name, recipe, options, len(rows))

    def sequences(self, step: int) -> int:
        return self._rows[step]

    def batch(self, step: int, start: int, stop: int) -> Batch:
        return self._batch(step).rows(start, stop)

    def tokens_before(self, step: int) -> int:
        return self._tokens[step]

    def sequences_before(self, phase: PhaseSettings, count: int) -> Iterator[Batch]:
        """Nothing: these stages have no elastic weight consolidation."""
        return iter(())
