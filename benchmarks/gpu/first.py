"""The first command on a GPU: ten checks in ten minutes, JSON after every line, stopping at nothing.

Nothing is downloaded. Exit code 1 if a check failed or did not begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from command import main

if TYPE_CHECKING:
    from gpu.runner import Check


def checks() -> list[Check]:
    """Is what the device computes right, and how fast is it?"""
    from gpu.runner import Check

    from gpu import soundness, speed, training

    return [
        Check("versions", soundness.versions, 60),
        Check("first steps", soundness.first_steps, 120),
        Check("host waits", soundness.host_waits, 60),
        Check("against cpu", soundness.against_cpu, 60),
        Check("attention", speed.attention, 90),
        Check("grouped products", soundness.grouped_products, 30),
        Check("products", speed.products, 40),
        Check("8b shapes", training.eight_layers_of_8b, 120),
        Check("decode", speed.decode, 60),
        Check("resume", soundness.resume, 180),
    ]


if __name__ == "__main__":
    main("first", __doc__, checks)
