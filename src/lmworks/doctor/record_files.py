"""Reads the JSON and JSONL files of a run, any of which may be missing, incomplete or damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from lmworks.doctor.run_records import Json
from lmworks.doctor.schema import conform


def lines(path: Path) -> Iterator[Json]:
    """The records of a JSONL file one by one; none if it does not exist. Invalid lines are skipped. Numbers may have any size."""
    try:
        handle = open(path, "rb")  # noqa: SIM115
    except OSError:
        return
    with handle:
        for text in handle:
            try:
                record = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record


def read_document(path: Path, form: Json = {}) -> Json:  # noqa: B006  (not modified)
    try:
        return conform(json.loads(path.read_bytes()), form) or {}
    except (OSError, ValueError, RecursionError):
        return {}


def number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def mapping(value: object) -> Json:
    return value if isinstance(value, dict) else {}
