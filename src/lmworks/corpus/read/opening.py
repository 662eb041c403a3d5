"""Opening input files: local or by fsspec URL, plain or compressed, with bounded lines."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO, cast

from lmworks.errors import UserError
from lmworks.io.urls import fsspec, reveal

_GZIP, _BZ2, _XZ, _ZSTD = (".gz", ".tgz"), (".bz2", ".tbz2"), (".xz", ".txz"), (".zst", ".zstd", ".tzst")
COMPRESSED = (*_GZIP, *_BZ2, *_XZ, *_ZSTD)
_CHUNK = 1 << 20
_NO_CHARSETS = {"idna", "punycode", "unicode-escape", "raw-unicode-escape"}  # codecs of Python from bytes to text that no text declares
_PIECE = 1 << 11  # a frame of zstd expands at most 32,768 times, so that a bomb is noticed at 64 MB
_WIDEST_WINDOW = 1 << 31  # of zstd --ultra --long=31, with which archives of social media are published
# no text is compressed 200 times; up to 16 MB any ratio is allowed, since even empty lines then take only seconds
ALWAYS_ALLOWED = 1 << 24
MAX_EXPANSION = 200


# What a name of the web stands for (https://encoding.spec.whatwg.org): the encoding of Windows that has more characters than the standard
# of that name, and names that Python does not know.
_ON_THE_WEB = {
    "ascii": ("cp1252",), "iso8859-1": ("cp1252",), "iso8859-9": ("cp1254",), "tis-620": ("cp874",), "iso8859-11": ("cp874",),
    "shift_jis": ("cp932",), "euc_kr": ("cp949",), "gb2312": ("gb18030",), "gbk": ("gb18030",), "big5": ("cp950", "big5hkscs"),
}  # fmt: skip
_WEB_NAMES = {"x-sjis": "shift_jis", "windows-874": "cp874", "windows-949": "cp949", "x-gbk": "gbk", "x-x-big5": "big5",
              "x-euc-jp": "euc_jp", "x-mac-roman": "mac_roman", "x-mac-cyrillic": "mac_cyrillic", "iso-8859-8-i": "iso8859-8",
              **{f"x-cp125{digit}": f"cp125{digit}" for digit in range(9)}}  # fmt: skip
# how files begin that are no text, as none of these is UTF-8 or belongs into text
_NO_TEXT = (
    (re.compile(rb"\x1f\x8b\x08"), "it is compressed with gzip: unpack it, or add .gz to its name"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "it is compressed with bzip2: unpack it, or add .bz2 to its name"),
    (re.compile(rb"\xfd7zXZ\x00"), "it is compressed with xz: unpack it, or add .xz to its name"),
    (re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), "it is compressed with zstd: unpack it, or add .zst to its name"),
    (re.compile(rb"PK(?:\x03\x04|\x05\x06)|.{257}ustar", re.DOTALL), "it is an archive, and neither rows nor lines: unpack it"),
)
_LONGEST_BEGIN = 262


class DamagedFile(OSError):
    """A file whose contents do not match its name."""


class DecompressionBomb(OSError):
    """A file that expands without bound."""


def can_seek(path: str) -> bool:
    """Whether reading may start in the middle. Web servers may not support it."""
    return not path.startswith(("http://", "https://"))


@contextmanager
def open_binary(path: str, seek: bool = False) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open for reading: (the decompressed stream, the raw stream whose `tell` is the input position).

    A file that must be seekable and is not is copied first.
    """
    with ExitStack() as stack:
        if "://" in path:
            # fsspec files read lines of unbounded length
            raw: Any = stack.enter_context(io.BufferedReader(stack.enter_context(fsspec("reading a URL").open(reveal(path), "rb")), _CHUNK))
        else:
            raw = stack.enter_context(open(path, "rb"))
        if seek and not can_seek(path):
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(raw, copy, _CHUNK)
            copy.seek(0)
            raw = copy
        yield decompress(raw, path), raw


@contextmanager
def open_text(path: str) -> Iterator[tuple[Any, BinaryIO]]:
    """As `open_binary`, for lines of text: UTF-16 and UTF-32 with a byte order mark come as UTF-8."""
    with open_binary(path) as (stream, raw):
        yield as_utf8(stream), raw


def as_utf8(stream: Any) -> Any:
    """A stream of lines or rows; as UTF-8 if it is UTF-16 or UTF-32 with a byte order mark. Raises DamagedFile if it is compressed, or an
    archive.
    """
    found: Any = stream if hasattr(stream, "peek") else io.BufferedReader(cast(Any, stream), _CHUNK)
    begin = found.peek(_LONGEST_BEGIN)
    for form, remedy in _NO_TEXT:
        if form.match(begin):
            raise DamagedFile(remedy)
    encoding = marked_encoding(begin[:4])
    return io.BufferedReader(_AsUtf8(found, encoding), _CHUNK) if encoding else found


def marked_encoding(start: bytes) -> str | None:
    """The encoding that a byte order mark names, other than UTF-8. Those of UTF-32 begin with those of UTF-16."""
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    return "utf-16" if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else None


def encodings(declared: str) -> list[str]:
    """The encodings to try for a text without a byte order mark, in order: UTF-8, and the one that it declares, if that is known, before
    that its extension by which browsers read it. One whose bytes are ASCII comes first, since they would pass for UTF-8.
    """
    try:
        name = codecs.lookup(_WEB_NAMES.get(declared.lower(), declared)).name
    except (LookupError, ValueError):
        return ["utf-8-sig"]
    if name in _NO_CHARSETS:
        return ["utf-8-sig"]
    if name.startswith(("iso2022", "hz", "utf-7")):
        return [name, "utf-8-sig"]
    return ["utf-8-sig", *_ON_THE_WEB.get(name, ()), name]


def decode_text(data: bytes, declared: str) -> str | None:
    """A text by its byte order mark, as UTF-8, or in the encoding that it declares; None if it is none of these."""
    marked = marked_encoding(data[:4])
    for encoding in [marked] if marked else encodings(declared):
        with suppress(LookupError, ValueError):  # a codec such as hex is none of text
            return data.decode(encoding)
    return None


class _AsUtf8(io.RawIOBase):
    """A stream of another encoding as UTF-8. What is not of that encoding damages the file."""

    def __init__(self, stream: Any, encoding: str) -> None:
        self._stream, self._encoding, self._ready = stream, encoding, b""
        self._decoder = codecs.getincrementaldecoder(encoding)()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._stream.read(_CHUNK)
            try:
                self._ready = self._decoder.decode(data, final=not data).encode()
            except UnicodeError as error:
                raise DamagedFile(f"it is not {self._encoding.upper()}, which its byte order mark says: {error}") from None
            if not data and not self._ready:
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


class ExpansionLimit:
    """Counts the bytes decompressed from one file; `read` returns the compressed bytes read. `add` raises Bomb if the ratio is too high."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read, self._given = read, 0

    def add(self, count: int) -> None:
        self._given += count
        if self._given > ALWAYS_ALLOWED and self._given > MAX_EXPANSION * self._read():
            raise DecompressionBomb(f"expands to more than {MAX_EXPANSION} times its size")


def decompress(raw: Any, name: str, expansion: ExpansionLimit | None = None) -> Any:
    """The decompressed stream for a .gz, .bz2, .xz or .zst name, which raises Bomb if it expands without bound; `raw` itself for other
    names.

    The output counts towards the `expansion` of the file that contains `raw`.
    """
    name = name.lower()
    if name.endswith(_GZIP):
        opened: Any = gzip.GzipFile(fileobj=raw)
    elif name.endswith(_BZ2):
        opened = _Frames(raw, bz2.BZ2Decompressor)
    elif name.endswith(_XZ):
        opened = _Frames(raw, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ))
    elif name.endswith(_ZSTD):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{name} needs zstandard: pip install 'lmworks[data]'") from None
        opened = _Frames(raw, zstandard.ZstdDecompressor(max_window_size=_WIDEST_WINDOW).decompressobj)
    else:
        return raw
    return io.BufferedReader(_CountedStream(opened, expansion or ExpansionLimit(raw.tell)), _CHUNK)


class _Frames:
    """The frames (streams) of a bz2, xz or zstd file, one after another. Zero bytes between them are padding.

    The readers of the libraries take the end of a truncated zstd file, and all that is no stream behind one of bz2 or xz, for the end of
    the text.
    """

    def __init__(self, raw: Any, begin_frame: Callable[[], Any]) -> None:
        self._raw, self._begin_frame = raw, begin_frame
        self._frame: Any = None
        self._ready = b""

    def read1(self, count: int) -> bytes:
        while not self._ready:
            data = b""
            if self._frame is None or self._frame.eof:
                data = self._next_frame()
                if not data:
                    return b""
                self._frame = self._begin_frame()
            elif getattr(self._frame, "needs_input", True):
                data = self._raw.read(_PIECE)
                if not data:
                    raise EOFError("compressed file ended before the end-of-stream marker was reached")
            # a frame of zstd gives all that it has
            self._ready = self._frame.decompress(data, *((count,) if hasattr(self._frame, "needs_input") else ()))
        found, self._ready = self._ready[:count], self._ready[count:]
        return found

    def _next_frame(self) -> bytes:
        """The first bytes of the next frame; none at the end of the file."""
        if self._frame is None:
            return bytes(self._raw.read(_PIECE))
        data = bytes(self._frame.unused_data).lstrip(b"\0")
        while not data and (piece := self._raw.read(_PIECE)):
            data = piece.lstrip(b"\0")
        return data


class _CountedStream(io.RawIOBase):
    """A decompressed stream whose bytes are counted."""

    def __init__(self, opened: Any, expansion: ExpansionLimit) -> None:
        self._opened, self._expansion = opened, expansion

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._opened.read1(len(buffer))  # read1 returns all valid data of a truncated file
        buffer[: len(data)] = data
        self._expansion.add(len(data))
        return len(data)


def bounded_lines(stream: Any, limit: int) -> Iterator[tuple[bytes, bool]]:
    """Lines without their end as (bytes, whole).

    Of a line longer than `limit` only the start is returned; the rest is skipped in small reads.
    """
    while line := stream.readline(limit + 2):  # room for its end
        content, ended = line.rstrip(b"\r\n"), line.endswith(b"\n")
        whole = len(content) <= limit
        yield content if whole else content[:4096], whole
        del line, content
        while not ended:
            rest = stream.readline(_CHUNK)
            ended = not rest or rest.endswith(b"\n")


def skip_line(stream: Any, until: int | None) -> None:
    """Read to the end of the line, or past `until`."""
    while (chunk := stream.readline(_CHUNK)) and not chunk.endswith(b"\n") and (until is None or stream.tell() < until):
        pass
