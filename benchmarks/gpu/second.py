"""The second command on a GPU: what decides how a step of a large dense model should be computed.

Nothing is downloaded. Exit code 1 if a check failed or did not begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from command import main

if TYPE_CHECKING:
    from gpu.runner import Check


def checks() -> list[Check]:
    """A 7B model, and the parts of a step that could be computed in another way."""
    from gpu.runner import Check

    from gpu import parts, training

    return [
        Check("7b", training.layers_of_7b, 200),
        Check("head loss", parts.head_losses, 120),
        Check("muon", parts.orthogonalizations, 60),
        Check("documents", training.documents_per_row, 120),
        Check("shadow weights", parts.shadow_weights, 60),
        Check("fp8", parts.fp8_block, 90),
    ]


if __name__ == "__main__":
    main("second", __doc__, checks)
