"""Imports token files of other tools as a source: checked against the tokenizer, shuffled, with lineage as far as it is stored."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.files import atomic_path, sha256_file
from lmworks.pool import map_unordered
from lmworks.progress import bar
from lmworks.shards.build.build_shards import Job, shuffled
from lmworks.shards.build.encode import EncodedWriter, find_encoded
from lmworks.shards.format.indexed import token_dtype
from lmworks.shards.format.manifest import MANIFEST, TOKEN_BYTES, Manifest, SourceShards
from lmworks.shards.importing.formats import Format, open_token_file, token_files
from lmworks.tokenizer import Tokenizer, load

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
    """Raise UserError for a folder with files that no import has written."""
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
    if find_encoded(prefix, inputs):
        return 0, 0
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
