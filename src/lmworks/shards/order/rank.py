"""Which sequences a rank reads in a step.

1. `Timeline.sequences(step)`: the number of the first sequence of the step, counted over all ranks from the start of its phase, and the
   number of sequences in the step.
2. `sequences_of_rank`: the part of these that a rank reads. Only the data-parallel axis counts: ranks that differ in their place on the
   tensor, context or pipeline axis read the same sequences.
3. `Batches.batch(step, start, stop)`: `Order.locate` finds these sequences in the token files, and they are read.
4. `micro_batches` (in `lmworks.parallel`): the rank goes through its sequences in their order, `micro_batch_size` at a time.

`ParallelModel` calls step 2 for the mesh that it runs on, and the trainer passes the result to step 3.
"""

from __future__ import annotations


def sequences_of_rank(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The sequences [start, stop), of the `count` sequences of a step, that `rank` of `ranks` data-parallel ranks reads.

    Ranks read contiguous ranges in rank order; their sizes differ by one at most.
    """
    return rank * count // ranks, (rank + 1) * count // ranks
