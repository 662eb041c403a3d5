"""What a set of rows lost, by reason, with examples; and an even draw from it."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmworks.progress import console

_EXAMPLES = 5
_FIRST = 3  # reasons that are told of a set or a file without a good row
SPARE = 4  # rows held ready per row asked for, since some repeat or do not fit
T = TypeVar("T")


@dataclass
class LeftOut:
    """Rows that were left out, by reason, and what else is to be told of a set (`noted`)."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, str]] = field(default_factory=list)
    noted: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    _files: dict[str, list[str] | None] = field(default_factory=dict)  # by file its first faults; None where a row was good

    def add(self, origin: str, reason: str) -> None:
        """Count a row. `reason` has its detail after a colon."""
        kind, _, detail = reason.partition(": ")
        self.counts[kind] += 1
        if len(self.examples) < _EXAMPLES and kind not in {one["reason"] for one in self.examples}:
            self.examples.append({"reason": kind, "origin": origin, "detail": detail})
        file = origin.rpartition(":")[0]  # a generated question has none
        faults = self._files.setdefault(file, []) if file and kind != "repeated" else None
        if faults is not None and len(faults) < _FIRST:
            faults.append(f"{origin}: {reason}")

    def keep(self, origin: str) -> None:
        """Say that a row was good."""
        self._files[origin.rpartition(":")[0]] = None

    def too_long(self, tokens: int) -> None:
        """Remember what `sequence_length` would keep everything."""
        self.longest = max(self.longest, tokens)

    def said(self) -> str:
        """Why nothing was found, in words: the reasons with their counts, and the first faults."""
        if not self.counts:
            return "it is empty"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common())
        firsts = [f"{one['origin']} {one['detail'] or one['reason']}".rstrip() for one in self.examples[:_FIRST]]
        return f"left out: {reasons}; first: {'; '.join(firsts)}"

    def lost_files(self) -> list[str]:
        """For the first files without a good row, their first faults, in words, and how many others there are."""
        lost = [(path, faults) for path, faults in self._files.items() if faults]
        if len(lost) == len(self._files):
            return []  # it is said by the error
        told = [f"nothing of {path} is used: {'; '.join(faults)}" for path, faults in lost[:_FIRST]]
        return told + ([f"nothing of {len(lost) - _FIRST:,} more files is used"] if len(lost) > _FIRST else [])

    def report(self) -> dict[str, Any]:
        """For a manifest."""
        noted = {key: count for key, count in self.noted.items() if count}
        found: dict[str, Any] = {"noted": noted, "left_out": dict(self.counts.most_common()), "examples": self.examples}
        return found | ({"sequence_length_for_all": self.longest} if self.longest else {})

    def ending(self) -> str:
        """The end of a line about a set: what was noted and left out, and the remedy."""
        said = "".join(f"; {count:,} {what}" for what, count in self.noted.items() if count)
        left_out = [f"{number:,} {reason}" for reason, number in self.counts.most_common()]
        said += f"; left out: {', '.join(left_out)}" if left_out else ""
        return said + (f" (sequence_length {self.longest:,} tokens would keep all of each)" if self.longest else "")


def tell_set(line: str, body: dict[str, Any], lost: LeftOut) -> None:
    """Print the line about a set, and what there is to say about its files. `body` is its part of a manifest."""
    drawn = f"; drawn evenly from {body['rows']:,} rows, by count" if body["drawn"] else ""
    skipped = f"; {body['skipped_files']}" if body["skipped_files"] else ""
    console.print(f"{line}{drawn}{lost.ending()}{skipped}", style="dim", markup=False, highlight=False)
    for warning in lost.lost_files():
        console.print(f"{line.partition(':')[0]}: {warning}", style="yellow", markup=False, highlight=False)


def digest(*parts: object) -> bytes:
    """8 bytes that depend on all of `parts`."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()


class Drawn(Iterable[T]):
    """At most `limit` rows, drawn evenly with some spare ones and in a random order that depends on the seed; without a limit, all as they
    come, of which none is held in memory. `total` is the number of rows, once they were read."""

    def __init__(self, rows: Iterable[T], limit: int | None, seed: int, name: str) -> None:
        self._rows, self._limit, self._seed, self._name = rows, limit, seed, name
        self.total = 0

    def __iter__(self) -> Iterator[T]:
        if self._limit is None:
            yield from self._counted()
            return
        keyed = ((digest(self._seed, self._name, number), number, row) for number, row in enumerate(self._counted()))
        yield from (row for _, _, row in heapq.nsmallest(SPARE * self._limit, keyed))

    def _counted(self) -> Iterator[T]:
        for row in self._rows:
            self.total += 1
            yield row
