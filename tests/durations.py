"""How many seconds each slow test lasts, and each installation (`install NAME`): measured by `make slow RECORD=--record-durations`."""

from __future__ import annotations

import json
from pathlib import Path

PATH = Path(__file__).with_suffix(".json")
UNKNOWN = 30.0  # of what was never measured


def read() -> dict[str, float]:
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def write(seconds: dict[str, float]) -> None:
    PATH.write_text(json.dumps(seconds, indent=0, sort_keys=True) + "\n")
