"""Parquet files, cut into parts by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmworks.corpus.read.listing import File, find_files
from lmworks.corpus.read.opening import ALWAYS_ALLOWED, MAX_EXPANSION, DamagedFile, DecompressionBomb, open_binary
from lmworks.corpus.read.part import Item, Part, pack_files, pack_spans, printable, quarantine_errors, quarantined
from lmworks.corpus.read.rows import Columns
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source

SUFFIXES = (".parquet", ".pq")
VALUE_ERRORS = (ValueError, ArithmeticError, LookupError)
"""What pyarrow raises for a value that Python cannot hold: a text that is not UTF-8, a year beyond 9999, an unknown time zone."""
_ROWS = 8  # larger batches are not faster, and one value may be as long as a document


def parts(source: Source, part_bytes: int) -> list[Part]:
    """Parts of whole small files, and of row groups of large files. Raises UserError if the first readable file lacks a column."""
    files = find_files(source, SUFFIXES)
    names = next((names for file in files[:3] if not file.unread and (names := _names(file.path))), None)
    if names:
        Columns(source, 0).columns_to_read(names, printable(files[0].path))
    return list(_parts(files, part_bytes))


def _names(path: str) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_binary(path, seek=True) as (stream, _):
            return list(pq.read_schema(stream).names)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return []


def _parts(files: list[File], part_bytes: int) -> Iterator[Part]:
    small: list[File] = []
    for file in files:
        groups = _row_groups(file) if file.size > part_bytes else []
        if len(groups) < 2:
            small.append(file)
            continue
        yield from pack_files(small, part_bytes)
        small = []
        yield from (Part((file,), size, (first, last)) for first, last, size in pack_spans(groups, part_bytes))
    yield from pack_files(small, part_bytes)


def _row_groups(file: File) -> list[int]:
    """Bytes of each row group, as its share of the file; empty for a damaged file, which is then read, and quarantined, as a whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_binary(file.path, seek=True) as (stream, _):
            metadata = pq.read_metadata(stream)
            # sizes of columns are not read: damaged column metadata makes pyarrow abort the process
            sizes = [max(metadata.row_group(number).total_byte_size, 0) for number in range(metadata.num_row_groups)]
            return [file.size * size // max(sum(sizes), 1) for size in sizes]
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return []


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    with Columns(source, limit) as columns:
        for file in part.files:
            yield from quarantine_errors(_rows(columns, file, part), file.path)


def _rows(columns: Columns, file: File, part: Part) -> Iterator[Item]:
    import pyarrow.parquet as pq

    with open_binary(file.path, seek=True) as (stream, _):
        try:
            opened = pq.ParquetFile(stream)
        except UnicodeDecodeError as error:
            raise DamagedFile(f"a column name is not UTF-8: {error}") from None
        try:
            wanted = columns.columns_to_read(opened.schema_arrow.names, printable(file.path))
        except UserError as error:  # other files may have the columns
            yield quarantined("no_column", printable(file.path), str(error), file.size)
            return
        first, last = part.span or (0, opened.num_row_groups)
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        size = file.size or stream.seek(0, 2)
        share = (part.size if part.span else size) // max(sum(sizes[first:last]), 1)
        for group in range(first, min(last, len(sizes))):  # the file may have been replaced since it was listed
            rows = _group(opened, group, wanted, f"{printable(file.path)}:", sum(sizes[:group]), columns, share, size)
            yield from quarantine_errors(rows, f"{file.path}, row group {group}")


def _group(opened: Any, group: int, wanted: list[str], origin: str, number: int, columns: Columns, share: int, size: int) -> Iterator[Item]:
    given = 0
    # a few values that were compressed that well may fill the memory
    rows = _ROWS if opened.metadata.row_group(group).total_byte_size <= MAX_EXPANSION * size else 1
    for batch in opened.iter_batches(rows, row_groups=[group], columns=wanted):
        given += batch.nbytes
        if given > ALWAYS_ALLOWED and given > MAX_EXPANSION * size:
            raise DecompressionBomb(f"expands to more than {MAX_EXPANSION} times its size")
        try:
            found: list[Any] = list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        except VALUE_ERRORS:  # it affects its own row only
            found = [_row_values(batch, row) for row in range(batch.num_rows)]
        for values in found:
            number += 1
            if isinstance(values, bytes):
                yield quarantined("bad_utf8", f"{origin}{number}", values, share)
            else:
                yield columns.item(dict(zip(batch.schema.names, values, strict=True)), f"{origin}{number}", share)


def _row_values(batch: Any, row: int) -> Any:
    """The values of a row, or the bytes of a value that is not UTF-8."""
    values = []
    for column in batch.columns:
        try:
            values.append(_value(column[row]))
        except UnicodeDecodeError:
            scalar = column[row]
            return scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b""
    return values


def _value(scalar: Any) -> Any:
    """A value. Times that Python cannot hold are numbers in their own unit, as text; lists of them None."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise
    except VALUE_ERRORS:
        if hasattr(scalar, "keys"):
            return {name: _value(scalar[name]) for name in scalar.keys()}  # noqa: SIM118  # it iterates over names, a map over pairs
        return str(scalar.value) if hasattr(scalar, "value") else None
