"""A process that a test has started and that ends with it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def child_process(command: list[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command and kill what still runs at the end: `Popen` waits there, so that a failed assertion would last until the limit
    of its test."""
    with subprocess.Popen(command, encoding="utf-8", **options) as process:
        try:
            yield process
        finally:
            process.kill()
