"""The third command on a GPU: one rank of many of a sparse model, a sparse layer by part, and the recurrences of linear attention.

Nothing is downloaded. Exit code 1 if a check failed or did not begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from command import main

if TYPE_CHECKING:
    from gpu.runner import Check


def checks() -> list[Check]:
    """Rank 0 of 64 and of 8,192 in a process group whose other ranks are made up."""
    from functools import partial

    from gpu.runner import Check

    from gpu import one_rank, parts

    return [
        Check("15b of 64", partial(one_rank.first_rank, "glm-15b-a3b", "64xh100"), 200),
        Check("355b of 8192", partial(one_rank.first_rank, "glm46-355b-a32b", "8192xh800"), 300),
        Check("sparse layer", parts.sparse_layer, 90),
        Check("linear attention", parts.linear_attention, 60),
    ]


if __name__ == "__main__":
    main("third", __doc__, checks)
