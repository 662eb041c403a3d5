"""Counts, bytes and times as people read them."""

from __future__ import annotations

DAY = 86_400  # seconds


def amount(value: float) -> str:
    """Format a count with four significant digits: `352.8B`, `4.194M`."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.4g}{unit}" if value / scale < 1000 else f"{value / scale:,.0f}{unit}"
    return f"{value:.3g}"


def size(value: float) -> str:
    """Format bytes in decimal units."""
    for scale, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return f"{value / scale:,.1f} {unit}"
    return f"{value:.0f} bytes"


def days(time: float) -> str:
    """Format a duration in seconds with a readable unit."""
    for size, unit in ((365.25 * DAY, "years"), (DAY, "days"), (3600, "hours"), (60, "minutes")):
        if time >= 2 * size:
            return f"{time / size:,.1f} {unit}"
    return f"{time:.0f} seconds"
