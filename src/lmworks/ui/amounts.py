"""Counts, bytes, times and other numbers as people read them."""

from __future__ import annotations

import math

_SI = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def compact(value: float) -> str:
    """Three figures and a suffix: 12,300,000 is `12.3M`."""
    for scale, suffix in _SI:
        if abs(value) >= scale * 0.9995:
            return f"{significant(value / scale, 3)}{suffix}"
    return significant(value, 3)


def significant(value: float, digits: int = 4) -> str:
    """Rounded to so many figures, without an exponent where that stays readable, and without trailing zeros."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "–"
    if abs(value) < 1e-3 or abs(value) >= 1e9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}".replace("-", "−")
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{places}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")


def short_size(value: float) -> str:
    """Bytes: `1.52 GB`."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit * 0.9995:
            return f"{significant(value / unit, 3)} {name}"
    return f"{value:.0f} B"


def span(seconds: float) -> str:
    """A time in its two largest units: `2 h 05 min`."""
    if 0 < seconds < 1:
        return f"{significant(1e3 * seconds, 2)} ms" if seconds >= 1e-3 else f"{significant(1e6 * seconds, 2)} µs"
    if seconds < 10:
        return f"{significant(seconds, 2)} s"
    minutes, whole = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{whole} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 1:
        return f"{minutes} min {whole:02d} s"
    days, hours = divmod(hours, 24)
    return f"{hours} h {minutes:02d} min" if days < 1 else f"{days} d {hours} h"


def percent(value: float) -> str:
    return f"{significant(100 * value, 3)}%"


SHOWN = {"number": significant, "compact": compact, "bytes": short_size, "seconds": span, "percent": percent}
"""Ways to show a value, by the names that charts (and the page's script, alike) use."""


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
