"""The other side of a reward of the user's own: runs in a limited process."""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any


def make() -> Callable[[bytes], bytes]:
    """A function from a JSON object with `file`, and `answers` and `rows`, to a JSON object with what was `found`, or with the `error` that
    the user's code raised. Without answers, whether the function takes lists is found; with them, the reward of each, None for no reward.
    As with a script, modules beside the file can be imported."""
    loaded: dict[str, Callable[..., Any]] = {}

    def call(data: bytes) -> bytes:
        request = json.loads(data)
        file = request["file"]
        try:
            if file not in loaded:
                if (folder := str(Path(file).parent)) not in sys.path:
                    sys.path.insert(0, folder)
                loaded[file] = runpy.run_path(file)["reward"]
            function = loaded[file]
            if "answers" not in request:
                found: dict[str, Any] = {"found": _takes_lists(function)}
            elif _takes_lists(function):
                found = {"found": _of_lists(function, request["answers"], request["rows"])}
            else:
                pairs = zip(request["answers"], request["rows"], strict=True)
                found = {"found": [float(function(row["prompt"], answer, row)) for answer, row in pairs]}
        except (Exception, SystemExit) as error:  # a function of the user may raise anything
            found = {"error": _described(error, file)}
        return json.dumps(found).encode()

    return call


def _takes_lists(function: Callable[..., Any]) -> bool:
    """Whether the function has the form of TRL, reward(prompts, completions, **columns), and not reward(prompt, answer, row)."""
    return "completions" in signature(function).parameters


def _of_lists(function: Callable[..., Any], answers: list[str], rows: list[dict[str, Any]]) -> list[float | None]:
    """Call a function as TRL does: completions are texts where prompts are, else lists of one message; all columns are lists."""
    taken = signature(function).parameters
    completions = [
        answer if isinstance(row["prompt"], str) else [{"role": "assistant", "content": answer}]
        for answer, row in zip(answers, rows, strict=True)
    ]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row) if name != "prompt"}
    given = {**columns, "prompts": [row["prompt"] for row in rows], "completions": completions}
    if not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        given = {name: value for name, value in given.items() if name in taken}
    found = list(function(**given))
    if len(found) != len(answers):
        raise ValueError(f"the reward returns {len(found)} values for {len(answers)} answers")
    return [None if value is None else float(value) for value in found]


def _described(error: BaseException, file: str) -> str:
    """The error, and the last line of the file that it comes from, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, MemoryError):
        text = "the reward takes too much memory (MemoryError)"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{text} ({Path(file).name}, line {lines[-1].lineno}: {lines[-1].line})" if lines else text
