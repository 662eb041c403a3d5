"""A record of the evaluation items that training text was searched for: hashes in a file beside it, by which a score counts as clean or
not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from lmworks.corpus.contamination.decontaminator import Question
from lmworks.io.files import atomic_path

RECORD = "searched.npy"


def hashes(items: Iterable[Question]) -> np.ndarray:
    """(I,) unique uint64, ascending: hashes of question and answer of each item."""
    digests = [hashlib.blake2b(f"{one.text}\0{one.answer}".encode("utf-8", "surrogatepass"), digest_size=8).digest() for one in items]
    return np.unique(np.frombuffer(b"".join(digests), dtype="<u8"))


def save(folder: Path, items: np.ndarray) -> None:
    """Write the record for the text in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / RECORD) as aside, open(aside, "wb") as handle:
        np.save(handle, items, allow_pickle=False)


def common_items(folders: Sequence[Path]) -> np.ndarray:
    """The items that the text of every folder was searched for; empty if a folder has no record."""
    found: np.ndarray | None = None
    for folder in folders:
        path = folder / RECORD
        items = np.load(path, allow_pickle=False) if path.exists() else np.zeros(0, dtype=np.uint64)
        found = items if found is None else np.intersect1d(found, items)
    return np.zeros(0, dtype=np.uint64) if found is None else found
