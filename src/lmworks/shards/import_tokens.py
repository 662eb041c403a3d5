"""Readers for token files of other tools: tokens, document ends, and ids and origins where they are stored.

- megatron: `PREFIX.bin` and `.idx`, in any type of whole numbers and with any number of sequences per document.
- datatrove (and nanotron, which reads the same): `*.ds` of 2 or 4 bytes per token, `.ds.index` with the end of each document (u64), and
  `.ds.metadata` whose first line ends in `|BYTES`.
- olmo: `*.npy` without a header, documents closed by an end-of-text token; `.csv.gz` beside it, if there, has start, end, id, source
  file and line of each document, as Dolma writes them.

Imports token files of other tools as a source: checked against the tokenizer, shuffled, with lineage if it is stored.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lmworks.errors import UserError
from lmworks.host.pool import map_unordered
from lmworks.io.destinations import require_folder
from lmworks.io.files import atomic_path, explain_damage, read_json, sha256_file, write_json
from lmworks.shards.build import Job, shuffled
from lmworks.shards.encode import EncodedWriter, find_encoded
from lmworks.shards.indexed import IndexedFile, map_file, token_dtype, with_ending
from lmworks.shards.manifest import MANIFEST, TOKEN_BYTES, Manifest, SourceShards
from lmworks.tokenizer import Tokenizer, load
from lmworks.ui.terminal import bar

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


_COUNTS = "closed_and_empty"  # beside the counts of an encoded part, for an import that is continued
_SAMPLED = 32  # documents that are decoded to see whether they are text
_TOKENS_OF_EACH = 200


@dataclass(frozen=True)
class Imported:
    """The result of an import: the manifest of the new folder, how many documents got an end-of-text token, how many were empty, and the
    beginnings of a few documents."""

    manifest: Manifest
    closed: int
    empty: int
    begins: tuple[str, ...]


def import_tokens(
    kind: Format, path: Path, tokenizer_dir: Path, name: str, out_dir: Path, *, domain: str, language: str = "", dtype: str | None = None,
    eos: int | None = None, seed: int = 1, shard_tokens: int = 10**9, threads: int = 1,
) -> Imported:  # fmt: skip
    """Make a shards folder with one source from the token files at `path`. If it is interrupted, the next call continues.

    `eos` is the token that closes documents there, if it is not the tokenizer's own, which takes its place. Raises UserError for files that
    are damaged, hold tokens outside the vocabulary, or do not decode to text.
    """
    _require_import_folder(Path(out_dir))
    tokenizer, found = load(tokenizer_dir), token_files(kind, Path(path))
    out_dir, tokenizer_sha256 = Path(out_dir), sha256_file(tokenizer_dir / "tokenizer.json")
    dtype = dtype or (("uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32") if kind == "olmo" else None)
    begins = _check_text(tokenizer, kind, found[0], dtype, eos)
    facts = [kind, tokenizer_sha256, name, domain, language, dtype, eos]
    with bar("hashes", len(found)) as progress:
        sha256 = {}
        hashed = [(one.with_suffix(".bin") if kind == "megatron" else one,) for one in found]
        for (one,), digest in map_unordered(threads, sha256_file, hashed):
            sha256[one.with_suffix("")] = digest
            progress.advance()
    digests = tuple(_digest([*facts, str(one), sha256[one.with_suffix("")]]) for one in found)
    job = Job(name, "train", domain, tuple(found), digests, _digest([digests, seed, shard_tokens]), None)
    tasks = [
        (kind, one, dtype, eos, tokenizer_dir, job.prefix(out_dir, number), digest, (name, number, domain, language))
        for number, (one, digest) in enumerate(zip(found, digests, strict=True))
    ]
    closed = empty = 0
    with bar("tokens", len(found)) as progress:
        for _, (added, left) in map_unordered(min(threads, len(found)), import_file, tasks):
            closed, empty = closed + added, empty + left
            progress.advance()
    ((_, split),) = shuffled([job], out_dir, seed, shard_tokens, threads)
    with atomic_path(out_dir / TOKEN_BYTES) as aside, open(aside, "wb") as handle:
        np.save(handle, tokenizer.byte_lengths, allow_pickle=False)
    manifest = Manifest(
        seed=seed,
        vocab_size=tokenizer.vocab_size,
        dtype=token_dtype(tokenizer.vocab_size).name,
        tokenizer_sha256=tokenizer_sha256,
        token_bytes_sha256=sha256_file(out_dir / TOKEN_BYTES),
        sources=(SourceShards(name=name, domain=domain, train=split),),
    )
    manifest.save(out_dir / MANIFEST)
    shutil.rmtree(out_dir / "encoded")
    return Imported(manifest, closed, empty, begins)


def _require_import_folder(out_dir: Path) -> None:
    """Raise UserError for a folder with files that no import has written, or for a path that cannot be one."""
    require_folder(out_dir)
    if out_dir.exists() and not (out_dir / MANIFEST).exists():
        unknown = next((path.name for path in sorted(out_dir.iterdir()) if path.name not in ("encoded", "train", TOKEN_BYTES)), None)
        if unknown is not None:
            raise UserError(f"{out_dir} holds {unknown} and was not made by an import; choose another folder with --out")


def import_file(
    kind: Format, path: Path, dtype: str | None, eos: int | None, tokenizer_dir: Path, prefix: Path, inputs: str,
    known: tuple[str, int, str, str],
) -> tuple[int, int]:  # fmt: skip
    """Encode one file as a part. Returns how many documents got an end-of-text token, and how many were empty."""
    tokenizer = load(tokenizer_dir)
    closing = tokenizer.eos_id if eos is None else eos
    foreign = open_token_file(kind, path, dtype, closing)
    name, part, domain, language = known
    closed = empty = start = 0
    counts = with_ending(prefix, ".json")
    if find_encoded(prefix, inputs) and _COUNTS in (made := read_json(counts)):
        closed, empty = made[_COUNTS]
        return closed, empty
    with EncodedWriter(prefix, token_dtype(tokenizer.vocab_size), inputs) as writer:
        for number, end in enumerate(foreign.ends.tolist()):
            tokens = np.asarray(foreign.tokens[start:end], np.int64)
            start = end
            if tokens.size and (tokens.max() >= tokenizer.vocab_size or tokens.min() < 0):
                raise _outside_vocabulary_error(path, number, tokens, tokenizer.vocab_size)
            ended = tokens.size > 0 and int(tokens[-1]) == closing
            text = tokens[:-1] if ended else tokens
            if not text.size:
                empty += 1
                continue
            closed += not ended
            identity, origin = foreign.known[number] if foreign.known else ("", "")
            about = (identity or f"{name}/{part}/{number}", origin or f"{path}:{number}", domain, language)
            writer.add(np.append(text, tokenizer.eos_id), int(tokenizer.byte_lengths[text].sum()), about)
    write_json(counts, {**read_json(counts), _COUNTS: [closed, empty]})
    return closed, empty


def _check_text(tokenizer: Tokenizer, kind: Format, path: Path, dtype: str | None, eos: int | None) -> tuple[str, ...]:
    """The beginnings of documents. Raises UserError if most do not decode to text, as with another tokenizer or dtype."""
    foreign = open_token_file(kind, path, dtype, tokenizer.eos_id if eos is None else eos)
    texts = []
    for number in sorted({at * len(foreign.ends) // _SAMPLED for at in range(_SAMPLED)} if len(foreign.ends) else ()):
        start = int(foreign.ends[number - 1]) if number else 0
        tokens = np.asarray(foreign.tokens[start : min(start + _TOKENS_OF_EACH, int(foreign.ends[number]))], np.int64)
        if tokens.size and (tokens.max() >= tokenizer.vocab_size or tokens.min() < 0):
            raise _outside_vocabulary_error(path, number, tokens, tokenizer.vocab_size)
        texts.append(tokenizer.decode(tokens.tolist(), skip_special=True))
    broken = sum("\ufffd" in text[:-1] for text in texts)  # the last character may be cut
    if broken > len(texts) / 2:
        raise UserError(f"{path}: {broken} of {len(texts)} documents do not decode to text; another tokenizer, or another --dtype?")
    return tuple(text[:80] for text in texts[:3])


def _outside_vocabulary_error(path: Path, number: int, tokens: np.ndarray, vocab_size: int) -> UserError:
    worst = int(tokens.max()) if tokens.max() >= vocab_size else int(tokens.min())
    return UserError(
        f"{path}: document {number} holds token {worst}, outside the vocabulary of {vocab_size:,}; another tokenizer, or another --dtype?"
    )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
