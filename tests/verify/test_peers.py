"""Verdicts beside those of lm-evaluation-harness's filters for GSM8K and of math-verify, on replies of the kinds that models write."""

from __future__ import annotations

import re

import pytest

from lmworks.verify.answers import right_answer

math_verify = pytest.importorskip("math_verify")

_STRICT, _FLEXIBLE = r"#### (\-?[0-9\.\,]+)", r"(-?[$0-9.,]{2,})|(-?[0-9]+)"  # lm_eval/tasks/gsm8k/gsm8k.yaml: first, and last match


def harness(reply: str, right: str) -> bool:
    """Whether lm-evaluation-harness counts a reply by either of its filters, with the normalization of its `exact_match`."""

    def plain(text: str) -> str:
        return re.sub(r"\.$", "", text.replace(",", "").replace("$", ""))

    strict = re.search(_STRICT, reply)
    flexible = [next(filter(None, found)) for found in re.findall(_FLEXIBLE, reply)]
    return right in {plain(found) for found in ([strict[1]] if strict else []) + flexible[-1:]}


def by_math_verify(reply: str, right: str) -> bool:
    return bool(math_verify.verify(math_verify.parse(f"${right}$"), math_verify.parse(reply)))


AGREED = [
    ("She makes 9 * 2 = $18 every day.\n#### 18", "18"), ("The answer is 18.", "18"), ("So the total is $1,234.", "1234"),
    ("**Answer:** 18", "18"), ("It is \\boxed{18}", "18"), ("#### 17", "18"), ("18 eggs, 3 of them broken, so 15", "15"),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "right"), AGREED)
def test_where_peers_agree_so_do_we(reply: str, right: str) -> None:
    gold = right_answer(right, "numeric")
    assert gold is not None
    verdict = gold.judge(reply) == "right"
    assert verdict == harness(reply, right) == by_math_verify(reply, right)


@pytest.mark.parametrize(
    ("reply", "right", "counts", "why"),
    [
        ("The answer is 18. That is 3 more than 15.", "18", True, "the harness takes the last number"),
        ("<think>\\boxed{18}</think>It is 17.", "18", False, "math-verify takes the box of the thoughts"),
        ("\\boxed{18.00}", "18", True, "the harness compares text"), ("So it costs 1.5e3 dollars", "1500", True, "neither reads it"),
        ("\\boxed{1\\frac{1}{2}}", "3/2", True, "the harness reads 2"), ("It takes 1 1/2 hours", "3/2", True, "both read a part"),
        ("The answer is 3 * 4", "4", False, "the harness takes the last number"),
    ],
)
def test_where_they_differ_it_is_for_a_reason(reply: str, right: str, counts: bool, why: str) -> None:
    gold = right_answer(right, "numeric")
    assert gold is not None and (gold.judge(reply) == "right") == counts
    assert counts not in (harness(reply, right), by_math_verify(reply, right)) or counts != harness(reply, right) or (
        counts != by_math_verify(reply, right)
    ), why


@pytest.mark.parametrize(
    ("given", "right", "same"),
    [
        ("\\frac{3}{4}", "0.75", True), ("3\\sqrt{2}", "\\sqrt{18}", True), ("3\\sqrt{2}", "3", False), ("(1,2]", "[1,2)", False),
        ("x^2+2x+1", "(x+1)^2", True), ("\\{1,2\\}", "\\{2,1\\}", True), ("x=5", "5", True), ("50\\%", "0.5", True),
        ("1/3", "0.333333", True),
        ("1/3", "0.33", False), ("(2,1)", "(1,2)", False), ("\\text{even}", "even", True),
        ("1\\pm\\sqrt{19}", "1+\\sqrt{19},1-\\sqrt{19}", True),
    ],
)  # fmt: skip
def test_expressions_are_equal_where_math_verify_finds_them_so(given: str, right: str, same: bool) -> None:
    gold = right_answer(right, "math")
    assert gold is not None
    assert (gold.judge(f"\\boxed{{{given}}}") == "right") == by_math_verify(f"$\\boxed{{{given}}}$", right) == same
