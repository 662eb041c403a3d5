"""Rewards: plain functions of an answer. One that fails earns 0 and is counted; it never stops the run.

The right answers of prompts are read before anything is trained, by the reader that judges the replies (`lmworks.verify`).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

from lmworks.errors import UserError
from lmworks.recipe.schema.align import RewardTask
from lmworks.train.data.row_columns import NoRow
from lmworks.train.unit_tests import runnable_tests
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied
from lmworks.untrusted.sandbox import Limits, judge_python
from lmworks.verify.answers import Kind, RightAnswer, check_installed, right_answer
from lmworks.verify.marks import stated, without_thoughts

COLUMNS = ("answer", "solution")  # the first that a row has
MOST_UNREADABLE = 0.05
"""The share of unreadable right answers above which a set is refused. Sets of published tasks have none (all 1,319 of GSM8K and all 500 of
MATH-500 are read), so a larger share is a wrong column or a wrong kind of reward, not a few odd rows."""
_EXAMPLES = 3
_LONGEST_SHOWN = 60
_REMEDY = {
    "exact": "give the answer itself, or mark it in a worked solution by #### or \\boxed{}",
    "numeric": "give a number, or a worked solution that ends in #### and a number; for expressions use reward math, for words exact",
    "math": "give a number, an expression in LaTeX or a few words, or a worked solution with \\boxed{}",
}


def answer_of(row: Mapping[str, Any]) -> Any:
    """What a row gives as its right answer; None if it has none."""
    return next((row[name] for name in COLUMNS if row.get(name) is not None), None)


def right_answer_of(row: Mapping[str, Any], kind: Kind) -> RightAnswer | None:
    """The right answer of a row as it is compared; None if it cannot be read."""
    written = answer_of(row)
    return _read(written, kind) if isinstance(written, (str, int, float)) else None


@lru_cache(maxsize=65_536, typed=True)  # 1 is no True
def _read(written: str | int | float, kind: Kind) -> RightAnswer | None:
    return right_answer(written, kind)


def answer_check(task: RewardTask, key: str) -> AnswerCheck | None:
    """The check of the right answers of a set; None if its reward compares with none."""
    match task.reward:
        case "exact" | "numeric" | "math" as kind:
            return AnswerCheck(key, kind)
        case _:
            return None


@dataclass
class AnswerCheck:
    """Counts the rows of a set whose right answer cannot be read. `key` is the set's recipe key."""

    key: str
    kind: Kind
    read: int = 0
    unreadable: int = 0
    examples: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind == "math":
            check_installed(f"{self.key}.reward math")

    def readable(self, origin: str, row: Mapping[str, Any]) -> bool:
        """Whether the right answer of a row is readable."""
        self.read += 1
        if right_answer_of(row, self.kind) is not None:
            return True
        self.unreadable += 1
        if len(self.examples) < _EXAMPLES:
            text = " ".join(str(answer_of(row)).split())
            self.examples.append(f"{origin} {text[:_LONGEST_SHOWN]!r}{'...' if len(text) > _LONGEST_SHOWN else ''}")
        return False

    def finish(self) -> None:
        """Raise `UserError` if more than `MOST_UNREADABLE` of the right answers cannot be read: their prompts would earn nothing."""
        if self.unreadable > MOST_UNREADABLE * self.read:
            raise UserError(
                f"{self.key}: reward {self.kind} cannot read {self.unreadable:,} of {self.read:,} right answers, to which every reply "
                f"would be wrong ({'; '.join(self.examples)}); {_REMEDY[self.kind]}"
            )


Outcome = Literal["judged", "empty", "truncated", "unparsed", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("judged", "empty", "truncated", "unparsed", "failed")
_MEMORY = 2 << 30  # bytes of the process of the user's function
_MOST_JUDGED = 10_000  # characters that a verifier gets: some take quadratic time
_BLOCK = re.compile(
    r"^[ \t]*(?P<fence>`{3,10}|~{3,10})[ \t]*(?P<language>[^\n`]{0,40})\n(?P<code>.*?)(?:^[ \t]*(?P=fence)|\Z)", re.MULTILINE | re.DOTALL
)
_DEFINITION = re.compile(r"^(?:async def|def|class) ", re.MULTILINE)


@dataclass(frozen=True)
class Reward:
    """What an answer earned. `outcome` says why it earned nothing, other than being wrong: it is empty or cut, its form could not be read,
    or the reward itself raised an error or took too long. `detail` is the error."""

    value: float
    outcome: Outcome = "judged"
    detail: str = ""


@dataclass(frozen=True)
class Drawn:
    """An answer as it was drawn, and the row of its prompt. `truncated`: it was cut. `thinking`: the prompt has opened its thoughts."""

    text: str
    row: Any
    truncated: bool = False
    thinking: bool = False


@dataclass(frozen=True)
class Judge:
    """The reward function of a set: of an answer's text and its row. `many` judges several answers at once. `reads_thoughts`: it is shown
    the whole reply, and not only what stands after the thoughts."""

    one: Callable[[str, Any], Reward]
    many: Callable[[Sequence[str], Sequence[Any]], list[Reward]] | None = None
    reads_thoughts: bool = False

    def __call__(self, text: str, row: Any) -> Reward:
        return self.all([text], [row])[0]

    def all(self, texts: Sequence[str], rows: Sequence[Any]) -> list[Reward]:
        if self.many is not None:
            return self.many(texts, rows)
        return [self.one(text, row) for text, row in zip(texts, rows, strict=True)]


def score(judge: Judge, text: str, row: Any, truncated: bool, thinking: bool = False) -> Reward:
    """The reward of an answer. An empty one and one that was cut earn nothing, and are not shown to the function."""
    return score_all(judge, [Drawn(text, row, truncated, thinking)])[0]


def score_all(judge: Judge, drawn: Sequence[Drawn]) -> list[Reward]:
    """The rewards of several answers; a function that takes lists is called once."""
    found: dict[int, Reward] = {}
    shown: dict[int, str] = {}
    for number, one in enumerate(drawn):
        text = one.text if judge.reads_thoughts else without_thoughts(one.text, one.thinking)
        if one.truncated or not text.strip():
            found[number] = Reward(0.0, "truncated" if one.truncated else "empty")
        else:
            shown[number] = text
    if shown:
        found |= zip(shown, judge.all(list(shown.values()), [drawn[number].row for number in shown]), strict=True)
    return [_finite(found[number]) for number in range(len(drawn))]


def _finite(found: Reward) -> Reward:
    return found if math.isfinite(found.value) else Reward(0.0, "failed", f"the reward is {found.value}")


def make_judge(task: RewardTask, key: str, verifiers: dict[str, Any]) -> Judge:
    """The reward function of a task. `verifiers` are reasoning-gym's data sets by name of the generator. Raises `UserError` if it cannot
    run here."""
    match task.reward:
        case "verifier":
            return Judge(lambda text, row: _verified(verifiers[row["generator"]], text, row["entry"]))
        case "exact" | "numeric" | "math" as kind:
            return Judge(lambda text, row: _compared(text, row, kind))
        case "unit_tests":
            if (ran := judge_python("", "")).outcome != "passed":
                raise UserError(f"{key}.reward unit_tests runs programs of the model, and only in a sandbox: {ran.detail}")
            return Judge(lambda text, row: _tested(text, row, task.timeout))
        case _:
            return _own(check_file(task, key), task.timeout)


def check_file(task: RewardTask, key: str) -> Path:
    """The file of a reward of the user's own. Raises `UserError` if it cannot be read or does not define the function."""
    path = Path(task.file or "")
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise UserError(f"{key}.file: {path} cannot be read ({error.strerror})") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{key}.file: {path} is no Python ({error})") from None
    names = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    names |= {target.id for one in tree.body if isinstance(one, ast.Assign) for target in one.targets if isinstance(target, ast.Name)}
    names |= {alias.asname or alias.name for one in tree.body if isinstance(one, ast.ImportFrom) for alias in one.names}
    if "reward" not in names:
        found = ", ".join(sorted(names)) or "nothing"
        raise UserError(f"{key}.file: {path} does not define reward(prompt, answer, row); it defines {found}")
    return path.resolve()


def _compared(text: str, row: Any, kind: Kind) -> Reward:
    right = right_answer_of(row, kind)
    if right is None:
        return Reward(0.0, "failed", f"the row's right answer is not one that reward {kind} can read")
    verdict = right.judge(text)
    return Reward(float(verdict == "right"), "unparsed" if verdict == "unparsed" else "judged")


def _verified(verifier: Any, text: str, entry: Any) -> Reward:
    found = stated(text)
    if not found or len(found) > _MOST_JUDGED:
        return Reward(0.0, "unparsed")
    try:
        # a full stop may close the sentence or belong to the answer: either reading counts
        return Reward(max(float(verifier.score_answer(reading, entry)) for reading in {found, found.removesuffix(".")}))
    except Exception as error:  # verifiers raise on text that they cannot parse, and a model may write anything
        return Reward(0.0, "unparsed", f"{type(error).__name__}: {error}")


def _tested(text: str, row: Any, seconds: float) -> Reward:
    """1 if the tests of the program, which run in a process that it cannot reach, end without an exception. Tests that do so without a
    program judge none."""
    try:
        tests = runnable_tests(row)
    except NoRow as error:
        return Reward(0.0, "failed", str(error))
    code = _program(text)
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Reward(0.0, "unparsed", str(error))
    ran = judge_python(code, tests, Limits(seconds=seconds))
    if ran.outcome == "refused":
        return Reward(0.0, "failed", f"the program was not run: {ran.detail}")
    passed = ran.outcome == "passed"
    if passed and _passed_by_nothing(tests, seconds):
        return Reward(0.0, "failed", f"tests that pass without a program: {tests[:_LONGEST_SHOWN]!r}")
    return Reward(float(passed))


def _program(text: str) -> str:
    """The program of an answer in Markdown: the last block that defines something, not how it is called or what it prints. Those that say
    that they are Python go before others; without any block it is the whole answer."""
    blocks = [(found["language"].strip().lower(), dedent(found["code"])) for found in _BLOCK.finditer(text)]
    python = [code for language, code in blocks if language.split(" ")[0] in ("python", "python3", "py")]
    codes = python or [code for _, code in blocks] or [text]
    return next((code for code in reversed(codes) if _DEFINITION.search(code)), codes[-1])


@lru_cache(maxsize=65_536)
def _passed_by_nothing(tests: str, seconds: float) -> bool:
    return judge_python("", tests, Limits(seconds=seconds)).outcome == "passed"


def _own(path: Path, seconds: float) -> Judge:
    # The kernel's limit of CPU time does not depend on how busy the machine is; this one ends a function that waits.
    process = LimitedProcess("lmworks.train.user_reward:make", seconds, _MEMORY, wall_seconds=2 * seconds + 1)
    takes_lists: list[bool] = []  # known once the file has been run, with the first answers

    def many(texts: Sequence[str], rows: Sequence[Any]) -> list[Reward]:
        try:
            if not takes_lists:
                takes_lists.append(bool(_asked(process, {"file": str(path)}, 1)))
        except _Failed as error:
            return [Reward(0.0, "failed", str(error))] * len(texts)
        size = len(texts) if takes_lists[0] else 1
        found: list[Reward] = []
        for start in range(0, len(texts), size):
            some, of_rows = list(texts[start : start + size]), list(rows[start : start + size])
            try:
                values = _asked(process, {"file": str(path), "answers": some, "rows": of_rows}, len(some))
                found += [Reward(0.0, "unparsed") if value is None else Reward(value) for value in values]
            except _Failed as error:
                found += [Reward(0.0, "failed", str(error))] * len(some)
        return found

    return Judge(lambda text, row: many([text], [row])[0], many, reads_thoughts=True)


class _Failed(Exception):
    """The reward failed; the text says how."""


def _asked(process: LimitedProcess, request: dict[str, Any], answers: int) -> Any:
    """What the user's function returns, in its process; it may take the time of so many answers. Raises `_Failed`."""
    try:
        asked = json.dumps(request).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _Failed(f"the reward cannot be given the row: {error}") from None
    try:
        found = json.loads(process(asked, times=answers))
    except CallFailed as error:
        raise _Failed(str(error)) from None
    except ProcessDied as error:
        raise _Failed(f"the reward {error}") from None
    if "error" in found:
        raise _Failed(found["error"])
    return found["found"]
