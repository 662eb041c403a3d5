"""Parquet files, cut into parts by row groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmworks.corpus.readers.guard import guarded
from lmworks.corpus.readers.items import Item, broken, shown
from lmworks.corpus.readers.listing import File, find
from lmworks.corpus.readers.opening import HARMLESS, MOST_EXPANSION, Bomb, Damaged, open_binary
from lmworks.corpus.readers.part import Part, packed, spans
from lmworks.corpus.readers.rows import Columns
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source

_ROWS = 8  # more are no faster, and one value may be as long as a document


def parts(source: Source, part_bytes: int) -> list[Part]:
    """Small files whole, big ones by row groups. Raises UserError if the first file that can be read has not the columns."""
    files = find(source, (".parquet",))
    names = next((names for file in files[:3] if not file.leads_out and (names := _names(file.path))), None)
    if names:
        Columns(source, 0).wanted(names, shown(files[0].path))
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
        yield from packed(small, part_bytes)
        small = []
        yield from (Part((file,), size, (first, last)) for first, last, size in spans(groups, part_bytes))
    yield from packed(small, part_bytes)


def _row_groups(file: File) -> list[int]:
    """Bytes of each row group, as its share of the file; of a damaged file none, so that it is read, and quarantined, whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_binary(file.path, seek=True) as (stream, _):
            metadata = pq.read_metadata(stream)
            # not those of its columns: their metadata, if damaged, makes pyarrow abort the process
            sizes = [max(metadata.row_group(number).total_byte_size, 0) for number in range(metadata.num_row_groups)]
            return [file.size * size // max(sum(sizes), 1) for size in sizes]
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return []


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    with Columns(source, limit) as columns:
        for file in part.files:
            yield from guarded(_rows(columns, file, part), file.path)


def _rows(columns: Columns, file: File, part: Part) -> Iterator[Item]:
    import pyarrow.parquet as pq

    with open_binary(file.path, seek=True) as (stream, _):
        try:
            opened = pq.ParquetFile(stream)
        except UnicodeDecodeError as error:
            raise Damaged(f"a name of a column is no UTF-8: {error}") from None
        try:
            wanted = columns.wanted(opened.schema_arrow.names, shown(file.path))
        except UserError as error:  # other files have them
            yield broken("no_column", shown(file.path), str(error), file.size)
            return
        first, last = part.span or (0, opened.num_row_groups)
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        size = file.size or stream.seek(0, 2)
        share = (part.size if part.span else size) // max(sum(sizes[first:last]), 1)
        for group in range(first, last):
            rows = _group(opened, group, wanted, f"{shown(file.path)}:", sum(sizes[:group]), columns, share, size)
            yield from guarded(rows, f"{file.path}, row group {group}")


def _group(opened: Any, group: int, wanted: list[str], origin: str, number: int, columns: Columns, share: int, size: int) -> Iterator[Item]:
    given = 0
    # of values that were packed that well, a few may fill the memory
    rows = _ROWS if opened.metadata.row_group(group).total_byte_size <= MOST_EXPANSION * size else 1
    for batch in opened.iter_batches(rows, row_groups=[group], columns=wanted):
        given += batch.nbytes
        if given > HARMLESS and given > MOST_EXPANSION * size:
            raise Bomb(f"expands to more than {MOST_EXPANSION} times its size")
        try:
            found: list[Any] = list(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        except UnicodeDecodeError:  # one row of bad UTF-8 spoils only itself
            found = [_one(batch, row) for row in range(batch.num_rows)]
        for values in found:
            number += 1
            if isinstance(values, bytes):
                yield broken("bad_utf8", f"{origin}{number}", values, share)
            else:
                yield columns.item(dict(zip(batch.schema.names, values, strict=True)), f"{origin}{number}", share)


def _one(batch: Any, row: int) -> Any:
    """The values of a row, or the bytes of one that is no UTF-8."""
    values = []
    for column in batch.columns:
        try:
            values.append(column[row].as_py())
        except UnicodeDecodeError:
            scalar = column[row]
            return scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b""
    return values
