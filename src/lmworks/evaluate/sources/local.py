"""Rows of benchmark sets in local files: JSON lines (plain or compressed), Parquet or Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from glob import glob
from pathlib import Path
from typing import Any

from lmworks.corpus.readers.opening import bounded_lines, open_binary
from lmworks.errors import UserError
from lmworks.evaluate.items import Row

_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (*(kind + packed for kind in _LINES for packed in _COMPRESSED), ".parquet", ".arrow")
_LONGEST = 1 << 24  # bytes of a line


def files(path: str, split: str | None = None) -> list[Path]:
    """The data files at a file, directory or glob, sorted. Of a directory, those whose names begin with `split`, if any do.

    Raises `UserError` if there are none.
    """
    place = Path(path).expanduser()
    found = place.rglob("*") if place.is_dir() else map(Path, glob(str(place), recursive=True))
    data = sorted(one for one in found if one.is_file() and one.name.endswith(SUFFIXES))
    if not data:
        raise UserError(f"{path} has no data files; give a file, directory or glob of {', '.join((*_LINES, '.parquet', '.arrow'))}")
    return [one for one in data if split and one.name.startswith(split)] or data


def has_split(path: str, split: str) -> bool:
    """Whether `path` is a directory with files of that split."""
    return Path(path).expanduser().is_dir() and any(one.name.startswith(split) for one in files(path))


def rows(path: str, split: str | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of the files, numbered through. Raises `UserError` that names a file that cannot be read."""
    number = 0
    for file in files(path, split):
        try:
            for row in _rows(file):
                if not isinstance(row, dict):
                    raise ValueError(f"row {number} is no JSON object")
                yield str(number), row
                number += 1
        except (OSError, EOFError, ValueError, RecursionError) as error:  # Arrow's errors are ValueErrors or OSErrors
            raise UserError(f"{file} cannot be read: {' '.join(str(error).split())[:300]}") from None


def _rows(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(1024):
                yield from batch.to_pylist()
    elif file.suffix == ".arrow":
        yield from _arrow(file)
    else:
        with open_binary(str(file)) as (stream, _):
            for line, whole in bounded_lines(stream, _LONGEST):
                if not whole:
                    raise ValueError(f"a line is longer than {_LONGEST:,} bytes")
                if line.strip():
                    yield json.loads(line)


def _arrow(file: Path) -> Iterator[Any]:
    """A stream, as `datasets` writes it, or an Arrow file."""
    import pyarrow as pa

    with ExitStack() as stack:
        source = stack.enter_context(pa.memory_map(str(file)))
        try:
            reader = stack.enter_context(pa.ipc.open_stream(source))
            batches = iter(reader)
        except pa.ArrowInvalid:
            source.seek(0)
            opened = stack.enter_context(pa.ipc.open_file(source))
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()
