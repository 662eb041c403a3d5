"""Diagnoses a failure of the ranks: which rank caused it, from the last heartbeats of all ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmworks.watch.heartbeat import Beat

_COLLECTIVE_ERROR = re.compile(r"gloo|nccl|c10d|ProcessGroup|TCPStore|collective", re.IGNORECASE)


@dataclass(frozen=True)
class FailureDiagnosis:
    """The ranks that caused the failure, their hosts, and the evidence in one line."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    step: int
    reason: str


def classify_error(error: BaseException) -> str:
    """`cut` for an exception that another rank caused (a collective that timed out or lost its peer), else `failed`."""
    kind = type(error)
    return "cut" if _COLLECTIVE_ERROR.search(f"{kind.__module__}.{kind.__name__} {error}") else "failed"


def diagnose_failure(beats: Sequence[Beat]) -> FailureDiagnosis | None:
    """The cause of a failure, from the last heartbeats of all ranks; None if all ranks ended regularly."""
    if all(beat.state == "left" for beat in beats):
        return None
    failed = [beat for beat in beats if beat.state == "failed"]
    if failed:
        return _diagnosis(failed, "; ".join(f"{_who(beat)} failed at step {beat.step}: {beat.reason}" for beat in failed[:3]))
    waiting = [beat for beat in beats if beat.state == "cut"]
    missing = _missing(beats, waiting)
    if not missing:
        cause = f"{_who(waiting[0])}: {waiting[0].reason}" if waiting else "all ended at once (the machine, the launcher or the scheduler)"
        return _diagnosis(waiting or beats, f"no rank was missing from a collective; {cause}")
    return _diagnosis(missing, "; ".join(_describe(beat, waiting) for beat in missing[:3]) + _where(missing[0], waiting))


def _diagnosis(beats: Sequence[Beat], reason: str) -> FailureDiagnosis:
    hosts = tuple(dict.fromkeys(beat.host for beat in beats))
    return FailureDiagnosis(tuple(beat.rank for beat in beats), hosts, max(beat.step for beat in beats), " ".join(reason.split()))


def _missing(beats: Sequence[Beat], waiting: Sequence[Beat]) -> list[Beat]:
    """The ranks that had not entered a collective in which others timed out. A rank that reported nothing is missing from all.

    A rank that waited in another collective is not reported as missing; the rank that was in no collective is.
    """
    silent = [beat for beat in beats if beat.state == "running"]
    if silent or not waiting:
        return silent if waiting or len(silent) < len(beats) else []
    first_timeout = min(beat.seen for beat in waiting)
    late = [beat for beat in beats if any(_is_late(beat, other, first_timeout) for other in waiting if other is not beat)]
    return [beat for beat in late if not _waits(beat, beats)] or late


def _is_late(beat: Beat, other: Beat, first_timeout: float) -> bool:
    """Whether the rank had not entered the collective of the other rank when the first rank timed out."""
    group = _last_group(other)
    mine = beat.entered.get(group) if group else None
    return mine is not None and group is not None and (mine.number < other.entered[group].number or mine.time > first_timeout)


def _waits(beat: Beat, beats: Sequence[Beat]) -> bool:
    """Whether the rank is in a collective that another rank has not entered."""
    group = _last_group(beat)
    return group is not None and any(
        other.entered[group].number < beat.entered[group].number for other in beats if other is not beat and group in other.entered
    )


def _last_group(beat: Beat) -> str | None:
    """The process group of the collective that the rank entered last."""
    return max(beat.entered, key=lambda group: beat.entered[group].time, default=None)


def _who(beat: Beat) -> str:
    return f"rank {beat.rank} on {beat.host} (process {beat.pid})"


def _describe(beat: Beat, waiting: Sequence[Beat]) -> str:
    if beat.state == "running":
        hung = any("timed out" in other.reason.lower() for other in waiting)
        what = "stopped responding (frozen, or its machine is down)" if hung else "ended without an error message (perhaps out of memory)"
        return f"{_who(beat)} {what}; its last heartbeat was at step {beat.step} ({beat.doing})"
    busy = beat.seen - beat.time
    return f"{_who(beat)} was alive but did not enter the collective: it had been at step {beat.step} ({beat.doing}) for {busy:.0f} s"


def _where(missing: Beat, waiting: Sequence[Beat]) -> str:
    for beat in waiting:
        group = _last_group(beat)
        if group and (missing.state == "running" or group in missing.entered):
            last = beat.entered[group]
            ranks = [str(other.rank) for other in waiting if other.entered.get(group, last).number == last.number]
            who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
            return f"; missing from {last.name} number {last.number} of group {group}, where {who} waited"
    return ""
