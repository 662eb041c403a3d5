"""Random choices by keyed hash: which documents a source with `max_bytes` keeps, and which are held out. Functions of seed and document id
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def keys(ids: Sequence[str], seed: int, purpose: str) -> np.ndarray:
    """(N,) uint64 keyed hash of each id; a different `purpose` gives independent draws."""
    base = hashlib.blake2b(digest_size=8, key=f"{seed}/{purpose}".encode()[:64])

    def one(identity: str) -> bytes:
        state = base.copy()
        state.update(identity.encode("utf-8", "surrogatepass"))
        return state.digest()

    return np.frombuffer(b"".join(map(one, ids)), dtype="<u8")


def threshold(keys: np.ndarray, sizes: np.ndarray, max_bytes: int) -> int:
    """The key below which documents are drawn: in the order of keys, as many as fit into `max_bytes`, and at least one."""
    if not len(keys):
        return 0
    order = np.argsort(keys, kind="stable")
    count = max(int(np.searchsorted(np.cumsum(sizes[order]), max_bytes, side="right")), 1)
    return int(keys[order[count]]) if count < len(keys) else 1 << 64


def held_out(keys: np.ndarray, sizes: np.ndarray, fraction: float, max_bytes: int) -> np.ndarray:
    """(N,) bool: the held-out documents: `fraction` of them by count (at least one of two or more), with `max_bytes` in all.

    They are taken in the order of keys. A document larger than the remaining budget is skipped, so that a single large one does not leave
    the held-out set empty.
    """
    chosen = np.zeros(len(keys), dtype=bool)
    wanted = min(max(round(len(keys) * fraction), 1), len(keys) - 1) if fraction > 0 else 0
    left, least = max_bytes, int(sizes.min()) if len(sizes) else 0
    for index in np.argsort(keys, kind="stable") if wanted > 0 else ():
        if sizes[index] <= left:
            chosen[index] = True
            left -= int(sizes[index])
            wanted -= 1
        if not wanted or left < least:
            break
    return chosen
