"""Rewards: plain functions of an answer. One that fails earns 0 and is counted; it never stops the run."""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lmworks.errors import UserError
from lmworks.recipe.schema.grpo import RewardTask
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied
from lmworks.untrusted.sandbox import Limits, run_python
from lmworks.verify.extraction import extract
from lmworks.verify.numbers import final_number, number

Outcome = Literal["judged", "empty", "truncated", "unparsed", "failed"]
OUTCOMES: tuple[Outcome, ...] = ("judged", "empty", "truncated", "unparsed", "failed")
_MEMORY = 2 << 30  # bytes of the process of the user's function
_MOST_JUDGED = 10_000  # characters that a verifier gets: some take quadratic time
_BLOCK = re.compile(r"^```[^\n`]{0,40}\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Reward:
    """What an answer earned. `outcome` says why it earned nothing, other than being wrong: it is empty or cut, its form could not be read,
    or the reward itself raised an error or took too long. `detail` is the error."""

    value: float
    outcome: Outcome = "judged"
    detail: str = ""


Judge = Callable[[str, Any], Reward]  # of an answer's text and the row of its prompt


def score(judge: Judge, text: str, row: Any, truncated: bool) -> Reward:
    """The reward of an answer. An empty one and one that was cut earn nothing, and are not shown to the function."""
    if truncated:
        return Reward(0.0, "truncated")
    if not text.strip():
        return Reward(0.0, "empty")
    found = judge(text, row)
    return found if math.isfinite(found.value) else Reward(0.0, "failed", f"the reward is {found.value}")


def make_judge(task: RewardTask, key: str, verifiers: dict[str, Any]) -> Judge:
    """The reward function of a task. `verifiers` are reasoning-gym's data sets by name of the generator. Raises `UserError` if it cannot
    run here."""
    match task.reward:
        case "verifier":
            return lambda text, row: _verified(verifiers[row["generator"]], text, row["entry"])
        case "exact":
            return lambda text, row: Reward(float(extract(text) == str(row["answer"]).strip()))
        case "numeric":
            return _numeric
        case "unit_tests":
            if (ran := run_python("")).outcome != "passed":
                raise UserError(f"{key}.reward unit_tests runs programs of the model, and only in a sandbox: {ran.detail}")
            return lambda text, row: _tested(text, str(row["tests"]), task.seconds)
        case _:
            return _own(check_file(task, key), task.seconds)


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


def _verified(verifier: Any, text: str, entry: Any) -> Reward:
    stated = extract(text)
    if not stated or len(stated) > _MOST_JUDGED:
        return Reward(0.0, "unparsed")
    try:
        # a full stop may close the sentence or belong to the answer: either reading counts
        return Reward(max(float(verifier.score_answer(reading, entry)) for reading in {stated, stated.removesuffix(".")}))
    except Exception as error:  # verifiers raise on text that they cannot parse, and a model may write anything
        return Reward(0.0, "unparsed", f"{type(error).__name__}: {error}")


def _numeric(text: str, row: Any) -> Reward:
    found = final_number(text)
    return Reward(0.0, "unparsed") if found is None else Reward(float(found.value == number(str(row["answer"]))))


def _tested(text: str, tests: str, seconds: float) -> Reward:
    """A program passes if it reaches its last line, which prints a secret: one that ends itself before has passed no test."""
    blocks = _BLOCK.findall(text)
    code = blocks[-1] if blocks else text
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Reward(0.0, "unparsed", str(error))
    secret = secrets.token_hex(16)
    ending = f"import os as _os; _os.write(1, b'\\n{secret}\\n'); _os._exit(1)\n"
    ran = run_python(f"{code}\n{tests}\n{ending}", Limits(seconds=seconds))
    return Reward(float(ran.detail == secret))


def _own(path: Path, seconds: float) -> Judge:
    # The kernel's limit of CPU time does not depend on how busy the machine is; this one ends a function that waits.
    process = LimitedProcess("lmworks.train.align.user_reward:make", seconds, _MEMORY, wall_seconds=2 * seconds + 1)

    def judge(text: str, row: Any) -> Reward:
        request = {"file": str(path), "prompt": row["prompt"], "answer": text, "row": row}
        try:
            found = json.loads(process(json.dumps(request).encode()))
            return Reward(found["reward"]) if "reward" in found else Reward(0.0, "failed", found["error"])
        except CallFailed as error:
            return Reward(0.0, "failed", str(error))
        except ProcessDied as error:
            return Reward(0.0, "failed", f"the reward {error}")

    return judge
