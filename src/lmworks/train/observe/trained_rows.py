"""Which rows (sequences) a run has trained on, by hash: rows that come again, and whether a resumed run reads the next rows or old ones."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from lmworks.shards.batch import IGNORE, Batch

_RECENT = 65_536  # rows of this rank that a row is compared with
_SAVED = 128  # of the first and of the last rows of this rank, in the meta of a checkpoint
_MASK = (1 << 64) - 1


def row_hashes(batch: Batch) -> list[int]:
    """64 bits of each row that has a label, from its tokens: rows that only fill a batch up are equal and teach nothing."""
    trained = (batch.labels != IGNORE).any(axis=1)
    rows = (row for row, one in zip(batch.tokens, trained, strict=True) if one)
    return [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little") for row in rows]


def combined(hashes: Iterable[int]) -> int:
    """A hash of a batch: the sum of those of its rows, so that it can be added up over ranks; a signed number of 64 bits."""
    total = sum(hashes) & _MASK
    return total - (1 << 64) if total >> 63 else total


class TrainedRows:
    """The rows of this rank. `repeated` and `rows` count since `take_share`; memory is that of 65,536 hashes."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._known: set[int] = set()
        self._first: list[int] = []
        self._saved: set[int] = set()  # of the run that this one has resumed
        self._rows = self._repeated = 0
        self._trained = False  # on rows, on any rank, since `take_share`
        self.newest: list[int] = []

    def add(self, hashes: list[int], elsewhere: bool = False) -> float:
        """Add the rows of a step, which are `newest` from now on; returns the share of them that the checkpoint knows, if the run was
        resumed. `elsewhere`: other ranks may have rows of the step, where this one has none."""
        self.newest, self._trained = hashes, self._trained or bool(hashes) or elsewhere
        for one in hashes:
            self._repeated += one in self._known
            if one not in self._known:
                self._known.add(one)
                self._recent.append(one)
        while len(self._recent) > _RECENT:
            self._known.discard(self._recent.popleft())
        self._rows += len(hashes)
        self._first += hashes[: _SAVED - len(self._first)]
        return sum(one in self._saved for one in hashes) / max(1, len(hashes))

    def take_share(self) -> float | None:
        """The share of the rows since the last call that equal one before them, 0 of none; None if no rank had any."""
        share = self._repeated / max(1, self._rows) if self._trained else None
        self._rows = self._repeated = 0
        self._trained = False
        return share

    def state(self) -> dict[str, Any]:
        """The first and the last rows, for the meta of a checkpoint."""
        last = list(self._recent)[-_SAVED:]
        return {"first": _hex(self._first), "last": _hex(last)}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, or go back to it: rows that were trained on since do not count as known."""
        self._first, last = _numbers(state["first"]), _numbers(state["last"])
        self._saved = {*self._first, *last}
        self._recent, self._known = deque(last), set(last)
        self._rows = self._repeated = 0


class StepRecord:
    """Loss, learning rate and rows of the last step, for the meta of a checkpoint; the first step of a resumed run is compared with them.

    `report` writes to the ledger. The event `resumed_step` shows a loss that jumps, another learning rate, and rows that were trained on.
    """

    def __init__(self, stage: str, report: Callable[..., None]) -> None:
        self.rows = TrainedRows()
        self._stage, self._report = stage, report
        self._last: dict[str, Any] | None = None
        self._resumed = False

    def add(self, step: int, hashes: list[int], batch_hash: int, loss: float, learning_rate: float) -> None:
        """Record a step: the hashes of this rank's rows, and the sum over all ranks."""
        known, before = self.rows.add(hashes, elsewhere=batch_hash != 0), self._last
        self._last = {"loss": _number(loss), "learning_rate": learning_rate, "rows": f"{batch_hash & _MASK:016x}"}
        if self._resumed and before is not None:
            saved = {f"saved_{name}": value for name, value in before.items()}
            self._report("resumed_step", stage=self._stage, step=step, **self._last, **saved, repeated=round(known, 6))
        self._resumed = False

    def resumed(self) -> None:
        """The next step is the first after a resume."""
        self._resumed = True

    def meta(self) -> dict[str, Any]:
        """For the meta of a checkpoint; nothing before the first step."""
        return {} if self._last is None else {"last_step": self._last | {"trained": self.rows.state()}}

    def load(self, meta: dict[str, Any]) -> None:
        """Continue from a checkpoint, or go back to it. Those of earlier versions do not have the record."""
        last = dict(meta.get("last_step", {}))
        self.rows.load(last.pop("trained", {"first": "", "last": ""}))
        self._last = last or None


def _number(value: float) -> float | None:
    """None for a number that JSON does not have."""
    return value if math.isfinite(value) else None


def _hex(hashes: Iterable[int]) -> str:
    return "".join(f"{one:016x}" for one in hashes)


def _numbers(text: str) -> list[int]:
    return [int(text[at : at + 16], 16) for at in range(0, len(text), 16)]
