"""What the ranks reduce at the beginning of a step, so that all of them take the same branches in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmworks.parallel.mesh import Ranks


@dataclass(frozen=True)
class StepFlags:
    """Values of one step that are equal on all ranks.

    valid_tokens: tokens of the step that carry loss, over all data-parallel ranks.
    stop: a rank has received a signal to stop. preempted: the signal came from a scheduler.
    save_due: the time after which a checkpoint is due has passed (`Saver.every_seconds`), by the clock of the first rank.
    save_failed: the asynchronous save has failed on a rank.
    mixture_changed: the first rank has found a pending change of the mixture in the ledger.
    """

    valid_tokens: int
    stop: bool
    preempted: bool
    save_due: bool
    save_failed: bool
    mixture_changed: bool


def all_reduce_flags(own: StepFlags, ranks: Ranks) -> StepFlags:
    """The flags of all ranks: tokens are summed over the data-parallel ranks, and a flag is set where any rank has set it."""
    values = (own.valid_tokens, own.stop, own.preempted, own.save_due and ranks.is_first, own.save_failed, own.mixture_changed)
    if not ranks.distributed:
        return StepFlags(*values)
    sums = torch.tensor(values, dtype=torch.int64)
    torch.distributed.all_reduce(sums)
    valid_tokens, *flags = sums.tolist()
    copies = ranks.world // ranks.size("dp")  # ranks that read the same sequences
    return StepFlags(valid_tokens // copies, *map(bool, flags))
