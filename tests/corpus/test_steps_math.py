"""Arithmetic and answers: right ones pass, planted wrong ones are found, what is no plain arithmetic is left alone."""

from __future__ import annotations

import random
import sysconfig
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_documents import outcomes_of, step_of

from lmworks.corpus.document import Document, Drop
from lmworks.corpus.transform.checks import NotArithmetic, checks, evaluate, final_answer, same_answer
from lmworks.recipe.schema.steps import Math


def found(text: str, answer: str | None = None) -> list[tuple[str, bool]]:
    return [(check.shown, check.correct) for check in checks(text, answer, True, 0.01)]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*4", 12),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("-5+2", -3),
        ("1/3", Fraction(1, 3)),
        ("5*.2", 1),
        ("30%", Fraction(3, 10)),
        ("1,000+1", 1001),
        ("$3 × 2 ÷ 4", Fraction(3, 2)),
        ("2−5", -3),
        ("10-2-3", 5),
        ("24/4/2", 3),
        ("--3", 3),
    ],
)
def test_values(expression: str, value: Fraction) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "x", "1+", "(1", "1)", "2**3", "1/0", "__import__('os')", "9" * 300, "(" * 90 + "1" + ")" * 90, "1 2", "٣+٤", "1e9", "%"],
)
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(NotArithmetic):
        evaluate(expression)


def whole_sums(draw: random.Random) -> str:
    return "".join(f"{draw.randint(0, 99)}{draw.choice(['+', '-', '*', ' + ', ' - '])}" for _ in range(draw.randint(1, 6))) + str(
        draw.randint(1, 9)
    )


def test_values_equal_pythons() -> None:
    draw = random.Random(0)
    for _ in range(300):
        expression = whole_sums(draw)
        assert evaluate(expression) == eval(expression)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He has <<3*4=12>>12 and <<48/2=24>>24.", [True, True]),
        ("<<5*.2=1.0>> <<10/3=3.33>> <<2/3=.67>> <<30*.01*20=6>> <<1/2*10=5=5>>", [True] * 5),
        ("<<2+2=5>> <<10/3=3.5>> <<100+100=201>>", [False] * 3),
        ("<<x+1=2>> <<not=this>> << a << b >>", []),
        ("So 3 + 4 = 7 apples, then 3 + 4 = 8.", [True, False]),
        ("1,000 + 2,000 = 3,000. $3 + $4 = $7.50, 6 × 7 = 42", [True, False, True]),
        ("10 / 3 = 3.33 and 3 - 5 = -2", [True, True]),
    ],
)
def test_checked(text: str, expected: list[bool]) -> None:
    assert [right for _, right in found(text)] == expected


@pytest.mark.parametrize(
    "text",
    [
        "x + 3 + 4 = 9",
        "2x + 3 = 7",
        "7 + 8 = 3 (mod 12)",
        "7 + 8 = 3 mod 12",
        "2^3 + 1 = 9",
        "f(2) + 3 = 4",
        "1 + 1 == 3",
        "a = 3 + 4 = b",
        "3 + 4 = 7x",
        "2019-10=5",
        "4 + 5 = 3 * 3",
        "a1 + 2 = 5",
        "[1 + 1 = 10]2",
        "log 2 + 3 = 5",
        "20 x 20/100 = 4",
        "3 1/2 - 2 = 1 1/2",
        "$350 000 + $5 = $409 500",
        "i += 1 + 1 = 3",
        "80 - 2 = 78%",
        "15 of 3/5 = 9",
        "1 + 1 ≠ 3",
        "3,5 + 1,5 = 5",
        "0x3 + 4 = 9",
        "version 1.2.3 + 4 = 5",
    ],
)
def test_what_is_no_plain_equation_is_left_alone(text: str) -> None:
    assert [shown for shown, right in found(text) if not right and "[1 + 1" not in text] == []


def test_planted_errors_are_found_and_right_sums_pass() -> None:
    draw = random.Random(1)
    for _ in range(200):
        expression = whole_sums(draw).replace("*", " + ").replace("+", " + ").replace("-", " - ")
        expression = " ".join(expression.split())
        value = int(evaluate(expression))
        assert found(f"Thus {expression} = {value} in all.") == [(f"{expression} = {value}", True)]
        wrong = value + draw.choice([-10, -1, 1, 9])
        assert found(f"Thus {expression} = {wrong} in all.") == [(f"{expression} = {wrong}", False)]


def test_library_code_has_no_wrong_equations() -> None:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        assert [shown for shown, right in found(path.read_text("utf-8", "replace")) if not right] == [], path


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        (r"\frac{1}{2}", "0.5", True),
        ("1,234", "1234", True),
        (r"\$18", "18", True),
        (r"\text{(B)}", "(B)", True),
        ("x+1", "x + 1", True),
        ("12", "13", False),
        (r"\dfrac{3}{4}", r"\frac34", False),
        ("90^\\circ", "90", True),
        ("", "0", False),
        ("3/4", "6/8", True),
    ],
)
def test_answers(given: str, expected: str, same: bool) -> None:
    assert same_answer(given, expected) is same


def test_the_last_box_or_the_last_line_of_hashes() -> None:
    assert final_answer(r"\boxed{1} then \boxed{\frac{2}{3}}.") == r"\frac{2}{3}"
    assert final_answer("work\n#### 5\nmore\n#### 1,200 \n") == "1,200"
    assert final_answer(r"no \boxed{end") is None and final_answer("nothing") is None
    assert found(r"\boxed{4}", "4") == [("answer '4', expected '4'", True)]
    assert found(r"\boxed{4}", None) == []


def test_the_step_drops_or_counts() -> None:
    texts = ["2 + 2 = 4", "2 + 2 = 5 and <<1+1=3>>", "no sums here"]
    kept, wrong, none = outcomes_of(step_of(Math()), texts)
    assert isinstance(kept, Document) and dict(kept.facts) == {"math_checked": 1, "math_wrong": 0}
    assert isinstance(wrong, Drop) and wrong.reason == "wrong_math" and wrong.detail == "<<1+1=3>>; 2 + 2 = 5"
    assert isinstance(none, Document) and none.facts["math_checked"] == 0
    counted = outcomes_of(step_of(Math(wrong="count")), texts)[1]
    assert isinstance(counted, Document) and counted.facts["math_wrong"] == 2
    annotated = outcomes_of(step_of(Math(chains=False)), ["2 + 2 = 5"])[0]
    assert isinstance(annotated, Document)
    answer = outcomes_of(step_of(Math()), ["#### 7"], facts={"answer": 8})[0]
    assert isinstance(answer, Drop) and answer.detail == "answer '7', expected '8'"


@given(st.text(alphabet="0123456789+-*/=<>().,$% \\boxed{}#x", max_size=300))
def test_any_text_is_only_checked(text: str) -> None:
    list(checks(text, "1", True, 0.01))


@pytest.mark.parametrize("unit", ["1+", "1 + ", "<<", "<<1=", "(", "1 + 1 = ", "\\boxed{", "1,111", "#### ", "\\frac{"])
def test_hostile_text(unit: str) -> None:
    list(checks(unit * (300_000 // len(unit)), "1", True, 0.01))
