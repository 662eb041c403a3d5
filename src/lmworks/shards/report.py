"""`report.json` of the shards: what the token files say about the text, beyond their counts.

- The entropy of single tokens of each source: what a model costs that knows how frequent tokens are, and nothing of their order.
- Held-out text that training text contains: runs of tokens, found by their hashes. Decontamination searches the documents of the corpus
  if it is on; this searches what is trained on, also where it is off, and in token files that were imported.

It takes a twentieth of the time that encoding the text takes, and is no input of a later stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.host.pool import map_unordered
from lmworks.io.files import write_json
from lmworks.shards.indexed import IndexedFile
from lmworks.shards.manifest import Manifest, SourceShards

REPORT = "report.json"
_BYTES = 200  # of text that a run has at least: two lines, which are no boilerplate by chance
_KEPT = 32  # one of so many runs is compared, a power of two; chosen by its hash, so that it is the same in both texts
_PIECE = 1 << 15  # tokens that are hashed at a time
_MOST_HELD_OUT = 1 << 24  # tokens of held-out text of each source
_ODD = 0x9E3779B97F4A7C15


def write_report(shards_dir: Path, manifest: Manifest, processes: int) -> dict[str, Any]:
    """Write `report.json`; returns it.

    `window_tokens`: length of a run. `held_out_runs`: how many were compared. `held_out_found`: the share of them that training text
    contains; null without held-out text. `sources`: the same share by source of the training text. `unigram_nats`: entropy of single
    tokens of the training text in nats, by source.
    """
    window = window_of(manifest)
    held_out = _held_out(shards_dir, manifest, window)
    found = {source.name: np.zeros(len(held_out), bool) for source in manifest.sources}
    counts: dict[str, np.ndarray] = {source.name: np.zeros(manifest.vocab_size, np.int64) for source in manifest.sources}
    names = {Path(shards_dir) / shard.prefix: source.name for source in manifest.sources for shard in source.train.shards}
    tasks = [(prefix, manifest.vocab_size, window, held_out) for prefix in names]
    for task, (tokens, hits) in map_unordered(max(1, min(processes, len(tasks))), search, tasks):
        counts[names[task[0]]] += tokens
        found[names[task[0]]] |= hits
    report = {
        "window_tokens": window,
        "held_out_runs": len(held_out),
        "held_out_found": float(np.any(list(found.values()), axis=0).mean()) if len(held_out) else None,
        "sources": {name: float(hits.mean()) if len(hits) else 0.0 for name, hits in found.items()},
        "unigram_nats": {name: entropy(tokens) for name, tokens in counts.items()},
    }
    write_json(Path(shards_dir) / REPORT, report)
    return report


def window_of(manifest: Manifest) -> int:
    """Tokens of a run: the smallest power of two with `_BYTES` bytes of text on average."""
    tokens, size = (sum(getattr(source.train, name) for source in manifest.sources) for name in ("tokens", "bytes"))
    per_token = max(size / max(tokens, 1), 0.25)
    return int(2 ** math.ceil(math.log2(max(_BYTES / per_token, 2))))


def search(prefix: Path, vocab_size: int, window: int, held_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How often a shard has each token, (vocab_size,) int64, and which of the hashes in `held_out` (ascending) it has, bool."""
    file = IndexedFile(prefix)
    counts, hits = np.zeros(vocab_size, np.int64), np.zeros(len(held_out), bool)
    for start in range(0, len(file), _PIECE):
        tokens = file.read(start, min(start + _PIECE + window - 1, len(file)))
        counts += np.bincount(tokens[:_PIECE], minlength=vocab_size)[:vocab_size]
        if len(held_out):
            hashes = run_hashes(tokens, window)
            places = np.minimum(np.searchsorted(held_out, hashes), len(held_out) - 1)
            hits[places[held_out[places] == hashes]] = True
    return counts, hits


def run_hashes(tokens: np.ndarray, window: int) -> np.ndarray:
    """The hashes of the runs of `window` tokens (a power of two) that are compared, uint64: a polynomial in the tokens, by doubling."""
    if len(tokens) < window:
        return np.zeros(0, np.uint64)
    hashes = tokens.astype(np.uint64) + np.uint64(1)
    factor, length = _ODD, 1
    while length < window:
        first = hashes[:-length] * np.uint64(factor)
        first += hashes[length:]
        hashes, factor, length = first, factor * factor % (1 << 64), 2 * length
    hashes ^= hashes >> np.uint64(32)  # the low bits of a product know the last tokens only
    return hashes[(hashes & np.uint64(_KEPT - 1)) == 0]


def entropy(counts: np.ndarray) -> float:
    """The entropy of a distribution in nats; 0 for one without counts."""
    shares = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(shares * np.log(shares)).sum())


def _held_out(shards_dir: Path, manifest: Manifest, window: int) -> np.ndarray:
    """The hashes of runs of held-out text, ascending and each once."""
    found = [np.zeros(0, np.uint64)]
    for source in manifest.sources:
        left = _MOST_HELD_OUT
        for prefix in _validation(shards_dir, source):
            file = IndexedFile(prefix)
            found.append(run_hashes(file.read(0, min(left, len(file))), window))
            left -= min(left, len(file))
    return np.unique(np.concatenate(found))


def _validation(shards_dir: Path, source: SourceShards) -> Iterable[Path]:
    return [Path(shards_dir) / shard.prefix for shard in source.validation.shards] if source.validation else []
