"""HumanEval: Python functions from their docstrings, judged by running unit tests (Chen et al. 2021, arXiv:2107.03374).

Programs run in the sandbox of `lmworks.untrusted` only; a machine without one cannot measure this set.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from functools import cache

from lmworks.corpus.contamination import Question
from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.generation.interface import Declared, GenerationSet, Judged, Lengths, Prompt, Reply, ask, read_rows
from lmworks.evaluate.sets.items import Row, digest
from lmworks.evaluate.sets.sources import Data, require_ids, state, where
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.untrusted.sandbox import Limits, judge_python
from lmworks.verify.marks import without_thoughts

_NAME = "humaneval"
_DATA = Data("test", "oe_eval_tasks/codex_humaneval/gold_bpb_0shot/requests.jsonl.gz", "openai/openai_humaneval")
_COLUMNS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")  # section 2.1 of the paper, and the end of a code block
_MOST_TOKENS = 512
_LONGEST = 100_000  # characters of code that are run
_LIMITS = Limits(seconds=5.0)
_KS = (1, 10, 100)
_SAMPLING = {"temperature": 0.8, "top_p": 0.95}  # for several samples, as in the paper
_REQUEST = "Complete this Python function. Reply with the whole function in one code block.\n\n```python\n{prompt}```"


@cache
def _problems(path: str | None, hub: bool, state: Hashable) -> tuple[Row, ...]:
    rows = [row for _, row in read_rows(_NAME, _DATA, _COLUMNS, path, hub)]
    require_ids(_NAME, (row["task_id"] for row in rows), where(path, hub))
    for row in rows:
        if not row["entry_point"].isidentifier() or f"def {row['entry_point']}(" not in row["prompt"]:
            what = f"the prompt of {row['task_id']} does not define its entry_point"
            raise UserError(f"evaluate.benchmarks.{_NAME}: {what}; give HumanEval's rows")
    return tuple(sorted(rows, key=lambda row: digest("sample", _NAME, row["task_id"])))


class HumanEval(GenerationSet):
    """`samples` programs per problem. The score is pass@k for every k of 1, 10 and 100 that the samples allow."""

    name = _NAME
    concurrent = True

    def __init__(self, path: str | None = None, hub: bool = False, samples: int = 1, temperature: float | None = None) -> None:
        self._path, self._hub, self.samples = path, hub, samples
        if samples > 1 and temperature == 0:
            raise UserError(f"evaluate.benchmarks.{_NAME}.temperature: at 0 all samples are the same; set `samples` to 1, or omit it")
        if samples > 1 or temperature:
            self.temperature, self.top_p = temperature or _SAMPLING["temperature"], _SAMPLING["top_p"]

    def prompts(self, count: int | None, shots: int, lengths: Lengths) -> list[Prompt]:
        if (ran := judge_python("", "", _LIMITS)).outcome != "passed":
            raise Unavailable(f"{self.name} runs the programs that a model writes, and only in a sandbox: {ran.detail}")
        return [
            Prompt(
                self.name, row["task_id"], row["prompt"], ask(_REQUEST.format(prompt=row["prompt"])), row, _MOST_TOKENS, STOP,
                answer=row["canonical_solution"], samples=self.samples,
            )
            for row in _problems(self._path, self._hub, state(self._path))[:count]
        ]  # fmt: skip

    def judge(self, prompt: Prompt, replies: Sequence[Reply]) -> list[Judged]:
        return [judge(prompt.reference, reply) for reply in replies]

    def values(self, judged: Sequence[tuple[Prompt, list[Judged]]]) -> dict[str, dict[str, float]]:
        fewest = min((len(of_item) for _, of_item in judged), default=0)
        return {
            f"pass@{k}": {prompt.id: pass_at_k(len(of_item), sum(one.correct for one in of_item), k) for prompt, of_item in judged}
            for k in _KS if k <= fewest
        }  # fmt: skip

    def questions(self) -> Iterator[Question]:
        for row in _problems(self._path, self._hub, state(self._path)):
            yield Question(f"{self.name}/{row['task_id']}", row["prompt"].strip(), row["canonical_solution"].strip())


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct, if c of n are: 1 - C(n-c, k) / C(n, k), as a product
    (equation 1 of the paper)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} correct among {n}")
    if n - c < k:
        return 1.0
    none = 1.0
    for i in range(n - c + 1, n + 1):
        none *= 1 - k / i
    return 1 - none


def judge(row: Row, reply: Reply) -> Judged:
    """Run the completed function with its unit tests.

    timeout: the program did not end in time. truncated: it fails, and the reply was cut. format: it is not Python, or there is no function
    in the reply. wrong: it fails a test.
    """
    code = program(row["prompt"], row["entry_point"], reply.text)
    if not reply.text.strip():
        return Judged.failed("truncated" if reply.truncated else "no answer")
    if code is None or len(code) > _LONGEST or "\0" in code:
        return Judged.failed("truncated" if reply.truncated else "format", None)
    entry = row["entry_point"]
    ran = judge_python(code, f"{_before(row['prompt'], entry)}\n{row['test']}\ncheck({entry})\n", _LIMITS)
    if ran.outcome == "refused":
        raise Unavailable(f"{_NAME} runs the programs that a model writes, and only in a sandbox: {ran.detail}")
    outcome, detail = ran.outcome, ran.detail
    if outcome == "passed":
        return Judged.right(code)
    if outcome == "timeout":
        return Judged.failed("timeout", code)
    if reply.truncated:
        return Judged.failed("truncated", code)
    return Judged.failed("format" if re.match(r"(Syntax|Indentation|Tab)Error\b", detail) else "wrong", code)


def _before(prompt: str, entry_point: str) -> str:
    """The text of a prompt before its function: imports, and helpers that the tests use, too."""
    start = re.search(rf"^def {re.escape(entry_point)}\(", prompt, re.MULTILINE)
    return prompt[: start.start()] if start else ""


def program(prompt: str, entry_point: str, reply: str) -> str | None:
    """The program that a reply makes of the prompt; None if there is no code in it.

    In this order: the last code block that defines the function; another code block, as the body of the function; text that defines the
    function, from its first line of code on; else the whole reply, as a continuation of the prompt. Text of the prompt before the function
    (imports, helpers) precedes a function that the reply defines itself.
    """
    said = without_thoughts(reply)
    reply = reply if said == reply.strip() else said  # the indentation of a continuation counts
    define = re.compile(rf"^def {re.escape(entry_point)}\(", re.MULTILINE)
    before = _before(prompt, entry_point)
    blocks = list(_blocks(reply))
    if whole := [block for block in blocks if define.search(block)]:
        return before + whole[-1]
    if blocks:
        body = next((block for block in blocks if block.strip()), None)
        return None if body is None else prompt + _indented(body)
    if define.search(reply):
        first = re.search(r"^(?:from |import |def |class |@)", reply, re.MULTILINE)
        assert first is not None
        return before + reply[first.start() :]
    return prompt + reply if reply.strip() else None


def _blocks(text: str) -> Iterator[str]:
    """The contents of fenced code blocks; one that is not closed reaches to the end."""
    fences = [*re.finditer(r"^[ \t]{0,8}```[^\n`]{0,40}(?:\n|$)", text, re.MULTILINE)]
    ends = [fence.start() for fence in fences] + [len(text)]
    for index in range(0, len(fences), 2):
        yield text[fences[index].end() : ends[index + 1]]


def _indented(body: str) -> str:
    """The body of a function, indented if its first line is not."""
    lines = body.strip("\n").split("\n")
    return "\n".join(lines if lines[0][:1] in (" ", "\t") else [f"    {line}" for line in lines])


def _make(one: Benchmark) -> HumanEval:
    return HumanEval(one.path, one.hub, one.samples, one.temperature)


SETS = (
    Declared(
        _NAME, "Python functions from docstrings, run against unit tests", _make, _MOST_TOKENS,
        frozenset({"path", "hub", "samples", "temperature"}),
    ),
)
