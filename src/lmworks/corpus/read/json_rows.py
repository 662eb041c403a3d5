"""Rows of files of JSON, for the corpus and for all later stages: JSON lines, an array, or objects over several lines, whatever the suffix.

A byte order mark is dropped, and UTF-16 and UTF-32 with one are read. A row that is not JSON or not UTF-8 is a fault of that row only: in
an array reading goes on behind it. Where its end cannot be found, the rest of the file is a fault of its own, with its size. Tabs and line
breaks inside strings are text, although JSON wants them escaped. One row at a time is in memory. As a source, a large plain file of JSON
lines is cut at arbitrary positions: a line belongs to the part in which it begins.
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
from lmworks.corpus.read.opening import COMPRESSED, bounded_lines, can_seek, open_text, skip_line
from lmworks.corpus.read.part import EXCERPT, Item, Part, damage_errors, pack_files, printable, quarantine_errors, quarantined
from lmworks.corpus.read.rows import Columns
from lmworks.recipe.schema.corpus import Source
from lmworks.ui.amounts import size

Layout = Literal["lines", "array", "objects"]
Reason = Literal["enormous", "bad_utf8", "broken_json"]
SUFFIXES = (".jsonl", ".json", ".ndjson")
_PIECE = 1 << 20
_FIRST_ROW = 1 << 20  # bytes that may decide whether a file has a row per line
_BAD_BYTES = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, decoded with surrogateescape
_SPACE = " \t\r\n"
_BETWEEN = re.compile(r"[ \t\r\n,]*")  # rows; a comma may lack or be one too many
_BRACKETS, _ENDS_OF_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_LONGEST_TOKEN = 12  # characters of two escapes that are one character
_DECODER = json.JSONDecoder(strict=False)  # with control characters in strings
_ZERO_BYTES = "it has zero bytes: save the file as UTF-8"
REST_UNREAD = "rest of the file unread"
"""How the `detail` of a row begins whose end was not found, so that nothing behind it is read. The size of the rest follows."""


@dataclass(frozen=True, slots=True)
class JsonRow:
    """A row as read: its `value`, or the `reason` why it has none, with a `detail` for people (see `REST_UNREAD`) and the beginning of its
    text.

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
                yield from _parsed(line, origin, consumed)
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
        with open_text(path) as (stream, raw):
            as_it_is = stream is raw  # and not decoded
        return as_it_is and (not json_rows or layout_of(path) == "lines")
    except OSError:  # it is quarantined when it is read, once
        return False


def layout_of(path: str) -> Layout:
    """How the rows of a file are laid out. A first line that is a value makes it lines, unless that is an array and all there is.

    What begins with a bracket is an array only if a row follows: a line of a log may, too.
    """
    with open_text(path) as (stream, _):
        head = _Pieces(stream).read(_FIRST_ROW)
    text, whole = head.decode("utf-8-sig", "surrogateescape").lstrip(_SPACE), len(head) < _FIRST_ROW
    if text[:1] not in ("[", "{"):
        return "lines"
    line, ended, rest = text.partition("\n")
    if ended or whole:
        try:
            _DECODER.decode(line)
        except (ValueError, RecursionError) as error:
            too_deep = isinstance(error, RecursionError) and line.rstrip(_SPACE)[-1] == "]"
            if (too_deep or getattr(error, "msg", "") == "Extra data") and rest.strip(_SPACE):
                return "lines"  # a value ends in the line
        else:
            return "array" if line[0] == "[" and not rest.strip(_SPACE) else "lines"
    array = text[0] == "["
    begin = _row_begins(text, 1) if array else 0
    if array and text[begin : begin + 1] in ("{", "]"):
        return "array"
    try:
        _, end = _DECODER.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        if not _is_cut(error, text) or whole:
            return "lines"
        return "array" if array else "objects" if ended else "lines"
    except (ValueError, RecursionError):
        return "lines"
    if array:
        return "array" if text[end:].lstrip(_SPACE)[:1] in (",", "]") else "lines"
    follows = not rest.strip(_SPACE) and text[end:].lstrip(_SPACE)[:1] == "{"  # in a file that is one line
    return "objects" if follows or "\n" in text[:end] else "lines"


def _row_begins(text: str, at: int) -> int:
    """The place of the first character from `at` on that does not stand between rows; the end of the text if there is none."""
    found = _BETWEEN.match(text, at)
    assert found is not None, "it may be empty"
    return found.end()


def _is_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether a value is no JSON only because the text ends in the middle of it."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip(_SPACE)) - _LONGEST_TOKEN


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


def _parsed(line: bytes, origin: str, consumed: int) -> Iterator[JsonRow]:
    try:
        values = list(_values_of_line(line.decode("utf-8-sig").strip(_SPACE)))
    except UnicodeDecodeError as error:
        yield JsonRow(origin, None, "bad_utf8", _not_utf8(line[error.start : error.start + 1], error.start), line, consumed)
    except (ValueError, RecursionError) as error:
        yield JsonRow(origin, None, "broken_json", _ZERO_BYTES if b"\0" in line else str(error), line, consumed)
    else:
        if b"\0" in line:
            yield JsonRow(origin, None, "broken_json", _ZERO_BYTES, line, consumed)
            return
        for number, value in enumerate(values):
            yield JsonRow(origin, value, consumed=0 if number else consumed)


def _values_of_line(line: str) -> Iterator[Any]:
    """The value of a line; or several objects, as where two files were joined of which the first does not end with a line break."""
    end = 0
    while not end or end < len(line):
        value, end = _DECODER.raw_decode(line, end)
        if isinstance(value, dict):
            end = _row_begins(line, end)
        if end < len(line) and not (isinstance(value, dict) and line[end] == "{"):
            raise json.JSONDecodeError("Extra data", line, end)
        yield value


def _not_utf8(byte: bytes, position: int) -> str:
    return f"byte 0x{byte.hex()} at {position:,} is not UTF-8; save the file as UTF-8"


class _Text:
    """The text of a stream that is not used yet, `text[at:]`, and whether it has `ended` there."""

    def __init__(self, stream: Any) -> None:
        self._pieces = _Pieces(stream)
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self.text, self.at, self.ended, self._bytes = "", 0, False, 0

    def more(self, count: int = _PIECE) -> bool:
        """Read on, and forget what was used. Returns whether there was more."""
        piece = self._pieces.read(count)
        self.ended = not piece
        self._bytes += len(piece)
        self.text, self.at = self.text[self.at :] + self._decode(piece, final=self.ended), max(self.at - len(self.text), 0)
        return not self.ended

    def used(self) -> int:
        """Bytes before `at`."""
        return self._bytes - len(self.text[self.at :].encode("utf-8", "surrogateescape"))

    def next(self) -> str:
        """The character with which the next row begins; empty at the end."""
        while (begin := _row_begins(self.text, self.at)) == len(self.text):
            self.at = begin
            if not self.more():
                return ""
        self.at = begin
        return self.text[begin]

    def sample(self, end: int = 0) -> bytes:
        """The beginning of what is not used; at most up to `end`, if that is known."""
        return self.text[self.at : min(self.at + EXCERPT, end or len(self.text))].encode("utf-8", "surrogateescape")

    def give_up(self, used: int) -> str:
        """Read to the end; the beginning of a detail, with what follows the first `used` bytes."""
        self.at = len(self.text)
        while self.more():
            self.at = len(self.text)
        return f"{REST_UNREAD}, {size(self._bytes - used)}"

    def parse(self, limit: int) -> tuple[Any, int, Reason | None, str]:
        """The value at `at` and where it ends, or the reason and detail why there is none."""
        wanted = _PIECE
        while True:
            value, end, fault = None, 0, ""
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                cut = end == len(self.text)  # a number may go on
            except json.JSONDecodeError as error:
                fault, cut = f"{error.msg} at character {error.pos - self.at:,} of it", _is_cut(error, self.text)
            except (ValueError, RecursionError) as error:
                fault, cut = str(error), False
            if not cut or self.ended:
                return value, end, "broken_json" if fault else None, fault
            if len(self.text) - self.at > limit:
                return None, 0, "enormous", f"more than {limit:,} bytes"
            self.more(wanted)
            wanted = min(2 * wanted, max(limit, _PIECE))  # so that a long row is parsed few times

    def skip(self, array: bool) -> bool:
        """Go behind a row that is broken or too long. Returns whether the next one can be told apart: the brackets and quotes of this one
        match, and what follows begins as it does.
        """
        first, quoted, braces, brackets = self.next(), False, 0, 0
        if first not in ("{", "[", '"'):
            return False
        while True:
            found = (_ENDS_OF_STRING if quoted else _BRACKETS).search(self.text, self.at)
            if found is None:
                self.at = max(self.at, len(self.text))
                if not self.more():
                    return False
                continue
            mark, self.at = found[0], found.end()
            if mark == '"':
                quoted = not quoted
            elif mark == "\\":
                self.at += 1
            elif mark in "{}":
                braces += 1 if mark == "{" else -1
            else:
                brackets += 1 if mark == "[" else -1
            if braces < 0 or brackets < 0:
                return False
            if not (quoted or braces or brackets):
                return self.next() in ((first, "]") if array else (first, ""))


def _values(path: str, array: bool, limit: int) -> Iterator[JsonRow]:
    """The elements of an array, or objects one after another."""
    origin = printable(path)
    with open_text(path) as (stream, raw):
        text, number, before = _Text(stream), 0, 0
        text.next()
        text.at += int(array)
        while (first := text.next()) and not (array and first == "]"):
            number += 1
            value, end, reason, detail = text.parse(limit)
            if reason is None and text.text.find("\0", text.at, end) >= 0:
                reason, detail = "broken_json", _ZERO_BYTES
            elif reason is None and (bad := _BAD_BYTES.search(text.text, text.at, end)):
                reason, detail = "bad_utf8", _not_utf8(bad[0].encode("utf-8", "surrogateescape"), bad.start() - text.at)
            sample = b"" if reason is None else text.sample(end)
            if end:
                text.at = end
            else:
                used = text.used()
                detail = detail if text.skip(array) else f"{text.give_up(used)}: {detail}"
            read = raw.tell()
            yield JsonRow(f"{origin}:{number}", value if reason is None else None, reason, detail, sample, read - before)
            if detail.startswith(REST_UNREAD):
                return
            before = read
        text.at += 1
        if array and not first:
            yield JsonRow(f"{origin}:{number + 1}", None, "broken_json", "the array does not end")
        elif array and text.next():
            sample, detail = text.sample(), f"{text.give_up(text.used())}: it follows the end of the array"
            yield JsonRow(f"{origin}:{number + 1}", None, "broken_json", detail, sample, raw.tell() - before)


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
    if row.detail.startswith(REST_UNREAD):
        return quarantined("rest_unread", row.origin, f"{row.detail}: ".encode() + row.text, row.consumed)
    if row.reason is not None:
        return quarantined(row.reason, row.origin, row.text, row.consumed)
    if isinstance(row.value, dict):
        return columns.item(row.value, row.origin, row.consumed)
    return quarantined("wrong_type", row.origin, repr(row.value)[:1000], row.consumed)
