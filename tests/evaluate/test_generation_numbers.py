"""The final number of a reply."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from lmworks.verify.numbers import Stated, final_number, number


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("#### 18", 18), ("9 * 2 = 18\n#### 1,234", 1234), ("####-5", -5), ("The answer is 18.", 18), ("the answer is $18.00 a day", 18),
        ("The answer is $1,234,567.", 1234567), ("The answer is -5", -5), ("The answer is $-5", -5), ("The answer is -$5", -5),
        ("The answer is \u22125", -5), ("The answer is .5", Fraction(1, 2)), ("The answer is 1/2", Fraction(1, 2)),
        ("The answer is 12.50", Fraction(25, 2)), ("The answer is 1. No, wait. The answer is 42.", 42), ("so \\boxed{42}", 42),
        ("\\boxed{1{,}234}", 1234), ("\\(\\boxed{\\text{18}}\\) of 20", 18), ("**Answer: $18**", 18), ("**Answer:** 18", 18),
        ("Final answer: 18 eggs", 18), ("A: 7", 7), ("answer = 3.", 3), ("The answer is 5 + 3 = 8 dollars for 3 people", 8),
        ("The answer is 18 since 9 * 2 = 18 and 4 = 4", 18), ("The answer is 5 apples. 6 are left over.", 5),
        ("The answer is **20**.\nHope that helps you 100%!", 20), ("\uff11\uff18", 18), ("The answer is 50%", 50), ("Answer: 7km", 7),
        ("The answer was 3, the answer is 4", 4), ("The result is: 9", 9), ("The answer is \u00bd", Fraction(1, 2)),
    ],
)  # fmt: skip
def test_stated(reply: str, value: int) -> None:
    found = final_number(reply)
    assert found is not None and found.value == value


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("so 3 and then 18 eggs", 18), ("16-3-4", 4), ("20 - 12", 12), ("(-5)", -5), ("it falls to -5", -5), ("= -5", -5),
        ("5-10 people", 10),
        ("$18.", 18), ("12.", 12), ("1,000,000 in all", 1000000), ("1,23,4", 4), ("The answer is unknown, but 3", 3), ("x2", 2),
    ],
)  # fmt: skip
def test_the_last_number_where_none_is_stated(reply: str, value: int) -> None:
    found = final_number(reply)
    assert found is not None and found.value == value
    assert found.stated == reply.startswith("The answer")


@pytest.mark.parametrize("reply", ["", "no number", "####", "The answer is", "\0", "-", "$", "1" * 5000, "1/0", "\u4e94"])
def test_no_number(reply: str) -> None:
    assert final_number(reply) is None


def test_a_number_alone() -> None:
    assert number("-1,234.5") == Stated("-1,234.5", Fraction(-2469, 2), stated=True)
    assert number("three eggs") is None and number("") is None


@pytest.mark.parametrize(
    "hostile",
    ["1,", "-", "answer is ", "1", "\\boxed{", "$-", "1/", "1,234", "answer ",
     "*", " ", "\n", "\n ", "answer" + "*" * 100, "a" + " " * 100, "#"],
)  # fmt: skip
def test_hostile_replies_take_linear_time(hostile: str) -> None:
    """Of quadratic time these would take minutes to hours."""
    began = time.process_time()
    final_number(hostile * (1_000_000 // len(hostile)))
    final_number(hostile * (99_000 // len(hostile)) + "x")
    assert time.process_time() - began < 10
