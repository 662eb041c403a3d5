"""Held-out bits per byte: how many bits the model needs for a byte of text that it has not seen, and what models without learning reach.

Bits per byte do not depend on the tokenizer, so models with other vocabularies, and compressors, stand on one scale. The held-out documents
are by domain; the model never trained on them.

Each compressor codes the documents of a domain, joined without separators, as one stream from nothing, so it pays for learning the text as
it goes; the language model comes trained but is not told more than the same bytes. `overall` is one stream over all domains. The byte
unigram is the exception: it is fitted on the training split and applied to the held-out bytes, as the language model is.
"""

from __future__ import annotations

import hashlib
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmworks.errors import UserError
from lmworks.io.run_layout import corpus_files
from lmworks.ui.terminal import bar

if TYPE_CHECKING:  # they import torch, and processes of a corpus read the held-out text
    from lmworks.evaluate.logprobs import LogProbs, Request
    from lmworks.evaluate.sets.forms import Encoder


def _files(corpus_dir: Path, split: str) -> list[Path]:
    files = [path for parts in corpus_files(corpus_dir, split).values() for path in parts]
    if not files:
        raise UserError(f"{corpus_dir / split} holds no .parquet file: run the corpus stage first (lmworks run RECIPE)")
    return files


def held_out(corpus_dir: Path) -> dict[str, list[str]]:
    """Domain -> texts of `corpus_dir/validation`, domains and files by name, documents in the file's order. Empty ones are left out."""
    import pyarrow.parquet as pq

    texts: dict[str, list[str]] = {}
    for file in _files(corpus_dir, "validation"):
        table = pq.read_table(file, columns=["text", "domain"])
        for text, domain in zip(table["text"].to_pylist(), table["domain"].to_pylist(), strict=True):
            if text:
                texts.setdefault(domain, []).append(text)
    if not texts:
        raise UserError(f"{corpus_dir / 'validation'} holds no documents: raise corpus.validation_fraction or add text")
    return dict(sorted(texts.items()))


def training_texts(corpus_dir: Path, batch_rows: int = 1024) -> Iterator[str]:
    """The training split, document by document, in constant memory."""
    import pyarrow.parquet as pq

    for file in _files(corpus_dir, "train"):
        for batch in pq.ParquetFile(file).iter_batches(batch_rows, columns=["text"]):
            yield from batch.column(0).to_pylist()


OVERALL = "overall"
HOW_COMPRESSED = {
    "byte unigram": "fitted on the training split (add-one), applied to the held-out bytes",
    "xz -9e": "one stream from nothing",
    "PPMd": "one stream from nothing; variant I, best of orders 6, 8 and 16, 256 MiB",
}
_PPM_ORDERS = (6, 8, 16)
_PPM_MEMORY = 256 << 20


def byte_counts(texts: Iterable[str]) -> np.ndarray:
    """(256,) int64: how often each byte occurs."""
    counts = np.zeros(256, np.int64)
    for text in texts:
        counts += _histogram(text.encode())
    return counts


def unigram_bits(counts: np.ndarray, data: bytes) -> float:
    """Bits to code `data` byte by byte under frequencies `counts` + 1, all 256 bytes being possible."""
    smoothed = counts + 1.0
    bits_per_symbol = np.log2(smoothed.sum()) - np.log2(smoothed)
    return float(_histogram(data) @ bits_per_symbol)


def _histogram(data: bytes) -> np.ndarray:
    return np.bincount(np.frombuffer(data, np.uint8), minlength=256)


def xz_bits(data: bytes) -> float:
    """Bits of the LZMA2 stream that `xz -9e` makes, without its container (header, index and check: under 100 bytes)."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    return 8.0 * len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=filters))


def ppm_bits(data: bytes) -> float:
    """Bits of PPMd variant I (Shkarin, DCC 2002) at the order that suits `data` best."""
    import pyppmd

    def size(order: int) -> int:
        encoder = pyppmd.Ppmd8Encoder(order, _PPM_MEMORY)
        return len(encoder.encode(data)) + len(encoder.flush())

    return 8.0 * min(size(order) for order in _PPM_ORDERS)


def missing() -> dict[str, str]:
    """References that this installation cannot compute, with what to do about it."""
    return {} if find_spec("pyppmd") else {"PPMd": "needs pyppmd: pip install 'lmworks[eval]'"}


def references(held_out: Mapping[str, Sequence[str]], training: Iterable[str]) -> dict[str, dict[str, float]]:
    """Reference -> domain (and `overall`) -> bits per byte; without those that are `missing`."""
    streams = {domain: "".join(texts).encode() for domain, texts in held_out.items()}
    streams[OVERALL] = b"".join(streams.values())
    counts = byte_counts(training)
    coders: dict[str, Callable[[bytes], float]] = {"byte unigram": lambda data: unigram_bits(counts, data), "xz -9e": xz_bits}
    if "PPMd" not in missing():
        coders["PPMd"] = ppm_bits
    return {name: {domain: coder(data) / len(data) for domain, data in streams.items()} for name, coder in coders.items()}


HOW = (
    "whole documents, each from its own start and without its end token; longer ones in windows of the context length that "
    "overlap by a quarter, each token scored once; a document's first token, which nothing predicts, costs log2(vocabulary) bits; where "
    "the tokenizer puts a BOS token before every text, BOS costs nothing and is not counted, and the first token is predicted from it"
)


ANSWERS = "answers: "
"""Domains of held-out conversations begin with this (`lmworks.evaluate.answers`)."""


@dataclass(frozen=True)
class DocumentBits:
    """The bits of one held-out document. `document` is a hash of its text; `tokens` are those of the text, without a BOS token."""

    document: str
    domain: str
    bits: float
    bytes: int
    tokens: int


@dataclass(frozen=True)
class BitsPerByte:
    bits: float
    bytes: int
    tokens: int
    documents: int

    @property
    def value(self) -> float:
        return self.bits / self.bytes

    def to_json(self) -> dict[str, Any]:
        return {"bits_per_byte": self.value, "bytes": self.bytes, "tokens": self.tokens, "documents": self.documents,
                "bytes_per_token": self.bytes / self.tokens}

    @staticmethod
    def total(parts: Sequence[BitsPerByte]) -> BitsPerByte:
        return BitsPerByte(
            math.fsum(p.bits for p in parts), sum(p.bytes for p in parts), sum(p.tokens for p in parts), sum(p.documents for p in parts)
        )


def windows(ids: Sequence[int], length: int, given: int = 1) -> list[Request]:
    """Requests that score the tokens of a document once each, in order, but for the first `given` ones.

    The first window scores as much as `length` inputs can; each later one moves on by three quarters of a window, so every
    token is predicted from at least `length // 4` tokens (or from all before it, near the start), for 4/3 of the work.
    """
    assert length >= 2
    stride = max(1, length - max(1, length // 4))
    requests: list[Request] = []
    done = given  # the first tokens are the context of the rest
    while done < len(ids):
        end = min(len(ids), length + 1 if done == given else done + stride)
        start = max(0, end - 1 - length)
        requests.append((ids[start:done], ids[done:end]))
        done = end
    return requests


def bits_per_byte(
    held_out: Mapping[str, Sequence[str]], encoder: Encoder, vocab_size: int, logprobs: LogProbs, length: int, label: str = "held-out text"
) -> dict[str, BitsPerByte]:
    """Domain (and `overall`) -> bits per byte. `length` is the context that the model was trained for, in tokens."""
    return by_domain(document_bits(held_out, encoder, vocab_size, logprobs, length, label))


def document_bits(
    held_out: Mapping[str, Sequence[str]], encoder: Encoder, vocab_size: int, logprobs: LogProbs, length: int, label: str = "held-out text"
) -> list[DocumentBits]:
    """The bits of each document, domain by domain; arguments as for `bits_per_byte`."""
    encoded = {domain: [encoder.encode(text) for text in texts] for domain, texts in held_out.items()}
    no_text = len(encoder.prefix)  # from which the first token of a text is predicted
    first_bits = 0.0 if no_text else math.log2(vocab_size)
    requests = {domain: [windows(ids, length, max(1, no_text)) for ids in documents] for domain, documents in encoded.items()}
    found: list[DocumentBits] = []
    with bar(label, sum(map(len, (of_document for documents in requests.values() for of_document in documents)))) as progress:
        for domain, documents in encoded.items():
            progress.note(domain)
            nats = iter(logprobs([request for of_document in requests[domain] for request in of_document], progress.advance))
            for text, ids, own in zip(held_out[domain], documents, requests[domain], strict=True):
                bits = -math.fsum(next(nats) for _ in own) / math.log(2) + first_bits
                data = text.encode()
                digest = hashlib.blake2b(data, digest_size=8).hexdigest()
                found.append(DocumentBits(digest, domain, bits, len(data), len(ids) - no_text))
    return found


def by_domain(documents: Sequence[DocumentBits]) -> dict[str, BitsPerByte]:
    """Domain (and `overall`) -> bits per byte; nothing without documents. Answers in conversations are no part of the overall figure."""
    parts: dict[str, list[BitsPerByte]] = {}
    for one in documents:
        parts.setdefault(one.domain, []).append(BitsPerByte(one.bits, one.bytes, one.tokens, 1))
    measured = {domain: BitsPerByte.total(part) for domain, part in parts.items()}
    text = [value for domain, value in measured.items() if not domain.startswith(ANSWERS)]
    return measured | ({OVERALL: BitsPerByte.total(text)} if text else {})
