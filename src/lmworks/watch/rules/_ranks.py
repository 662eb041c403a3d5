"""What the rules of ranks have in common: the restarts of a stage, each with the ranks that caused it and how they have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmworks.watch.data_facts import number
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change

AGAIN = Change(advice="run the same command again: it resumes from the last checkpoint", cost="the steps since the last checkpoint")
_ASKING = ("SIGINT", "SIGTERM")  # of a user, a scheduler, or the launcher when another rank has failed


@dataclass(frozen=True)
class Failure:
    """A restart, or the end of the run for the same reason. exits: how ranks have ended, in the order of their ends."""

    step: int
    ranks: tuple[int, ...]
    reason: str
    exits: Sequence[dict[str, Any]]

    def exit_of(self, rank: int) -> dict[str, Any]:
        """How a rank has ended; empty if that was not recorded."""
        return next((one for one in self.exits if one.get("rank") == rank), {})

    @property
    def first(self) -> dict[str, Any]:
        """The first rank that was killed by a signal that nobody asked for, before any other rank ended; empty if there is none. A rank
        that stopped responding is killed by its neighbours, before they end."""
        one = self.unasked[0] if self.unasked and not hung(self) else {}
        return one if _is_killed(one) else {}

    @property
    def unasked(self) -> list[dict[str, Any]]:
        """The ends of ranks that their agent had not asked to end before."""
        return [one for one in self.exits if not one.get("asked")]


def has_ranks(evidence: Evidence) -> bool:
    """Whether the run has several ranks, or one that a launcher has started."""
    return evidence.ranks > 1 or bool(evidence.of("rank_exit", "restart"))


def failures(evidence: Evidence) -> list[Failure]:
    """The failures of the stage, oldest first. Events of ranks have no stage: those in the ledger while it was trained are its own."""
    names = [event["event"] for event in evidence.events]
    begins = [at for at, name in enumerate(names) if name in ("start", "resume")]
    ends = [at for at, name in enumerate(names) if name == "finish"]
    if not begins:
        return []
    trained = evidence.events[begins[0] : ends[-1] if ends else None]
    events = [event for event in trained if event["event"] in ("restart", "rank_exit")]
    found: list[Failure] = []
    exits: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "rank_exit":
            exits.append(event)
            continue
        ranks = event.get("ranks")
        known = tuple(rank for rank in ranks if isinstance(rank, int)) if isinstance(ranks, list) else ()
        step = event.get("step")
        found.append(Failure(step if isinstance(step, int) else 0, known, str(event.get("reason", "")), _ordered(exits)))
        exits = []
    last = Failure(evidence.step, (), "", _ordered(exits))
    if any(_is_killed(one) for one in last.unasked):
        found.append(replace(last, ranks=tuple(one["rank"] for one in last.unasked[:1] if isinstance(one.get("rank"), int))))
    return found


def _is_killed(one: dict[str, Any]) -> bool:
    """Whether a rank was ended by a signal that is no request to end."""
    return bool(one.get("signal")) and one["signal"] not in _ASKING


def _ordered(exits: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(exits, key=lambda one: number(one, "ended") if math.isfinite(number(one, "ended")) else number(one, "time"))


def place(failure: Failure, rank: int) -> str:
    host = failure.exit_of(rank).get("host")
    return f"rank {rank}{f' on {host}' if host else ''}"


def hung(failure: Failure) -> bool:
    """Whether a rank stopped responding or did not enter a collective, rather than ending."""
    return any(words in failure.reason for words in ("stopped responding", "did not enter the collective"))
