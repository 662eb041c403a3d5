"""HumanEval: what a reply makes of a prompt, programs in the sandbox, and pass@k."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from tests.evaluate.conftest import ByteTokenizer

from generation_models import HUMANEVAL, Scripted, write_rows
from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.generation import humaneval
from lmworks.evaluate.generation.humaneval import HumanEval, judge, pass_at_k, program
from lmworks.evaluate.generation.interface import Judged, Reply
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.generation.scoring import measure, score_of
from lmworks.evaluate.records import EvaluationResults
from lmworks.untrusted.sandbox import run_python
from patience import PATIENCE

ROW = HUMANEVAL[2]
PROMPT, BODY = ROW["prompt"], "    return x + 2\n"
WHOLE = f"def add_2(x):\n{BODY}"
IMPORTS = "import math\n\n\n"


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humaneval, "_LIMITS", replace(humaneval._LIMITS, seconds=PATIENCE))
    ran = run_python("pass")
    if ran.outcome == "refused":
        pytest.skip(ran.detail)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (BODY, PROMPT + BODY), (f"```python\n{WHOLE}```", IMPORTS + WHOLE),
        (f"Sure!\n```py\n{WHOLE}```\nBye.", IMPORTS + WHOLE),
        (f"```python\n{WHOLE}", IMPORTS + WHOLE), (f"```\n{BODY}```", PROMPT + BODY.rstrip()),
        ("```\nreturn x + 2\n```", PROMPT + "    return x + 2"), (f"Here:\n{WHOLE}", IMPORTS + WHOLE),
        (f"```\nother\n```\nand\n```\n{WHOLE}```", IMPORTS + WHOLE),
        (f"```\n{WHOLE}```\n```\nadd_2(1)\n```", IMPORTS + WHOLE),
        (f"import re\n{WHOLE}", f"import math\n\n\nimport re\n{WHOLE}"),
        (f"<think>def add_2(x): 1</think>\n```\n{WHOLE}```", IMPORTS + WHOLE),
        ("", None), ("  \n", None), ("```\n```", None), ("```", None),
    ],
)  # fmt: skip
def test_program(reply: str, code: str | None) -> None:
    assert program(PROMPT, "add_2", reply) == code


@pytest.mark.parametrize(
    ("reply", "truncated", "failure"),
    [
        (BODY, False, None), (BODY, True, None), (f"```python\n{WHOLE}", True, None), ("    return x + 3\n", False, "wrong"),
        ("    return x + 3\n", True, "truncated"), ("    return x +\n", False, "format"), ("    return x +", True, "truncated"),
        ("  I think\n that", False, "format"), ("", False, "no answer"), ("", True, "truncated"), ("\0", False, "format"),
        ("    return x + 2\n\0", False, "format"), ("    exit(0)\n", False, "wrong"), ("    import os; os._exit(0)\n", False, "wrong"),
        ("    raise SystemExit\n", False, "wrong"), ("    print('x' * 1000000); return 0\n", False, "wrong"),
        ("    return 1 / 0\n", False, "wrong"), ("    return add_2(x)\n", False, "wrong"), (" \ud800\n", False, "format"),
        ("    import subprocess; subprocess.run(['ls'])\n    return x + 2\n", False, "wrong"),
        ("    open('/program.py', 'w')\n    return x + 2\n", False, "wrong"), ("x" * 200_000, False, "format"),
        ("`" * 99_000, False, "format"),
        ("    return x + 2\n" + "#" * 50_000, True, None), ("(" * 3000, False, "format"),
    ],
)  # fmt: skip
def test_judgments(sandbox: None, reply: str, truncated: bool, failure: str | None) -> None:
    one = judge(ROW, Reply(reply, truncated))
    assert (one.failure, one.correct) == (failure, failure is None), one


def test_a_program_that_does_not_end_is_a_timeout(sandbox: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(humaneval, "_LIMITS", replace(humaneval._LIMITS, seconds=1))
    assert judge(ROW, Reply("    while True: pass\n", True)).failure == "timeout"


@pytest.mark.parametrize("hostile", ["```\n", "`", "```x", "\n", " ", "def add_2(", "<think>", "</think>", "import ", "```\n```\n"])
def test_hostile_replies_take_linear_time(hostile: str) -> None:
    program(PROMPT, "add_2", hostile * (1_000_000 // len(hostile)))


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample() -> None:
    for n, c in ((5, 0), (5, 1), (6, 2), (7, 7), (1, 1), (1, 0)):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(combinations(samples, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    for wrong in ((5, 6, 1), (5, 1, 6), (5, 1, 0)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(*wrong)


def test_pass_at_k_is_unbiased() -> None:
    """The mean of the estimate over many draws of 10 samples is the probability that one of 4 succeeds."""
    chance = 0.3
    draws = np.random.default_rng(0).binomial(10, chance, 20_000)
    assert np.mean([pass_at_k(10, int(c), 4) for c in draws]) == pytest.approx(1 - (1 - chance) ** 4, abs=0.01)


def test_interval_of_a_fraction_comes_from_the_problems() -> None:
    values = [pass_at_k(10, c, 1) for c in (0, 2, 5, 10, 10, 1, 0, 7)]
    score = score_of(values)
    assert score["score"] == pytest.approx(np.mean(values))
    assert 0 < score["interval"][0] < score["score"] < score["interval"][1] < 1
    half = 1.96 * np.std(values) / np.sqrt(len(values))
    assert score["interval"][1] - score["interval"][0] == pytest.approx(2 * half, rel=0.1)
    assert score_of([0.0] * 20)["interval"][1] > 0.1  # Wilson: no success in 20 proves little


def test_scores_of_several_samples(sandbox: None, tmp_path: Path, byte_tokenizer: ByteTokenizer) -> None:
    """Two problems: one is always solved, one never."""
    path = write_rows(tmp_path / "test.jsonl", HUMANEVAL[:2])
    chosen = HumanEval(path, samples=10)
    assert (chosen.temperature, chosen.top_p) == (0.8, 0.95)
    model = Scripted({f'{n + 1}\n    """\n': f"    return x + {n}\n\ndef more(): pass" if n < 1 else "    return 0\n" for n in range(4)})
    found = EvaluationResults()
    measure(chosen, Answerer(model, byte_tokenizer, chat=False), None, None, "base", found)
    assert set(found.scores) == {"humaneval/generate/0-shot/pass@1", "humaneval/generate/0-shot/pass@10"}
    score = found.scores["humaneval/generate/0-shot/pass@1"]
    assert (score["score"], score["n"], score["samples"], score["failures"]) == (0.5, 2, 10, {"wrong": 10})
    assert len(found.outcomes) == 4 and all(one["failure"] == "wrong" for one in found.outcomes if not one["correct"])
    assert len(found.items) == 2  # each problem once, though there are two scores
    prompts = chosen.prompts(None, 0, Answerer(model, byte_tokenizer, chat=False))
    half = [Judged.right()] * 5 + [Judged.failed("wrong")] * 5
    values = chosen.values([(prompts[0], half)])
    assert values == {"pass@1": {prompts[0].id: pytest.approx(0.5)}, "pass@10": {prompts[0].id: 1.0}}


def test_without_a_sandbox_the_score_is_refused(tmp_path: Path, byte_tokenizer: ByteTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_MACHINE", "sandbox=no")
    found, model = EvaluationResults(), Scripted({})
    measure(HumanEval(write_rows(tmp_path / "t.jsonl", HUMANEVAL)), Answerer(model, byte_tokenizer, chat=False), None, None, "base", found)
    assert not found.scores and not model.rows  # nothing was generated either
    why = "humaneval runs the programs that a model writes, and only in a sandbox: this machine has none"
    assert found.unavailable == {"humaneval": why}
    with pytest.raises(Unavailable, match="only in a sandbox"):
        judge(ROW, Reply(BODY))


def test_several_greedy_samples_are_refused() -> None:
    with pytest.raises(UserError, match="all samples are the same"):
        HumanEval(samples=3, temperature=0.0)
    assert HumanEval().temperature == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [({**ROW, "entry_point": "sub"}, "does not define its entry_point"), ({**ROW, "entry_point": "x); import os"}, "does not define"),
     ({"prompt": "x"}, "no text in the column 'task_id'")],
)  # fmt: skip
def test_other_rows_are_refused(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(HumanEval(write_rows(tmp_path / "t.jsonl", [row])).questions())


def test_canonical_solutions_of_the_package_pass(sandbox: None) -> None:
    """The first problems of the order in which samples take them; the tests marked slow take all 164."""
    try:
        prompts = HumanEval().prompts(3, 0, Answerer(Scripted({}), ByteTokenizer(), chat=False))
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert len(list(HumanEval().questions())) == 164
    for prompt in prompts:
        assert judge(prompt.reference, Reply(prompt.answer)).correct, prompt.id
        assert judge(prompt.reference, Reply(f"Sure:\n```python\n{prompt.reference['prompt']}{prompt.answer}\n```")).correct, prompt.id
        assert judge(prompt.reference, Reply("    pass\n")).failure == "wrong", prompt.id


@pytest.mark.slow
def test_all_canonical_solutions_of_the_package_pass(sandbox: None) -> None:
    prompts = HumanEval().prompts(None, 0, Answerer(Scripted({}), ByteTokenizer(), chat=False))
    assert [prompt.id for prompt in prompts if not judge(prompt.reference, Reply(prompt.answer)).correct] == []
