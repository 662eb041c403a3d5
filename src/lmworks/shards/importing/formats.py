"""Readers for token files of other tools: tokens, document ends, and ids and origins where they are stored.

- megatron: `PREFIX.bin` and `.idx`, in any type of whole numbers and with any number of sequences per document.
- datatrove (and nanotron, which reads the same): `*.ds` of 2 or 4 bytes per token, `.ds.index` with the end of each document (u64), and
  `.ds.metadata` whose first line ends in `|BYTES`.
- olmo: `*.npy` without a header, documents closed by an end-of-text token; `.csv.gz` beside it, if there, has start, end, id, source
  file and line of each document, as Dolma writes them.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lmworks.errors import UserError
from lmworks.files import explain_damage
from lmworks.shards.format.checksums import map_file
from lmworks.shards.format.indexed import IndexedFile

Format = Literal["megatron", "datatrove", "nanotron", "olmo"]
_ENDINGS: dict[str, str] = {"megatron": ".idx", "datatrove": ".ds", "nanotron": ".ds", "olmo": ".npy"}
_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class TokenFile:
    """One token file: its tokens (n,), the end of each document (d,) int64, and (id, origin) of each if they are stored."""

    tokens: np.ndarray
    ends: np.ndarray
    known: list[tuple[str, str]] | None = None


def token_files(kind: Format, path: Path) -> list[Path]:
    """The token files at `path`, which is one of them or a folder; a UserError if there are none."""
    ending = _ENDINGS[kind]
    if kind == "megatron" and not path.is_dir():
        path = path.with_name(path.name.removesuffix(".bin").removesuffix(".idx") + ".idx")
    found = sorted(path.rglob(f"*{ending}")) if path.is_dir() else [path] if path.exists() else []
    if not found:
        raise UserError(f"{path} is not a token file of {kind}, and contains none (*{ending})")
    return found


def open_token_file(kind: Format, path: Path, dtype: str | None, eos: int) -> TokenFile:
    """Open a token file. `dtype` is needed if the file does not state it; `eos` ends documents if the file has no index of them."""
    with explain_damage(path):
        if kind == "megatron":
            return _megatron(path)
        if kind == "olmo":
            return _olmo(path, dtype, eos)
        return _datatrove(path, dtype, eos)


def _megatron(path: Path) -> TokenFile:
    file = IndexedFile(path.with_name(path.name.removesuffix(".idx")))
    starts = file.document_start(np.arange(file.documents + 1))
    if (np.diff(starts) < 0).any() or (file.documents and starts[0] != 0):
        raise UserError(f"{path}: its documents do not lie one after the other; write it anew with Megatron's preprocess_data.py")
    return TokenFile(file.tokens, starts[1:])


def _datatrove(path: Path, dtype: str | None, eos: int) -> TokenFile:
    about, index = path.with_name(path.name + ".metadata"), path.with_name(path.name + ".index")
    if dtype is None and about.exists():
        size = about.read_text(encoding="utf-8").split("\n")[0].rpartition("|")[2]
        dtype = {"2": "uint16", "4": "uint32"}.get(size)
    if dtype is None:
        raise UserError(f"{about} does not say how many bytes a token has; give --dtype uint16 or uint32")
    tokens = _raw(path, dtype)
    if not index.exists():
        return TokenFile(tokens, _split(tokens, eos))
    return TokenFile(tokens, _checked_ends(index, np.frombuffer(index.read_bytes(), "<u8").astype(np.int64), len(tokens)))


def _olmo(path: Path, dtype: str | None, eos: int) -> TokenFile:
    if dtype is None:
        raise UserError(f"{path} does not say how many bytes a token has; give --dtype uint16 or uint32")
    tokens = np.load(path, mmap_mode="r", allow_pickle=False) if path.open("rb").read(6) == b"\x93NUMPY" else _raw(path, dtype)
    about = path.with_suffix(".csv.gz")
    if not about.exists():
        return TokenFile(tokens, _split(tokens, eos))
    ends, known = [], []
    with gzip.open(about, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.reader(lines):
            if len(row) >= 2 and row[1].isdigit():
                ends.append(int(row[1]))
                known.append((row[2] if len(row) > 2 else "", ":".join(row[3:5])))
    return TokenFile(tokens, _checked_ends(about, np.array(ends, np.int64), len(tokens)), known)


def _raw(path: Path, dtype: str) -> np.ndarray:
    kind = np.dtype(dtype).newbyteorder("<")
    data = map_file(path)
    if len(data) % kind.itemsize:
        raise UserError(f"{path} has {len(data):,} bytes, which is not a whole number of {dtype} tokens; try another --dtype")
    return np.frombuffer(data, kind)


def _split(tokens: np.ndarray, eos: int) -> np.ndarray:
    """Documents end with `eos`; what follows the last one is a document too."""
    found = [at + 1 + np.flatnonzero(tokens[at : at + _AT_ONCE] == eos) for at in range(0, len(tokens), _AT_ONCE)]
    ends = np.concatenate(found) if found else np.empty(0, np.int64)
    return ends if len(tokens) == 0 or (len(ends) and ends[-1] == len(tokens)) else np.append(ends, len(tokens))


def _checked_ends(path: Path, ends: np.ndarray, tokens: int) -> np.ndarray:
    if len(ends) == 0 and tokens == 0:
        return ends
    if len(ends) == 0 or (np.diff(ends) < 0).any() or ends[0] < 0 or ends[-1] != tokens:
        last = int(ends[-1]) if len(ends) else 0
        raise UserError(f"{path} does not fit its tokens: documents end at {last:,} of {tokens:,}; is a file cut off, or --dtype another?")
    return ends
