"""Markers: small files that record that a task is finished, with a hash of its inputs."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmworks.files import sha256_file, write_text
from lmworks.recipe.tree.fingerprint import canonical


def digest(value: Any) -> str:
    """Hex SHA-256 of a JSON value."""
    return hashlib.sha256(canonical(value)).hexdigest()


def is_finished(path: Path, inputs: str) -> bool:
    """Whether the marker records that the task was finished with these inputs."""
    try:
        return bool(json.loads(path.read_bytes())["inputs"] == inputs)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def mark_finished(path: Path, inputs: str) -> None:
    """Write the marker. All files of the task are on disk before this."""
    write_text(path, json.dumps({"inputs": inputs}) + "\n")


def file_digest(path: Path) -> str:
    """Hash of a file that an earlier pass writes; empty if it does not exist yet."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ""
    return _file_digest(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _file_digest(path: Path, size: int, changed: int) -> str:
    return sha256_file(path)
