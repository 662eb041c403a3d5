"""How far a layout in bf16 may be from one process in bf16: a tolerance that follows from the model and not from the machine.

A layout adds the same products up in another order. It rounds other numbers to bf16, but no more of them, so that its error is another
draw of the same size. That size is seen in one process: the distance between its bf16 and its fp32, some 1% of the gradient of most tensors
and 10% where a token near the border between two experts has gone to the other. A wrong sum is off by as much as the tensor is large.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

SLACK = 4.0  # times the error of one process; 15 sound layouts reached 3.0, the quietest of 25 mistakes 5.4 (LOG.md)
OF_LOSS = 2**-8  # one rounding: a mean over the tokens is off by less
OF_NORM = 2**-6  # squares of rounded gradients are larger in the mean


def worst(exact: Mapping[str, np.ndarray], one: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """How many times the error of one process that of a layout is, and in which tensor; of all in `found` the largest.

    `exact` is one process in fp32, `one` the same in bf16. The error is the Euclidean distance from `exact`, of a tensor, and of each row
    of attention's matrices, since a sum that is missing there may concern a few: those of a shared key. A row is allowed the matrix'
    mean error besides its own in `one`, which may by chance be next to none. Elsewhere rows are tokens or experts, of which a token that
    goes to another expert moves some by much. Selection biases are excluded: they move by the sign of a difference of counts.
    """
    largest = (0.0, "")
    for name, value in found.items():
        if name.endswith("router.bias"):
            continue
        allowed, off = _of_rows(one[name] - exact[name]), _of_rows(value - exact[name])
        times = np.sqrt(off.sum() / max(allowed.sum(), 1e-30))
        if ".attention." in name and value.ndim == 2:
            times = max(times, np.sqrt(off / np.maximum(allowed + allowed.mean(), 1e-30)).max())
        largest = max(largest, (float(times), name))
    return largest


def _of_rows(difference: np.ndarray) -> np.ndarray:
    """The square of each row's length (R,); a vector is one row."""
    return np.square(difference.reshape(-1, difference.shape[-1]).astype(np.float64)).sum(1)
