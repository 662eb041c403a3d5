"""Unit tests as rewards, in the forms in which they are published: a right program earns 1, a wrong one nothing, and tests that test
nothing are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmworks.errors import Unavailable
from lmworks.evaluate.generation.humaneval import _problems
from lmworks.init.meaning import meaning
from lmworks.recipe.schema.align import RewardTask
from lmworks.recipe.schema.tune import TuningSet
from lmworks.train.data.forms import PromptRow, convert_prompt
from lmworks.train.data.row_columns import NoRow
from lmworks.train.prompts import _rows
from lmworks.train.rewards import Judge, make_judge, right_answer_of
from lmworks.train.unit_tests import runnable_tests

RIGHT, WRONG = "def double(x):\n    return 2 * x", "def double(x):\n    return 0"
CASE = "import unittest\nclass Case(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(double(2), 4)\n"
FUNCTIONS = """
def test_case(x, y):
    assert double(x) == y

def test_zero():
    test_case(0, 0)

def test_two():
    test_case(2, 4)
"""
OF_PYTEST = """
class TestIt:
    def setup_method(self):
        self.x = 2

    def test_it(self):
        assert double(self.x) == 4
"""
SUBCLASS = CASE.replace("test_it", "look") + "class More(Case):\n    def test_more(self):\n        self.look()\n"
FORMS: dict[str, Any] = {
    "text": {"tests": "assert double(2) == 4"},
    "list": {"tests": ["assert double(0) == 0", "assert double(2) == 4"]},
    "list as JSON": {"tests": json.dumps(["assert double(2) == 4"])},
    "imports of MBPP": {"tests": ["assert double(floor(2.5)) == 4"], "test_imports": ["from math import floor"], "test_setup_code": ""},
    "check of a candidate": {"tests": "def check(candidate):\n    assert candidate(2) == 4\n", "entry_point": "double"},
    "check that is called": {"tests": "def check(f):\n    assert f(2) == 4\n\ncheck(double)"},
    "functions": {"tests": FUNCTIONS}, "a class without a base": {"tests": OF_PYTEST},
    "KodCode": {"tests": "from solution import double\n\ndef test_two():\n    assert double(2) == 4\n"},
    "the whole module": {"tests": "import solution as s\nfrom solution import *\nassert s.double(2) == 4 == double(2)"},
    "a package that is installed": {"tests": "import numpy\nassert numpy.all(double(2) == 4)"},
    "a package that it may miss": {"tests": "try:\n    import nosuch\nexcept ImportError:\n    nosuch = None\nassert double(2) == 4"},
    "cases": {"tests": CASE}, "cases with main": {"tests": f"{CASE}\nunittest.main()"},
    "cases as a script": {"tests": f"{CASE}\nif __name__ == '__main__':\n    unittest.main()"},
    "asserts of a script": {"tests": "if __name__ == '__main__':\n    assert double(2) == 4"}, "a subclass of cases": {"tests": SUBCLASS},
}  # fmt: skip


@pytest.fixture(scope="module")
def judge() -> Judge:
    from lmworks.untrusted.sandbox import run_python

    if run_python("").outcome != "passed":
        pytest.skip("no sandbox here")
    return make_judge(RewardTask.model_validate({"name": "a", "kind": "files", "reward": "unit_tests"}), "key", {})


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_program_earns_nothing_in_any_form(judge: Judge, form: str) -> None:
    assert [(one.value, one.outcome) for one in judge.all([RIGHT, WRONG], [FORMS[form]] * 2)] == [(1, "judged"), (0, "judged")]
    assert meaning({"prompt": "Double", **FORMS[form]}).about == "unit_tests"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"tests": ""}, "no tests: they execute no assert and no call"), ({"tests": []}, "no tests: they execute no assert and no call"),
        ({"tests": "x = 1"}, "no tests: they execute no assert and no call"),
        ({"tests": "['assert double(2) == 4']"}, "no tests: they execute no assert and no call"),
        ({"tests": "def helper():\n    assert double(2) == 4"}, "no tests: they execute no assert and no call"),
        ({"tests": CASE.replace("Case", "Mixin", 1).replace("unittest.TestCase", "object")}, "no tests: they execute no assert"),
        ({"tests": {"inputs": ["1\n"], "outputs": ["2\n"]}}, "no tests: tests is an object with inputs, outputs, and no Python"),
        ({"tests": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})}, "no tests: tests is an object with inputs, outputs"),
        ({"tests": [{"input": "1"}]}, "no tests: tests is neither text nor a list of texts"), ({"tests": 4}, "no tests: tests is neither"),
        ({"tests": "def check(candidate):\n    assert candidate(2) == 4"}, "no tests: they only define a check of a candidate"),
        ({"tests": "def test_it(tmp_path):\n    assert double(2) == 4"}, "no tests: test_it is only defined, and takes tmp_path"),
        ({"tests": "async def test_it():\n    assert double(2) == 4"}, "no tests: test_it is asynchronous"),
        ({"tests": "from nosuch.a import b\nfrom . import c\nassert b(2)"}, "no tests: they import ., nosuch, which is not installed here"),
        ({"tests": "assert double(2) =="}, "no tests: they are no Python"), ({"tests": "a\0"}, "no tests: they are no Python"),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_whose_tests_test_nothing_is_refused_by_name(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoRow) as error:
        runnable_tests(row)
    assert str(error.value).startswith(reason)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"prompt": "Double", **one}) + "\n" for one in (row, FORMS["text"])))
    data = RewardTask.model_validate({"name": "a", "kind": "files", "reward": "unit_tests", "path": str(tmp_path / "a.jsonl")})
    bad, good = _rows(data, None, {}, None)  # type: ignore[arg-type]
    assert isinstance(bad, tuple) and bad[1].startswith(reason) and isinstance(good, PromptRow)
    assert meaning({"prompt": "Double", **row}).about != "unit_tests"


@pytest.mark.parametrize("row", [
    {"text": "", "prompt": "Double", "code": RIGHT, "test_list": ["assert double(2) == 4"]},
    {"question": "Double", "solution": RIGHT, "test": "from solution import double\ndef test_a():\n    assert double(2) == 4"},
], ids=["MBPP", "KodCode"])  # fmt: skip
def test_published_columns_of_tests_are_read(row: dict[str, Any]) -> None:
    assert "double(2) == 4" in runnable_tests(convert_prompt(row, "here:1").row)
    assert meaning(row).about == "unit_tests"
    named = convert_prompt(row | {"mine": "assert 1"}, "here:1", TuningSet.model_validate({"name": "a", "columns": {"tests": "mine"}}))
    assert named.row["tests"] == "assert 1"


@pytest.mark.parametrize("count", [3, pytest.param(None, marks=pytest.mark.slow)])
def test_rows_of_humaneval_are_rewards_as_they_are_published(judge: Judge, count: int | None) -> None:
    """Their columns are prompt, canonical_solution, test and entry_point."""
    try:
        rows = _problems(None, False, None)
    except Unavailable as reason:
        pytest.skip(str(reason))
    for row in rows[:count]:
        found, head = convert_prompt(row, row["task_id"]).row, row["prompt"]
        assert meaning(row).about == "unit_tests"
        answers = [f"```python\n{head}{body}\n```" for body in (row["canonical_solution"], "    pass")]
        assert [one.value for one in judge.all(answers, [found] * 2)] == [1, 0], row["task_id"]


@pytest.mark.parametrize(
    "reply",
    [
        "```python\n{}```\nRun it:\n```bash\npython double.py\n```", "```python\n{}```\nIt prints:\n```\n4\n```",
        "```python\n{}```\nExample:\n```python\nprint(double(2) / 0)\n```", "~~~py\n{}~~~", "````python\n{}````",
        "```python\n{}```\nIn another language:\n```js\nclass Double {{}}\n```",
        "1. The program:\n   ```python\n   {}   ```", "```\ndef double(x): return 0\n```\nBetter:\n```\n{}```",
    ],
)  # fmt: skip
def test_the_program_of_an_answer_is_its_last_definition(judge: Judge, reply: str) -> None:
    said = [reply.format(f"{one.replace(chr(10), chr(10) + '   ') if reply[0] == '1' else one}\n") for one in (RIGHT, WRONG)]
    assert [one.value for one in judge.all(said, [{"tests": "assert double(2) == 4"}] * 2)] == [1, 0]


def test_a_program_that_is_not_run_is_not_wrong(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_MACHINE", "sandbox=no")
    found = judge(RIGHT, {"tests": "assert double(2) == 4"})
    assert (found.outcome, found.detail) == ("failed", "the program was not run: this machine has none")


def test_tests_that_pass_without_a_program_earn_nothing_and_are_a_failure(judge: Judge) -> None:
    """Such as those whose failures a runner only reports."""
    for tests in ("print(2)", "try:\n    assert double(2) == 4\nexcept Exception:\n    pass"):
        found = judge(WRONG, {"tests": tests})
        assert (found.value, found.outcome) == (0, "failed") and "tests that pass without a program" in found.detail
    assert judge(WRONG, {"tests": []}).outcome == "failed"


def test_a_right_answer_of_one_is_no_truth() -> None:
    assert right_answer_of({"answer": True}, "numeric") is None
    assert right_answer_of({"answer": 1}, "numeric") is not None
