"""Numbers as people read them."""

from __future__ import annotations

import pytest

from lmworks.ui import amounts


@pytest.mark.parametrize(
    ("shown", "value", "text"),
    [
        ("number", 0, "0"),
        ("number", 8.38049, "8.38"),
        ("number", 1234.56, "1,235"),
        ("number", -0.25, "−0.25"),
        ("number", 0.00012899, "1.29e−4"),
        ("number", 2e-4, "2e−4"),
        ("number", 100, "100"),
        ("number", 1e-3, "0.001"),
        ("compact", 999, "999"),
        ("compact", 999_900, "1M"),
        ("compact", 13_700_000, "13.7M"),
        ("compact", 15e12, "15T"),
        ("bytes", 117_845_430, "118 MB"),
        ("bytes", 12, "12 B"),
        ("seconds", 4.56, "4.6 s"),
        ("seconds", 1.3e-5, "13 µs"),
        ("seconds", 0.0057, "5.7 ms"),
        ("seconds", 59.6, "1 min 00 s"),
        ("seconds", 754, "12 min 34 s"),
        ("seconds", 7500, "2 h 05 min"),
        ("seconds", 90 * 86400, "90 d 0 h"),
        ("percent", 0.484, "48.4%"),
    ],
)
def test_shown(shown: str, value: float, text: str) -> None:
    assert amounts.SHOWN[shown](value) == text


def test_what_is_not_a_number() -> None:
    assert amounts.significant(float("nan")) == amounts.significant(float("inf")) == "–"
