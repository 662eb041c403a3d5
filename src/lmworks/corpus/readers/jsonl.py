"""JSON lines, plain or compressed. A plain file is cut at arbitrary positions: a line belongs to the part in which it begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

from lmworks.corpus.readers.items import Item, printable, quarantined
from lmworks.corpus.readers.listing import File, find_files
from lmworks.corpus.readers.opening import COMPRESSED, bounded_lines, can_seek, open_binary, skip_line
from lmworks.corpus.readers.part import Part, pack_files
from lmworks.corpus.readers.read_errors import quarantine_errors
from lmworks.corpus.readers.rows import Columns
from lmworks.recipe.schema.corpus import Source

_SUFFIXES = (".jsonl", ".json", ".ndjson")


def parts(source: Source, part_bytes: int) -> list[Part]:
    return list(line_parts(find_files(source, _SUFFIXES), part_bytes))


def line_parts(files: list[File], part_bytes: int) -> Iterator[Part]:
    """Parts of whole small and compressed files, and of equal byte ranges of large plain files."""
    small: list[File] = []
    for file in files:
        if file.size <= part_bytes or file.path.endswith(COMPRESSED) or not can_seek(file.path):
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
            yield from quarantine_errors(_rows(columns, file, part.span, limit), file.path)


def _rows(columns: Columns, file: File, span: tuple[int, int] | None, limit: int) -> Iterator[Item]:
    # escapes and other columns take space too
    for line, complete, origin, consumed in lines_of(file, span, 4 * limit + 65536):
        if not complete:
            yield quarantined("enormous", origin, line, consumed)
        elif line.strip():
            yield _row(columns, line, origin, consumed)


def lines_of(file: File, span: tuple[int, int] | None, limit: int) -> Iterator[tuple[bytes, bool, str, int]]:
    """(line, whether it is whole, origin, input bytes) of each line that begins in the span.

    The origin contains the line number, or the byte position if the file is cut.
    """
    with open_binary(file.path) as (stream, raw):
        at, end = span or (0, None)
        if at:
            raw.seek(at - 1)
            skip_line(raw, until=end)
        before, place = at, raw.tell()
        for number, (line, complete) in enumerate(bounded_lines(stream, limit), start=1):
            if end is not None and place >= end:
                return
            after = raw.tell()
            reached = after if end is None else min(after, end)
            yield line, complete, f"{printable(file.path)}@{place}" if span else f"{printable(file.path)}:{number}", reached - before
            before, place = reached, after


def _row(columns: Columns, line: bytes, origin: str, consumed: int) -> Item:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return quarantined("bad_utf8", origin, line, consumed)
    except (ValueError, RecursionError):
        return quarantined("broken_json", origin, line, consumed)
    if isinstance(row, dict):
        return columns.item(row, origin, consumed)
    return quarantined("wrong_type", origin, line, consumed)
