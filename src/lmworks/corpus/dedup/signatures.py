"""Exact duplicates by key: the normalized text, or the normalized URL.

Signatures: the data by which documents are compared with each other (keys of text and URL, and the sketch). One Arrow file per part,
memory-mapped, so that only the data in use takes memory.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import numpy as np
import pyarrow as pa

from lmworks.corpus.dedup.near import Sketching, band_keys, sketches
from lmworks.corpus.dedup.semantic import Embed
from lmworks.corpus.document import Batch
from lmworks.corpus.transform.cleaning import comparison_form
from lmworks.io.files import atomic_path, explain_os_errors
from lmworks.recipe.schema.corpus import Dedup, Source

_TRACKING = re.compile(
    r"utm_\w+|[a-z]*clid|gad_source|_ga|_gl|_hs\w+|mc_[ce]id|igshid|ref_src|ref_url|spm|share|si|phpsessid|jsessionid|sid|sessionid",
    re.IGNORECASE,
)
_DEFAULT_PORTS = {"http": 80, "https": 443}
_BYTES = "surrogateescape"  # escapes of old encodings, as %D6%D0 of GBK, distinguish pages too
_INDEX = re.compile(r"/(?:index|default)\.(?:html?|php|aspx?|jsp)$", re.IGNORECASE)


def keys_of(forms: Sequence[str]) -> np.ndarray:
    """(D, 2) uint64: 128-bit keys of strings; an empty string has the key 0, which matches nothing."""
    digests = [hashlib.blake2b(form.encode("utf-8", "surrogatepass"), digest_size=16).digest() if form else bytes(16) for form in forms]
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def text_keys(texts: Sequence[str]) -> np.ndarray:
    """(D, 2) uint64: keys of texts, equal if they differ only in case and white space."""
    return keys_of([comparison_form(text) for text in texts])


def url_keys(urls: Sequence[str | None]) -> np.ndarray:
    """(D, 2) uint64: keys of normalized URLs; 0 for None."""
    return keys_of([normal_url(url) if url else "" for url in urls])


def _in_its_script(host: str) -> str:
    """The host with labels of punycode (RFC 3492) as what they stand for; Python's `idna` refuses those of IDNA 2008 (faß.de)."""
    with suppress(UnicodeError):
        return ".".join(label[4:].encode("ascii").decode("punycode") if label.startswith("xn--") else label for label in host.split("."))
    return host


def normal_url(url: str) -> str:
    """The URL without the parts that do not distinguish pages.

    Removed: scheme, `www.`, default port, user, fragment (unless it is a route, `#!` or `#/`), tracking and session parameters, a trailing
    slash or index page. The host is in lower case and in its own script, parameters are sorted, escapes are uniform, and those that are not
    UTF-8 are kept. A string that is not a URL is returned stripped.
    """
    url = url.strip()
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return url
    if not host:
        return url
    host = _in_its_script(host).removeprefix("www.")
    if port and port != _DEFAULT_PORTS.get(parts.scheme, port if not parts.scheme and port in (80, 443) else None):
        host += f":{port}"
    segments = [unquote(part, errors=_BYTES) for part in re.sub(r"/{2,}", "/", parts.path).split("/")]
    path = _INDEX.sub("/", "/".join(quote(part, "~!$&'()*+,;=:@", errors=_BYTES) for part in segments)).rstrip("/")
    pairs = parse_qsl(parts.query, keep_blank_values=True, errors=_BYTES)
    query = urlencode(sorted(pair for pair in pairs if not _TRACKING.fullmatch(pair[0])), errors=_BYTES)
    route = f"#{parts.fragment}" if parts.fragment.startswith(("!", "/")) else ""
    return f"{host}{path}{'?' if query else ''}{query}{route}"


def find_copies(keys_N2: np.ndarray) -> np.ndarray:
    """(P, 2) rows (copy, first row with its key), copies ascending. Rows with the key 0 have no copies.

    On many machines, each takes the rows whose key is in its slice (`in_slice`), and the results are concatenated.
    """
    order = np.argsort(keys_N2[:, 0], kind="stable")  # among equal keys the lowest row is first; half a key distinguishes nearly all
    high, low = keys_N2[order, 0], keys_N2[order, 1]
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1]) & ((high[1:] != 0) | (low[1:] != 0))
    heads = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
    found = np.stack((order[again], order[heads[again]]), axis=1)
    return found[np.argsort(found[:, 0])]


def in_slice(keys: np.ndarray, slice_: int, slices: int) -> np.ndarray:
    """(N,) bool: the rows in one of `slices` equal slices of the key space, for (N,) band keys or (N, 2) text keys."""
    return (keys if keys.ndim == 1 else keys[:, 0]) % np.uint64(slices) == np.uint64(slice_)


_ROWS = 1 << 14  # whose band keys are computed at one time


def sketching_of(dedup: Dedup, sources: Sequence[Source]) -> Sketching | None:
    """The sketch parameters of a recipe (None without MinHash); the bands suit the lowest threshold of any source."""
    if dedup.minhash is None:
        return None
    own = [source.dedup.threshold for source in sources if source.dedup.minhash and source.dedup.threshold is not None]
    node = dedup.minhash
    return Sketching.of(node.ngram_words, node.permutations, node.bands, min([node.threshold, *own]))


class _Column:
    """Rows of numbers that are collected in a file, so that memory does not grow with them."""

    def __init__(self, folder: Path, dtype: Any, width: int) -> None:
        self._folder, self._dtype, self._width = folder, np.dtype(dtype), width
        with explain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115

    def add(self, rows: np.ndarray) -> None:
        """(N, width) or, for width 1, (N,)."""
        with explain_os_errors(self._folder):
            self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).tobytes())

    def rows(self) -> np.ndarray:
        """(N, width) all rows, memory-mapped."""
        with explain_os_errors(self._folder):
            self._file.flush()
        empty = not os.fstat(self._file.fileno()).st_size
        data = np.zeros(0, self._dtype) if empty else np.memmap(self._file, self._dtype, mode="r")
        return data.reshape(-1 if self._width else 0, self._width)


class SignatureWriter:
    """Collects the signatures of one part, batch by batch, in unnamed files in `folder`; `close` writes the result."""

    def __init__(self, folder: Path, sketching: Sketching | None, embed: Embed | None = None) -> None:
        self._folder, self._sketching, self._embed = folder, sketching, embed
        self._vectors: _Column | None = None
        self._texts, self._urls = _Column(folder, np.uint64, 2), _Column(folder, np.uint64, 2)
        self._sketches = _Column(folder, np.uint8, sketching.values if sketching else 0)

    def add(self, batch: Batch) -> None:
        """Add documents in the order in which they are staged."""
        documents = batch.documents
        self._texts.add(text_keys([document.text for document in documents]))
        self._urls.add(url_keys([str(document.facts.get("url", "")) for document in documents]))
        if self._sketching:
            self._sketches.add(sketches(batch.compared, self._sketching))
        if self._embed:
            vectors = self._embed(documents, batch.units)
            self._vectors = self._vectors or _Column(self._folder, vectors.dtype, vectors.shape[1])
            self._vectors.add(vectors)

    def close(self, path: Path) -> None:
        """Write the file atomically; equal documents give equal bytes."""
        columns = {"text": _binary(self._texts.rows()), "url": _binary(self._urls.rows())}
        if self._sketching:
            table = self._sketches.rows()
            columns["sketch"] = _binary(table)
            bands = [_Column(self._folder, np.uint64, 1) for _ in range(self._sketching.bands)]
            for first in range(0, len(table), _ROWS):
                for band, keys in zip(bands, band_keys(table[first : first + _ROWS], self._sketching), strict=True):
                    band.add(keys)
            for number, band in enumerate(bands):
                keys = band.rows()
                columns[f"band{number}"] = pa.Array.from_buffers(pa.uint64(), len(keys), [None, pa.py_buffer(keys)])
        if self._vectors:
            columns["vector"] = _binary(self._vectors.rows())
        rows = pa.table(columns)
        with atomic_path(path) as aside, pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as out:
            out.write_table(rows, max_chunksize=max(rows.num_rows, 1))


@dataclass(frozen=True)
class Signatures:
    """The signatures of one part of a source. Cheap to send to another process: columns are mapped on first use."""

    path: Path
    source: Source

    @cached_property
    def _table(self) -> pa.Table:
        return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "source": self.source}

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def texts(self) -> np.ndarray:
        """(D, 2) uint64"""
        return self._column("text", np.uint64)

    @property
    def urls(self) -> np.ndarray:
        """(D, 2) uint64"""
        return self._column("url", np.uint64)

    @property
    def sketches(self) -> np.ndarray:
        """(D, values) uint8"""
        return self._column("sketch", np.uint8)

    def band(self, number: int) -> np.ndarray:
        """(D,) uint64 keys of one band."""
        return self._column(f"band{number}", np.uint64)[:, 0]

    @property
    def vectors(self) -> np.ndarray:
        """(D, dimensions) float16"""
        return self._column("vector", np.float16) if len(self) else np.zeros((0, 0), np.float16)

    def _column(self, name: str, dtype: type[np.generic]) -> np.ndarray:
        column = self._table.column(name)
        if not column.num_chunks or not len(column):
            return np.zeros((0, 1 if name.startswith("band") else 2), dtype=dtype)
        data = np.frombuffer(column.chunk(0).buffers()[1], dtype=dtype)
        return data.reshape(len(column), -1)[: len(column)]


def _binary(rows: np.ndarray) -> pa.Array:
    """Each row of numbers as one fixed-size binary value."""
    width = rows.dtype.itemsize * rows.shape[1]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(rows), [None, pa.py_buffer(rows)])
