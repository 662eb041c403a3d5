"""The other side of a reward of the user's own: runs in a limited process."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from typing import Any


def make() -> Callable[[bytes], bytes]:
    """A function from a JSON object with file, prompt, answer and row to the reward as JSON. It raises what the user's code raises."""
    loaded: dict[str, dict[str, Any]] = {}

    def call(data: bytes) -> bytes:
        request = json.loads(data)
        file = request["file"]
        if file not in loaded:
            loaded[file] = runpy.run_path(file)
        return json.dumps(float(loaded[file]["reward"](request["prompt"], request["answer"], request["row"]))).encode()

    return call
