from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from tests.evaluate.conftest import ByteTokenizer

from generation_models import GSM8K, Scripted, write_rows
from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.generation.gsm8k import Gsm8k, judge
from lmworks.evaluate.generation.interface import Reply
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.generation.scoring import measure
from lmworks.evaluate.records import EvaluationResults
from lmworks.verify.numbers import Stated, number


@pytest.mark.parametrize(
    ("reply", "truncated", "failure"),
    [
        ("He has 9 * 2 = 18. The answer is 18.", False, None), ("#### 18.00", False, None), ("18", False, None), ("so 18", False, None),
        ("The answer is 18. And then 19 and", True, None), ("The answer is 17.", False, "wrong"),
        ("The answer is 18. The answer is 17.", True, "wrong"),
        ("He has 9 * 2", True, "truncated"), ("so 18", True, "truncated"), ("", True, "truncated"), ("", False, "no answer"),
        ("I cannot say.", False, "no answer"), ("first 18, then 17", False, "format"), ("The answer is eighteen", False, "no answer"),
        ("<think>The answer is 18", False, "no answer"), ("<think>17</think>The answer is 18", False, None), ("\0\0\0", False, "no answer"),
        ("The answer is " + "9" * 100_000, False, "no answer"), ("```\n18", False, None), ("\ud800 18", False, None),
    ],
)  # fmt: skip
def test_judgments(reply: str, truncated: bool, failure: str | None) -> None:
    one = judge(Reply(reply, truncated), Stated("18", Fraction(18)))
    assert (one.failure, one.correct, one.mark) == (failure, failure is None, float(failure is None))


def test_eight_fixed_examples_for_both_kinds_of_models(tmp_path: Path) -> None:
    chosen = Gsm8k(write_rows(tmp_path / "test.jsonl", GSM8K))
    lengths = Answerer(Scripted({}), ByteTokenizer(), chat=False)
    prompts = chosen.prompts(None, 8, lengths)
    assert len(prompts) == len(GSM8K) and [one.id for one in chosen.prompts(3, 8, lengths)] == [one.id for one in prompts[:3]]
    text, messages = prompts[0].text, prompts[0].messages
    assert text.count("\nAnswer:") == 9 and text.count("The answer is") == 8 and text.endswith("more. How many has he?\nAnswer:")
    assert [one["role"] for one in messages] == ["user", "assistant"] * 8 + ["user"]
    assert messages[1]["content"].endswith("The answer is 6.") and messages[15]["content"].endswith("The answer is 8.")
    assert all(judge(Reply(one["content"]), number(one["content"].rstrip(".").split()[-1])).correct for one in messages[1::2])
    none = chosen.prompts(1, 0, lengths)[0]
    assert len(none.messages) == 1 and none.messages[0]["content"].endswith("The answer is NUMBER.")
    assert {one.text for one in chosen.questions()} == {row["question"] for row in GSM8K}


def test_scores_of_a_model(tmp_path: Path, byte_tokenizer: ByteTokenizer) -> None:
    """Half of the questions right; the model goes on to ask itself another, which is not read."""
    end = "more. How many has he?\nAnswer:"
    right = {f"buys {n} {end}": f" {n} + {n} = {2 * n}. The answer is {2 * n}.\n\nQuestion: 7" for n in range(2, 6)}
    found = EvaluationResults()
    chosen = Gsm8k(write_rows(tmp_path / "test.jsonl", GSM8K))
    measure(chosen, Answerer(Scripted(right), byte_tokenizer, chat=False), None, None, "base", found)
    score = found.scores["gsm8k/generate/8-shot"]
    assert (score["score"], score["correct"], score["n"], score["failures"], score["truncated"]) == (0.5, 4, 8, {"no answer": 4}, 0)
    assert score["interval"][0] < 0.5 < score["interval"][1] and score["chance"] == 0
    assert sorted(one["correct"] for one in found.outcomes) == [False] * 4 + [True] * 4
    assert all(one["tokens"] > 2000 for one in found.outcomes)  # the examples
    assert any(item["reply"] == " 3 + 3 = 6. The answer is 6." for item in found.items)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a", "answer": "5"}], "does not end with #### and a number"),
        ([{"question": "a", "reply": "#### 5"}], "no text in the column 'answer'"),
        ([{"question": "a", "answer": "#### many"}], "does not end with #### and a number"),
        ([], "has no rows"),
    ],
)
def test_other_rows_are_refused(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(Gsm8k(write_rows(tmp_path / "test.jsonl", rows)).questions())


def test_the_package_has_all_problems() -> None:
    try:
        asked = list(Gsm8k().questions())
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert len(asked) == 1319
    prompts = Gsm8k().prompts(None, 0, Answerer(Scripted({}), ByteTokenizer(), chat=False))
    assert len({one.id for one in prompts}) == 1319
    assert judge(Reply(asked[0].answer), next(one for one in prompts if f"gsm8k/{one.id}" == asked[0].name).reference).correct
