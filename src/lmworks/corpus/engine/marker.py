"""Markers: small files that say a task is done, and from what."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lmworks.files import write_text
from lmworks.recipe.fingerprint import canonical


def digest(value: Any) -> str:
    """Hex SHA-256 of a JSON value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def finished(path: Path, inputs: str) -> bool:
    """Whether the marker says that the task was done from these inputs."""
    try:
        return bool(json.loads(path.read_bytes())["inputs"] == inputs)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def finish(path: Path, inputs: str) -> None:
    """Say so. Everything the task has written is on the disk before this."""
    write_text(path, json.dumps({"inputs": inputs}) + "\n")
