"""The held-out documents that the model never trained on, by domain, and what models without learning reach on them.

Each compressor codes the documents of a domain, joined without separators, as one stream from nothing, so it pays for learning the text as
it goes; the language model comes trained but is not told more than the same bytes. `overall` is one stream over all domains. The byte
unigram is the exception: it is fitted on the training split and applied to the held-out bytes, as the language model is.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.io.run_layout import corpus_files


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
HOW = {
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
