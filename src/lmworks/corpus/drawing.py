"""Keyed choices over documents: which ones a `max_bytes` source keeps and which are held out. Functions of seed and document id alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def keys(ids: Sequence[str], seed: int, purpose: str) -> np.ndarray:
    """(N,) uint64 keyed hash of each id; `purpose` makes independent draws."""
    base = hashlib.blake2b(digest_size=8, key=f"{seed}/{purpose}".encode()[:64])

    def one(identity: str) -> bytes:
        state = base.copy()
        state.update(identity.encode("utf-8", "surrogatepass"))
        return state.digest()

    return np.frombuffer(b"".join(map(one, ids)), dtype="<u8")


def within(order: np.ndarray, sizes: np.ndarray, budget: int) -> np.ndarray:
    """The first documents of `order` whose sizes add up to no more than `budget`."""
    total = np.cumsum(sizes[order])
    return order[total <= budget]


def draw(ids: Sequence[str], sizes: np.ndarray, seed: int, max_bytes: int) -> np.ndarray:
    """(N,) bool: documents in the order of their keyed hash until `max_bytes` are full; at least one."""
    order = np.argsort(keys(ids, seed, "draw"), kind="stable")
    chosen = np.zeros(len(ids), dtype=bool)
    chosen[within(order, sizes, max_bytes)] = True
    if len(ids) and not chosen.any():
        chosen[order[0]] = True
    return chosen


def hold_out(ids: Sequence[str], sizes: np.ndarray, seed: int, fraction: float, max_bytes: int) -> np.ndarray:
    """(N,) bool: the held-out documents: `fraction` of them by count (at least one of two or more), together under `max_bytes`.

    A document bigger than what is left of the budget is passed over, so one giant does not empty the held-out set.
    """
    chosen = np.zeros(len(ids), dtype=bool)
    wanted = min(max(round(len(ids) * fraction), 1), len(ids) - 1) if fraction > 0 else 0
    left = max_bytes
    for index in np.argsort(keys(ids, seed, "validation"), kind="stable") if wanted > 0 else ():
        if sizes[index] <= left:
            chosen[index] = True
            left -= sizes[index]
            wanted -= 1
        if not wanted:
            break
    return chosen
