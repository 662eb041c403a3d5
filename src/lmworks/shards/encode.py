"""Encoding of one part of the corpus, in corpus order: the first half of building shards.

An encoded part is a `.bin` and `.idx` and, as `.about.arrow`, one row per document with its lineage. Both are memory-mapped
when the documents are shuffled. A `.json` beside them, written last, records the inputs of the part.

Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255): a document is split into three pieces, and the model learns to write the
middle last.

A split document is stored in one of two orders, with the tokenizer's special tokens between the pieces:

    <|code_prefix|> prefix <|code_suffix|> suffix <|code_middle|> middle            PSM, the prompt format of editors
    <|code_prefix|> <|code_suffix|> suffix <|code_middle|> prefix middle            SPM, in which the middle follows the prefix

Whether a document is split, where, and in which order follow from the seed and its id alone. The special tokens are inserted as ids after
encoding: text never becomes a special token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from lmworks.errors import UserError
from lmworks.io.files import atomic_path, read_json, sha256_file, write_json
from lmworks.recipe.schema.corpus import Fim
from lmworks.shards.indexed import IndexedWriter, token_dtype, with_ending

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lmworks.tokenizer import Tokenizer


PREFIX, MIDDLE, SUFFIX = "<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"


def encode_documents(
    tokenizer: Tokenizer, ids: Sequence[str], texts: Sequence[str], fim: Fim | None, seed: int, threads: int | None
) -> list[np.ndarray]:
    """The tokens of each text, (T,) uint32 without the closing token; documents drawn for FIM are in one of its orders."""
    if fim is None:
        return tokenizer.encode_batch(texts, threads=threads)
    prefix, middle, suffix = (_special(tokenizer, name) for name in (PREFIX, MIDDLE, SUFFIX))
    cuts = [split_document(identity, text, fim, seed) for identity, text in zip(ids, texts, strict=True)]
    pieces = [piece for text, found in zip(texts, cuts, strict=True) for piece in (found[:3] if found else (text,))]
    encoded = iter(tokenizer.encode_batch(pieces, threads=threads))
    documents = []
    for found in cuts:
        if found is None:
            documents.append(next(encoded))
            continue
        before, between, after = next(encoded), next(encoded), next(encoded)
        psm = [[prefix], before, [suffix], after, [middle], between]
        spm = [[prefix, suffix], after, [middle], before, between]
        documents.append(np.concatenate([np.asarray(part, np.uint32) for part in (spm if found[3] else psm)]))
    return documents


def split_document(identity: str, text: str, fim: Fim, seed: int) -> tuple[str, str, str, bool] | None:
    """(prefix, middle, suffix, whether the suffix comes first) of a document; None for a document that is not split.

    The two positions are drawn uniformly over characters, as the paper found best: pieces may begin inside a word, or be empty.
    """
    digest = hashlib.blake2b(identity.encode(), key=f"{seed}/infill".encode()[:64], digest_size=32).digest()
    chosen, order, *places = (int.from_bytes(digest[start : start + 8], "little") for start in range(0, 32, 8))
    if chosen >= fim.rate * 2**64:
        return None
    first, last = sorted(place % (len(text) + 1) for place in places)
    return text[:first], text[first:last], text[last:], order < fim.spm_rate * 2**64


def _special(tokenizer: Tokenizer, name: str) -> int:
    if name not in tokenizer.special:
        raise UserError(f"the tokenizer in {tokenizer.directory} has no {name}, which fim needs: set fim to null, or train a new tokenizer")
    return tokenizer.special[name]


ABOUT = ".about.arrow"
_KNOWN = ("id", "origin", "domain", "language")
_ENCODE_BYTES = 8 << 20  # text handed to the tokenizer at one time
_ABOUT_ROWS = 1 << 16


@dataclass(frozen=True)
class Encoded:
    """An encoded part on disk. `bytes` are those of the text."""

    prefix: Path
    documents: int
    tokens: int
    bytes: int


class EncodedWriter:
    """Writes an encoded part document by document; `with EncodedWriter(prefix, dtype, inputs) as writer: writer.add(...)`."""

    def __init__(self, prefix: Path, dtype: np.dtype, inputs: str) -> None:
        self._prefix, self._inputs, self._dtype = Path(prefix), inputs, dtype
        self._rows: list[list[Any]] = [[] for _ in range(5)]
        self._bytes = 0

    def __enter__(self) -> EncodedWriter:
        import pyarrow as pa

        self._prefix.parent.mkdir(parents=True, exist_ok=True)
        self._schema = pa.schema([(name, pa.large_string()) for name in _KNOWN] + [("bytes", pa.int64())])
        with ExitStack() as stack:
            self._tokens = stack.enter_context(IndexedWriter(self._prefix, self._dtype))
            aside = stack.enter_context(atomic_path(with_ending(self._prefix, ABOUT)))
            self._about = stack.enter_context(pa.ipc.new_file(str(aside), self._schema))
            self._stack = stack.pop_all()
        return self

    def add(self, tokens: np.ndarray, size: int, known: tuple[str, str, str, str]) -> None:
        """One document: its tokens with the closing one, its bytes of text, and its id, origin, domain and language."""
        self._tokens.add(tokens)
        for column, value in zip(self._rows, (*known, size), strict=True):
            column.append(value)
        self._bytes += size
        if len(self._rows[0]) >= _ABOUT_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        self._about.write_batch(pa.record_batch([pa.array(c, f.type) for c, f in zip(self._rows, self._schema, strict=True)], self._schema))
        self._rows = [[] for _ in self._rows]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._stack:  # so that what goes wrong while closing undoes the files as well
            if error is not None:
                raise error
            self._flush()
        counts = {"documents": self._tokens.documents, "tokens": self._tokens.tokens, "bytes": self._bytes}
        write_json(with_ending(self._prefix, ".json"), {"inputs": self._inputs, **counts})


def find_encoded(prefix: Path, inputs: str) -> Encoded | None:
    """The encoded part, if it was made from these inputs and is complete."""
    path = with_ending(prefix, ".json")
    whole = all(with_ending(prefix, ending).exists() for ending in (".json", ".bin", ".idx", ABOUT))
    made = read_json(path) if whole else {}
    return Encoded(prefix, made["documents"], made["tokens"], made["bytes"]) if made.get("inputs") == inputs else None


def encode_part(
    path: Path, tokenizer_dir: Path, prefix: Path, inputs: str, threads: int, fim: Fim | None = None, seed: int = 0
) -> None:
    """Encode the documents of a corpus file, some of them in `fim` order; a UserError if the tokenizer loses bytes of one."""
    tokenizer = _load(tokenizer_dir, sha256_file(tokenizer_dir / "tokenizer.json"))
    number = 0
    with EncodedWriter(prefix, token_dtype(tokenizer.vocab_size), inputs) as writer:
        for batch in _texts(open_parquet(path)):
            texts: list[str] = batch.column("text").to_pylist()
            known = list(zip(*(batch.column(name).to_pylist() for name in _KNOWN), strict=True))
            encoded = encode_documents(tokenizer, [about[0] for about in known], texts, fim, seed, threads)
            for text, ids, about in zip(texts, encoded, known, strict=True):
                size = len(text) if text.isascii() else len(text.encode())
                if tokenizer.lossless and int(tokenizer.byte_lengths[ids].sum()) != size:
                    raise UserError(
                        f"the tokenizer does not give back document {number} of {path} byte for byte; "
                        "use a byte-level tokenizer without normalization"
                    )
                writer.add(np.concatenate([np.array(tokenizer.prefix, ids.dtype), ids, [tokenizer.eos_id]]), size, about)
                number += 1


@lru_cache(maxsize=1)
def _load(directory: Path, sha256: str) -> Tokenizer:
    from lmworks.tokenizer import load

    return load(directory)


def open_parquet(path: Path) -> pq.ParquetFile:
    """A file of the corpus; a UserError if it is broken."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not readable parquet ({str(error).splitlines()[0]}); delete the corpus folder and run again") from None


def _texts(file: pq.ParquetFile) -> Iterator[pa.Table]:
    """The documents in tables of about `_ENCODE_BYTES`."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    for batch in file.iter_batches(batch_size=64, columns=["text", *_KNOWN]):
        held.append(batch)
        if sum(one.nbytes for one in held) >= _ENCODE_BYTES:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)
