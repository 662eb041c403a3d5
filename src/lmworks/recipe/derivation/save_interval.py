"""How often to save: so that failures cost least, and never more than half an hour of work.

Failures come at a rate per device: Llama 3 (arXiv:2407.21783, section 3.3.4) had 419 unexpected interruptions in 54 days on 16,384 GPUs. A
save that holds training up for C seconds every T seconds costs C / T of the time, and a failure on average T / 2 of work. With M seconds
between failures, T = sqrt(2 C M) costs least (Young 1974; Daly 2006 has the next order, which matters where C is near M).
"""

from __future__ import annotations

import math

FAILURES_PER_DEVICE_SECOND = 419 / (54 * 86_400 * 16_384)
MOST_LOST = 1800.0  # seconds of work
_LEAST_PAUSE = 1.0  # seconds: what a save that is written in the background holds up all the same


def seconds_between_failures(devices: int) -> float:
    """The mean time between unexpected failures of a run on so many devices."""
    return 1 / (FAILURES_PER_DEVICE_SECOND * devices)


def save_interval(pause: float | None, devices: int, written: float = 0.0) -> float:
    """Seconds between two saves. `pause` is how long training stands still for one, None before that is known, and `written` how long one
    takes in the background: a save does not begin before the one before has ended."""
    if pause is None:
        return MOST_LOST
    best = math.sqrt(2 * max(pause, _LEAST_PAUSE) * seconds_between_failures(devices))
    return max(written, pause, min(MOST_LOST, best))


def lost_share(interval: float, pause: float, devices: int) -> float:
    """The fraction of the time that saves and failures are expected to cost: pauses, and half an interval of work per failure."""
    return pause / interval + interval / 2 / seconds_between_failures(devices)
