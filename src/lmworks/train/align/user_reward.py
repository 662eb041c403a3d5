"""The other side of a reward of the user's own: runs in a limited process."""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make() -> Callable[[bytes], bytes]:
    """A function from a JSON object with file, prompt, answer and row to a JSON object with the `reward`, or with the `error` that the
    user's code raised. As with a script, modules beside the file can be imported."""
    loaded: dict[str, dict[str, Any]] = {}

    def call(data: bytes) -> bytes:
        request = json.loads(data)
        file = request["file"]
        try:
            if file not in loaded:
                if (folder := str(Path(file).parent)) not in sys.path:
                    sys.path.insert(0, folder)
                loaded[file] = runpy.run_path(file)
            found: dict[str, Any] = {"reward": float(loaded[file]["reward"](request["prompt"], request["answer"], request["row"]))}
        except (Exception, SystemExit) as error:  # a function of the user may raise anything
            found = {"error": _described(error, file)}
        return json.dumps(found).encode()

    return call


def _described(error: BaseException, file: str) -> str:
    """The error, and the last line of the file that it comes from, in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, MemoryError):
        text = "the reward takes too much memory (MemoryError)"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{text} ({Path(file).name}, line {lines[-1].lineno}: {lines[-1].line})" if lines else text
