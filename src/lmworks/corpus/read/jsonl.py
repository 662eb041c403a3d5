"""Files of JSON rows, plain or compressed. A large plain file of JSON lines is cut at arbitrary positions: a line belongs to the part in
which it begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from lmworks.corpus.read.json_rows import SUFFIXES, JsonRow, can_be_cut, rows_of
from lmworks.corpus.read.listing import File, find_files
from lmworks.corpus.read.part import Item, Part, pack_files, quarantine_errors, quarantined
from lmworks.corpus.read.rows import Columns
from lmworks.recipe.schema.corpus import Source


def parts(source: Source, part_bytes: int) -> list[Part]:
    return list(line_parts(find_files(source, SUFFIXES), part_bytes, json_rows=True))


def line_parts(files: list[File], part_bytes: int, json_rows: bool = False) -> Iterator[Part]:
    """Parts of whole small files and of those that cannot be cut, and of equal byte ranges of large ones."""
    small: list[File] = []
    for file in files:
        if file.size <= part_bytes or not can_be_cut(file.path, json_rows):
            small.append(file)
            continue
        yield from pack_files(small, part_bytes)
        small = []
        count = -(-file.size // part_bytes)
        edges = [file.size * number // count for number in range(count + 1)]
        yield from (Part((file,), last - first, (first, last)) for first, last in pairwise(edges))
    yield from pack_files(small, part_bytes)


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    with Columns(source, limit) as columns:
        for file in part.files:
            # escapes and other columns take space too
            rows = (_item(columns, row) for row in rows_of(file, part.span, 4 * limit + 65536))
            yield from quarantine_errors(rows, file.path)


def _item(columns: Columns, row: JsonRow) -> Item:
    if row.reason is not None:
        return quarantined(row.reason, row.origin, row.text, row.consumed)
    if isinstance(row.value, dict):
        return columns.item(row.value, row.origin, row.consumed)
    return quarantined("wrong_type", row.origin, repr(row.value)[:1000], row.consumed)
