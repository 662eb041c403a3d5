"""Quantities with their unit: what a text means, and what is refused."""

from __future__ import annotations

import re

import pytest

from lmworks.recipe.schema.units import Bytes, Duration, Seconds, Tokens


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Tokens, "4Ki", 4096), (Tokens, "2.5M tokens", 2_500_000), (Tokens, "1_000", 1000), (Tokens, "12,345,678", 12_345_678),
        (Bytes, "16MB", 16_000_000),
        (Bytes, "16MiB", 16 * 2**20), (Bytes, "7 B", 7), (Seconds, "10 min", 600), (Seconds, "2 h", 7200), (Seconds, "9 days", 9 * 86400),
    ],
)  # fmt: skip
def test_a_quantity_is_the_number_that_it_says(kind: type, text: str, value: float) -> None:
    assert kind.parse(text) == value
    assert kind.parse(kind.parse(text).text()) == value


@pytest.mark.parametrize(("kind", "text"), [(Tokens, "0"), (Tokens, "1.5 tokens"), (Tokens, "3 steps"), (Bytes, "3.3 B"), (Seconds, "5 m")])
def test_what_is_no_quantity_is_refused(kind: type, text: str) -> None:
    with pytest.raises(ValueError, match=r"write for example|not a whole number"):
        kind._validate(text)


def test_a_comma_is_no_decimal_point() -> None:
    """Nor is an underscore; both separate groups of three digits. The JSON Schema says the same to an editor."""
    decimal = ((Tokens, "1,5B", "1.5B"), (Seconds, " 1,5h", "1.5h"), (Bytes, "0,25 GB", "0.25 GB"), (Duration, "2,5%", "2.5%"))
    for kind, text, meant in decimal:
        with pytest.raises(ValueError, match=f"a comma separates thousands: write {meant}$"):
            kind.parse(text)
    for text in ("1_5B", "1,50,000", "1,000_000", "1234,567", "1,0000", ",500"):
        with pytest.raises(ValueError, match="is not a quantity"):
            Tokens.parse(text)
    (pattern,) = (form["pattern"] for form in Tokens.forms() if "pattern" in form)
    found = {text: bool(re.search(pattern, text)) for text in ("1,5B", "1_5B", "1,500B", "1_500_000", "1.5B", "15000 tokens")}
    assert found == {"1,5B": False, "1_5B": False, "1,500B": True, "1_500_000": True, "1.5B": True, "15000 tokens": True}


def test_durations_in_tokens_and_steps() -> None:
    """Of a phase of 1,000 tokens in steps of 100."""
    lengths = {"3 steps": (300, 3), "250 tokens": (250, 3), "300 tokens": (300, 3), "25%": (250, 3), "100%": (1000, 10), "0.1%": (1, 1)}
    for text, (tokens, steps) in lengths.items():
        one = Duration.parse(text)
        assert one.tokens(step_tokens=100, phase_tokens=1000) == tokens, text
        assert one.steps(step_tokens=100, phase_tokens=1000) == steps, text
        assert Duration.parse(one.text()) == one


def test_an_interval_is_at_least_a_step_and_counts_the_last_event() -> None:
    for text, interval, times in (("0 steps", 1, 10), ("3 steps", 3, 4), ("50%", 5, 2), ("1 tokens", 1, 10)):
        assert Duration.parse(text).interval(10, 1000) == interval, text
        assert Duration.parse(text).times(10, 1000) == times, text
