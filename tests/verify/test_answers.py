"""The one reader of answers: thoughts, marks, and the three kinds of comparison."""

from __future__ import annotations

import time

import pytest

from lmworks.verify import answers
from lmworks.verify.answers import right_answer
from lmworks.verify.marks import stated, without_thoughts
from lmworks.verify.numbers import final_number, number


@pytest.mark.parametrize(
    ("reply", "rest"),
    [
        ("<think>The answer is 5.</think>\nIt is 6.", "It is 6."), ("The answer is 5.</think>It is 6.", "It is 6."),
        ("<think>\\boxed{5}", ""), ("a<think>b</think>c<think>d</think>e", "ace"), ("<think>a<think>b</think>c</think>d", "d"),
        ("[THINK]5[/THINK]6", "6"), ("<reasoning>5</reasoning><answer>6</answer>", "<answer>6</answer>"), ("◁think▷5◁/think▷6", "6"),
        ("<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>6", "6"), ("5 < 6 > 4", "5 < 6 > 4"),
        ("<|channel|>analysis<|message|>The answer is 5<|end|>", ""), ("<|channel|>commentary to=functions.f json<|message|>{}", ""),
        (" to=a<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>6<|end|>7", "6"),
        ("<|begin_of_thought|>5<|end_of_thought|>6", "6"), ("<Thinking>5</Thinking>6", "6"),
    ],
)  # fmt: skip
def test_what_stands_in_the_thoughts_is_left_out(reply: str, rest: str) -> None:
    assert without_thoughts(reply) == rest


def test_a_reply_may_begin_in_thoughts_that_its_prompt_has_opened() -> None:
    assert without_thoughts("The answer is 5", thinking=True) == ""
    for again in ("", "<think>\n", "\n<think>"):  # as R1 may write it
        assert without_thoughts(f"{again}It may be 5.</think>6", thinking=True) == "6"
    five = right_answer("5", "numeric")
    assert five is not None
    assert five.judge("The answer is 5", thinking=True) == "unparsed" and five.judge("The answer is 5") == "right"


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("\\boxed{\\frac{3}{4}}", "\\frac{3}{4}"), ("\\boxed{" + "{" * 50 + "x" + "}" * 50 + "}", "{" * 50 + "x" + "}" * 50),
        ("\\boxed{3} then \\boxed{\\sqrt{4}}", "\\sqrt{4}"), ("\\boxed{\\boxed{5}}", "5"), ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{5}. The answer is odd.", "5"), ("\\boxed{4} or \\boxed{5", "4"), ("\\fbox{7}", "7"), ("$\\boxed 9$", "9"),
        ("The answer is \\boxed{5}.", "5"), ("<answer>The answer is \\boxed{5}</answer>", "5"), ("<answer>4</answer><answer>5", "5"),
        ("#### Step 1\nSo it is.\nThe answer is 5", "5"), ("#### 5 apples\nas said", "5 apples"), ("a\n#### Paris", "Paris"),
        ("The answer to the question is 5.", "5."), ("The answer is:\n\n5", "5"), ("Answer:\n\\[\nx^2\n\\]", "x^2"),
        ("The final answer is $x^2$. I hope it is correct.", "$x^2$"), ("答案是 5", "5"), ("**Answer:** Paris", "Paris"),
        ("The answer is _42_", "42"), ("The answer is __42__.", "42."), ("__Answer:__ _Paris_", "Paris"), ("<answer>_42_</answer>", "42"),
        ("_The answer is 42_", "42"), ("It is _42_", "It is 42"), ("The answer is x_1", "x_1"), ("\\boxed{$_{5}C_{2}$}", "$_{5}C_{2}$"),
        ("\\boxed{$_5C_2$}", "$_5C_2$"), ("\\boxed{$_5C_{2}$}", "$_5C_{2}$"),
        ("\\boxed{x _1 + y _2}", "x _1 + y _2"), ("The answer is a_1 + a_2", "a_1 + a_2"), ("The answer is snake_case_", "snake_case_"),
    ],
)  # fmt: skip
def test_what_is_stated(reply: str, answer: str) -> None:
    assert stated(reply) == answer


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("\\boxed{\\frac{3}{4}}", "3/4"), ("The answer is 1 1/2 cups.", "3/2"), ("The answer is 1.5e3", "1500"),
        ("\\boxed{1\\frac{1}{2}}", "3/2"),
        ("1½", "3/2"), ("The answer is 2 and 1/4", "9/4"), ("\\boxed{1.5 \\times 10^{3}}", "1500"),
        ("The answer is $1.5 million", "1500000"),
        ("\\boxed{90^\\circ}", "90"), ("\\boxed{\\dfrac34}", "3/4"), ("\\boxed{x = 5}", "5"), ("The answer is 3 * 4 = 12.", "12"),
        ("The answer is not 3, it is 4.", "4"), ("The answer is 4. The answer is *not* 3.", "4"),
        ("\\boxed{10,\\!080}", "10080"), ("The answer is 1 000 000", "1000000"), ("\\boxed{-\\frac{1}{2}}", "-1/2"),
        ("12,34,567", "1234567"),
        ("The answer is 5 - or so", "5"), ("The answer is 5!", "5"), ("The answer is minus 5", "-5"), ("The answer is 2 dozen", "24"),
        ("\\boxed{5\\text{ cm}^2}", "5"), ("The answer is 4 (four)", "4"), ("\\boxed{ - 3 }", "-3"),
        ("The answer is _42_", "42"), ("The answer is __42__ dollars.", "42"), ("So it is _42_.", "42"),
        ("The answer is 2/3 of 12 = 8", "8"), ("10% of 50 = 5", "5"), ("The answer is 20% off $50 = $40.", "40"),
        ("The answer is 3 out of 12 = 1/4", "1/4"), ("The answer is 2/3 of 12", "2/3"), ("The answer is 2 of 5 apples", "2"),
        ("The answer is 2.5 + 3.5 = 6", "6"), ("The answer is 12. Then 3 + 4 = 7", "12"), ("The answer is 12. 3 + 4 = 7", "12"),
        ("The answer is 5 km = 5000 m", "5"), ("The answer is x = 5", "5"),
    ],
)  # fmt: skip
def test_numbers_in_the_forms_in_which_they_are_written(reply: str, value: str) -> None:
    from fractions import Fraction

    found = final_number(reply)
    assert found is not None and found.value == Fraction(value)


@pytest.mark.parametrize(
    "answer",
    ["3\\sqrt{2}", "2^{10}", "5!", "2x", "2\\pi", "3 * 4", "3\\cdot 4", "3:2", "3, 4", "3 and 4", "5 to 10", "5 feet 6 inches", "52_8",
        "\\sqrt{2}",
     "\\frac{\\pi}{2}", "(3, 4)", "5²", "3i", "4(x+1)", "12 - 5", "3/4/5", "5 \\pm 1", "|3|", "1,2"],
)  # fmt: skip
def test_a_part_of_an_expression_is_not_its_value(answer: str) -> None:
    assert final_number(f"It is not 7. So $\\boxed{{{answer}}}$") is None
    assert number(answer) is None
    assert final_number(f"It is not 7. The answer is {answer.removesuffix('!')}.") is None or answer == "5!"


COLUMN, MATRIX = r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"


@pytest.mark.parametrize(
    ("kind", "right", "reply", "verdict"),
    [
        ("exact", "Paris", "Paris.", "right"), ("exact", "paris", "The answer is \"Paris\"!", "right"),
        ("exact", "Paris", "**Paris**", "right"),
        ("exact", "Paris", "The answer is Paris. It lies on the Seine.", "right"), ("exact", "Paris", "Paris, France", "wrong"),
        ("exact", "72", "He has 72.\n#### 72", "right"), ("exact", "Paris", "<think>Paris</think>London", "wrong"),
        ("numeric", "72", "7 apples, no, 72 apples", "right"), ("numeric", "7 apples", "The answer is 7.", "right"),
        ("numeric", "0.5", "50%", "right"), ("numeric", "50", "50%", "right"), ("numeric", "50%", "0.5", "right"),
        ("numeric", "0.5", "50", "wrong"), ("numeric", "1/3", "0.333333", "right"), ("numeric", "1/3", "0.33", "wrong"),
        ("numeric", "3", "\\boxed{3\\sqrt{2}}", "unparsed"), ("numeric", "3", "none", "unparsed"), ("numeric", "1,234", "1234.0", "right"),
        ("math", "3", "\\boxed{3\\sqrt{2}}", "wrong"), ("math", "\\sqrt{18}", "\\boxed{3\\sqrt{2}}", "right"),
        ("math", "(x+1)^2", "The answer is $x^2+2x+1$.", "right"), ("math", "3\\pi", "Therefore \\(z = 3\\pi\\)", "right"),
        ("math", "9", "\\boxed{9**9}", "wrong"), ("math", "387420489", "\\boxed{9**9}", "right"),
        ("math", "\\{1,2\\}", "\\boxed{\\{2, 1\\}}", "right"),
        ("math", "[1,2)", "\\boxed{(1,2]}", "wrong"), ("math", "\\text{Evelyn}", "evelyn", "right"),
        ("math", "listen", "\\boxed{silent}", "wrong"),
        ("math", "C", "(C)", "right"), ("math", "2516_8", "\\boxed{2516_{8}}", "right"), ("math", "2516_8", "\\boxed{2516_9}", "wrong"),
        ("math", "x^{10}", "\\boxed{x^10}", "right"), ("math", "5", "\\boxed{x=5}", "right"),
        ("math", "1\\pm\\sqrt{2}", "\\boxed{1-\\sqrt{2}, 1+\\sqrt{2}}", "right"),
        ("math", "2\\sqrt{3}", "\\boxed{2*sqrt(3)}", "right"), ("math", "5", "\\boxed{5 and 7}", "wrong"),
        ("math", "5", "<think>\\boxed{5}</think>", "unparsed"),
        ("math", COLUMN, r"\boxed{\begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \end{pmatrix}}", "right"),
        ("math", COLUMN, r"\boxed{\begin{pmatrix} -\frac{1}{3} \\ \frac{1}{3} \end{pmatrix}}", "wrong"),
        ("math", COLUMN, r"\boxed{\begin{pmatrix} -1/3 & 2/3 \end{pmatrix}}", "wrong"),
        ("math", MATRIX, "\\boxed{\\begin{bmatrix}\n 1 & 2 \\\\\n 3 & 4 \n\\end{bmatrix}}", "right"),
        ("math", MATRIX, r"The answer is $\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$.", "right"),
        ("math", MATRIX, r"\boxed{\left[\begin{array}{c|c} 1 & 2 \\ 3 & 4 \end{array}\right]}", "right"),
        ("math", MATRIX, r"\boxed{\left(\begin{smallmatrix} 1 & 2 \\ 3 & 4 \end{smallmatrix}\right)}", "right"),
        ("math", MATRIX, r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}}", "wrong"),
        ("math", MATRIX, r"\boxed{\begin{pmatrix} 12 \\ 34 \end{pmatrix}}", "wrong"),
        ("math", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1\2 \end{pmatrix}}", "wrong"),
        ("math", r"\begin{pmatrix} a \\ b \end{pmatrix}", r"\boxed{\begin{pmatrix} b \\ a \end{pmatrix}}", "wrong"),
        ("math", r"\begin{pmatrix} a & \cdots \end{pmatrix}", r"\boxed{\begin{pmatrix}a&\cdots\end{pmatrix}}", "right"),
        ("math", r"\begin{cases} 1 & x > 0 \\ 2 & x < 0\end{cases}", r"\boxed{\begin{cases}1&x>0\\2&x<0\end{cases}}", "right"),
        ("math", r"\frac{\pi}{4}", "\\boxed{arctan(1)}", "right"), ("math", r"\arcsin(x)", "\\boxed{arcsin(x)}", "right"),
        ("math", r"\arcsin(x)", "\\boxed{arccos(x)}", "wrong"), ("math", r"\sinh x", "\\boxed{sinh(x)}", "right"),
        ("math", "arctan(2)", r"\boxed{\operatorname{arctan} 2}", "right"), ("math", "8", "The answer is 2/3 of 12 = 8", "right"),
    ],
)  # fmt: skip
def test_verdicts(kind: str, right: str, reply: str, verdict: str) -> None:
    gold = right_answer(right, kind)  # type: ignore[arg-type]
    assert gold is not None and gold.judge(reply) == verdict


@pytest.mark.parametrize(
    ("given", "right", "same"),
    [(r"x \rightarrow y", "x arrow y", False), (r"\leftarrow", "arrow", False), (r"\left( 1, 2 \right)", "(1,2)", True)],
)
def test_only_sizes_of_brackets_are_left_out(given: str, right: str, same: bool) -> None:
    assert answers.same_expression(given, right) == same


@pytest.mark.parametrize(
    ("kind", "written", "text"),
    [
        ("numeric", "She sells 16 - 7 = 9 eggs.\nSo she makes 9 * 8 = 72.\n#### 72", "72"), ("numeric", 72, "72"), ("numeric", 1.5, "1.5"),
        ("numeric", "We see $x$. Thus $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("math", "We see that $\\boxed{3\\sqrt{2}}.$", "3\\sqrt{2}"),
        ("exact", "It is in France.\n#### Paris", "Paris"), ("math", "Evelyn", "Evelyn"),
        ("math", "We get $\\boxed{11,\\! 111}$.", "11,\\! 111"),
        ("numeric", "She sells 9 eggs for 8 each, which makes 72 in all", None), ("numeric", "Paris", None), ("numeric", "", None),
        ("numeric", "3\\sqrt{2}", None), ("exact", "First this.\nThen that.", None), ("math", "First 3.\nThen 4.", None),
        ("numeric", True, None),
        ("math", {"a": 1}, None), ("exact", "word " * 100, None),
    ],
)  # fmt: skip
def test_right_answers_are_read_as_replies_are(kind: str, written: object, text: str | None) -> None:
    found = right_answer(written, kind)  # type: ignore[arg-type]
    assert (found.text if found else None) == text


@pytest.mark.parametrize("hostile", ["9^{9^{9^{9}}}", "(" * 400 + "1" + ")" * 400, "\\frac{1}" * 100])
def test_hostile_expressions_are_wrong_within_the_limits(hostile: str) -> None:
    began = time.monotonic()
    gold = right_answer("\\sqrt{2}", "math")
    assert gold is not None and gold.judge(f"\\boxed{{{hostile}}}") in ("wrong", "unparsed")
    assert time.monotonic() - began < 30 * answers.SECONDS + 30
    assert gold.judge("\\boxed{2/\\sqrt{2}}") == "right", "the next one is judged"


@pytest.mark.parametrize("hostile", ["\\boxed{", "{", "}", "<answer>", "<think>", "</think>", "#### a\n", "$", "answer to ", "\\frac",
        "1 ", "1,", "√", "_", "_a", "_a ", " _" + "a" * 198, "10% of ", "answer is 1 of ", "\\begin{pmatrix} 1 \\\\ "])
def test_hostile_replies_take_linear_time(hostile: str) -> None:
    """Of quadratic time these would take a minute."""
    began = time.process_time()
    long = hostile * (250_000 // len(hostile))
    stated(long)
    final_number(long)
    stated(long[:99_000] + "x")
    right_answer(long, "exact")
    assert time.process_time() - began < 10


@pytest.mark.parametrize("reply", [r"so we get 3\sqrt{2}", r"so we get 9\pi", "so we get 2^{10}", "so we get √5", "so we get 4x"])
def test_the_last_number_of_a_reply_is_no_part_of_a_formula(reply: str) -> None:
    assert final_number(reply) is None
    assert final_number("so we get 12") is not None
