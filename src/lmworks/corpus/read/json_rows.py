"""Rows of files of JSON, for the corpus and for all later stages: JSON lines, an array, or objects over several lines, whatever the suffix.

A byte order mark is dropped, and UTF-16 and UTF-32 with one are read. A row that is not JSON or not UTF-8 is a fault of that row only. One
row at a time is in memory. As a source, a large plain file of JSON lines is cut at arbitrary positions: a line belongs to the part in which
it begins.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from lmworks.corpus.read.listing import File, find_files
from lmworks.corpus.read.opening import COMPRESSED, bounded_lines, can_seek, has_mark_of_utf16, open_text, skip_line
from lmworks.corpus.read.part import Item, Part, damage_errors, pack_files, printable, quarantine_errors, quarantined
from lmworks.corpus.read.rows import Columns
from lmworks.recipe.schema.corpus import Source

Layout = Literal["lines", "array", "objects"]
Reason = Literal["enormous", "bad_utf8", "broken_json"]
SUFFIXES = (".jsonl", ".json", ".ndjson")
_PIECE = 1 << 20
_FIRST_ROW = 1 << 20  # bytes that may decide whether a file has a row per line
_BAD_BYTES = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, decoded with surrogateescape
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class JsonRow:
    """A row as read: its `value`, or the `reason` why it has none, with a `detail` for people and the beginning of its text.

    `consumed` is the number of input bytes read since the row before.
    """

    origin: str
    value: Any = None
    reason: Reason | None = None
    detail: str = ""
    text: bytes = b""
    consumed: int = 0


def rows_of(file: File, span: tuple[int, int] | None, limit: int) -> Iterator[JsonRow]:
    """The rows of a file, or those of its lines that begin in the `span` of bytes. A row of more than `limit` bytes is a fault.

    Raises the errors of `read_errors.damage_errors` where the file cannot be read on.
    """
    layout = "lines" if span else layout_of(file.path)
    if layout == "lines":
        for line, whole, origin, consumed in lines_of(file, span, limit):
            if not whole:
                yield JsonRow(origin, None, "enormous", f"more than {limit:,} bytes", line, consumed)
            elif line.strip():
                yield _parsed(line, origin, consumed)
    else:
        yield from _values(file.path, layout == "array", limit)


def lines_of(file: File, span: tuple[int, int] | None, limit: int) -> Iterator[tuple[bytes, bool, str, int]]:
    """(line, whether it is whole, origin, input bytes) of each line that begins in the span.

    The origin contains the line number, or the byte position if the file is cut.
    """
    with open_text(file.path) as (stream, raw):
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


def can_be_cut(path: str, json_rows: bool) -> bool:
    """Whether parts of a file can be read by the position of their lines; with `json_rows`, a row must be a line."""
    if path.lower().endswith(COMPRESSED) or not can_seek(path):
        return False
    try:
        return not has_mark_of_utf16(path) and (not json_rows or layout_of(path) == "lines")
    except OSError:  # it is quarantined when it is read
        return True


def layout_of(path: str) -> Layout:
    """How the rows of a file are laid out. A first line that is a value makes it lines, unless that is an array and all there is."""
    with open_text(path) as (stream, _):
        head = _Pieces(stream).read(_FIRST_ROW)
    text, whole = head.decode("utf-8-sig", "surrogateescape").lstrip(_SPACE), len(head) < _FIRST_ROW
    if text[:1] not in ("[", "{"):
        return "lines"
    line, ended, rest = text.partition("\n")
    if ended or whole:
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            pass
        else:
            return "array" if line[0] == "[" and not rest.strip(_SPACE) else "lines"
    if text[0] == "[":
        return "array"
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:  # an object that goes on where what was read ends
        return "objects" if ended and not whole and error.pos >= len(text.rstrip(_SPACE)) - 1 else "lines"
    except (ValueError, RecursionError):
        return "lines"
    return "objects" if "\n" in text[:end] else "lines"


class _Pieces:
    """A stream that gives all that it has before it fails. The error is raised by the read after that."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._error: Exception | None = None

    def read(self, count: int) -> bytes:
        if self._error is not None:
            raise self._error
        pieces: list[bytes] = []
        size = 0
        while size < count:
            try:
                piece = self._stream.read1(count - size)
            except damage_errors() as error:
                if not pieces:
                    raise
                self._error = error
                break
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
        return b"".join(pieces)


def _parsed(line: bytes, origin: str, consumed: int) -> JsonRow:
    try:
        return JsonRow(origin, json.loads(line.decode("utf-8-sig")), consumed=consumed)
    except UnicodeDecodeError as error:
        return JsonRow(origin, None, "bad_utf8", _not_utf8(line[error.start : error.start + 1], error.start), line, consumed)
    except (ValueError, RecursionError) as error:
        detail = "it has zero bytes: save the file as UTF-8" if b"\0" in line else str(error)
        return JsonRow(origin, None, "broken_json", detail, line, consumed)


def _not_utf8(byte: bytes, position: int) -> str:
    return f"byte 0x{byte.hex()} at {position:,} is not UTF-8; save the file as UTF-8"


def _values(path: str, array: bool, limit: int) -> Iterator[JsonRow]:
    """The elements of an array, or objects one after another."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
    origin = printable(path)
    with open_text(path) as (stream, raw):
        pieces = _Pieces(stream)
        text, number, wanted, ended, before = decode(pieces.read(_PIECE)).lstrip(_SPACE)[int(array) :], 0, _PIECE, False, 0
        while True:
            text = text.lstrip(_SPACE + ("," if array else ""))
            if array and text.startswith("]"):
                if text[1:].strip(_SPACE) or pieces.read(_PIECE).strip():
                    yield JsonRow(f"{origin}:{number + 1}", None, "broken_json", "text behind the end of the array is not read")
                return
            try:
                value, end = decoder.raw_decode(text)
                if end == len(text) and not ended:  # a number or word may go on
                    raise ValueError("cut")
            except (ValueError, RecursionError) as error:
                if not ended and len(text) <= limit and not isinstance(error, RecursionError):
                    piece = pieces.read(wanted)
                    wanted, ended = min(2 * wanted, max(limit, _PIECE)), not piece  # doubled, so that a long row is parsed few times
                    text += decode(piece, final=ended)
                    continue
                if array or text.strip(_SPACE):  # what follows a broken row cannot be told apart
                    reason: Reason = "enormous" if not ended and len(text) > limit else "broken_json"
                    detail = f"{'the array does not end' if not text.strip(_SPACE) else error}; the rest of the file is not read"
                    yield JsonRow(f"{origin}:{number + 1}", None, reason, detail, text[:400].encode("utf-8", "surrogateescape"))
                return
            number, wanted, read = number + 1, _PIECE, raw.tell()
            if bad := _BAD_BYTES.search(text, 0, end):
                detail = _not_utf8(bad[0].encode("utf-8", "surrogateescape"), bad.start())
                yield JsonRow(f"{origin}:{number}", None, "bad_utf8", detail, text[:end].encode("utf-8", "surrogateescape"), read - before)
            else:
                yield JsonRow(f"{origin}:{number}", value, consumed=read - before)
            text, before = text[end:], read


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
