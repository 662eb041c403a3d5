"""Which events of a run are worth an alert: kind, cause and sentence of each.

An event of the ledger becomes an alert in `alert_of`, wherever it is written. Two events of one cause are one alert in
`alerts.repeat_after`: a spike in every step, or a rank that dies again after each restart, is reported once.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lmworks.io.files import is_full_disk
from lmworks.io.masking import mask
from lmworks.watch.ledger import shown_step

RUN_ENDED = "run_ended"  # the event of the end of a run
TEST = "test"  # the kind of an alert that preflight sends, which every target gets
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
_LONGEST = 800  # characters of a sentence: an alert fits into one write of a pipe


@dataclass(frozen=True)
class Alert:
    """An alert about a run. `kind` is one of `AlertKind` or `TEST`; alerts with the same `cause` are sent once in a while; `text` is one
    sentence; `fields` are added to the JSON object."""

    kind: str
    cause: str
    text: str
    time: float
    fields: Mapping[str, Any]


def body(alert: Alert, run: str, run_dir: Path, form: str) -> bytes:
    """What is sent: a JSON object, or with the form `text` its sentence alone."""
    text = f"{run}: {alert.text}"
    if form == "text":
        return text.encode() + b"\n"
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(alert.time))
    about = {"text": text, "kind": alert.kind, "cause": alert.cause, "run": run, "run_dir": str(run_dir.absolute())}
    return json.dumps({**about, "host": socket.gethostname(), "time": when, **alert.fields}, ensure_ascii=False).encode() + b"\n"


def alert_of(event: Mapping[str, Any]) -> Alert | None:
    """The alert of an event of the ledger; None if it is not worth one, or if it lacks what its kind has."""
    make = _MAKERS.get(str(event.get("event")))
    try:
        found = make(event) if make is not None else None
    except (LookupError, TypeError, ValueError):  # a line of another version, or of somebody else's rules
        return None
    if found is None:
        return None
    kind, cause, text = found
    known = {name: event[name] for name in ("stage", "step", "rank", "code", "outcome") if isinstance(event.get(name), (str, int, float))}
    known = {name: value[:100] if isinstance(value, str) else value for name, value in known.items()}
    sentence = " ".join(mask(text).split())
    sentence = sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]} ..."
    return Alert(kind, f"{kind}/{cause}"[:200], sentence, float(event.get("time", time.time())), known)


Made = tuple[str, str, str]


def _finding(event: Mapping[str, Any]) -> Made:
    code = str(event["code"])
    return "finding", f"{event.get('stage', '')}/{code}", f"{_where(event)}{code}: {event['sentence']}"


def _spike(event: Mapping[str, Any]) -> Made:
    return "spike", str(event.get("stage")), f"{_where(event)}loss {event['loss']}, gradient norm {event['grad_norm']}: {event['action']}"


def _not_finite(event: Mapping[str, Any]) -> Made:
    return "spike", f"{event.get('stage')}/not_finite", f"{_where(event)}a result is not finite, first in {event['first']}"


def _rollback(event: Mapping[str, Any]) -> Made | None:
    if not event.get("reason"):  # asked for by hand
        return None
    return "spike", f"{event.get('stage')}/rollback", f"{_where(event)}rolled back to step {event['to_step']:,}: {event['reason']}"


def _stall(event: Mapping[str, Any]) -> Made:
    text = f"no progress for {event['seconds']:,.0f} s ({event['doing']}); expected within {event['limit']:,.0f} s"
    return "stall", str(event["doing"]), f"{_where(event)}{text}"


def _save_failed(event: Mapping[str, Any]) -> Made:
    reason = str(event["reason"])
    full = is_full_disk(reason) or " is full " in reason
    return "save_failed", f"{event.get('stage')}/{'full_disk' if full else 'other'}", f"{_where(event)}the save failed: {reason}"


def _rank_exit(event: Mapping[str, Any]) -> Made | None:
    """A rank that has crashed, or that the kernel has killed because memory ran out. Its peers are killed because of it: which rank was the
    cause of a restart, whatever ended it, is in the event `restart`."""
    by = event.get("signal")
    if event.get("asked") or (by not in _CRASHES and not (by == "SIGKILL" and event.get("oom_kill"))):
        return None
    why = "" if by in _CRASHES else ", because memory ran out"
    return "dead_rank", f"{event['rank']}", f"rank {event['rank']} on {event.get('host') or 'an unknown host'} was killed by {by}{why}"


def _restart(event: Mapping[str, Any]) -> Made:
    ranks = ",".join(map(str, event["ranks"]))
    return "dead_rank", ranks, f"the ranks were restarted: {event['reason']}"


def _slow_rank(event: Mapping[str, Any]) -> Made:
    rank, what = event["rank"], event["what"]
    text = f"rank {rank} is slow: {what} takes {event['seconds']:.3g} s, {event['median']:.3g} s on the others"
    return "slow_rank", f"{rank}/{what}", f"{_where(event)}{text}"


def _host_excluded(event: Mapping[str, Any]) -> Made:
    return "excluded_host", str(event["host"]), f"host {event['host']} is excluded: {event['reason']}"


def _requeue(event: Mapping[str, Any]) -> Made:
    crashed = bool(event["crashed"])
    return ("dead_rank" if crashed else "preempted"), "requeue", f"the job is requeued: {event['reason']}"


def _run_ended(event: Mapping[str, Any]) -> Made:
    outcome, reason = str(event["outcome"]), str(event.get("reason") or "")
    cause = str(event.get("to") or "")
    if outcome == "failed":  # in another step for the same reason
        cause = blake2b(re.sub(r"\d+", "#", reason).encode(), digest_size=4).hexdigest()
    words = {"finished": "the run has finished", "failed": "the run has failed", "preempted": "the run was preempted"}
    text = words.get(outcome, "the run was stopped") + (f", up to {cause}" if outcome == "finished" and cause else "")
    return outcome, cause, f"{text}{f': {reason}' if reason else ''}"


def _where(event: Mapping[str, Any]) -> str:
    parts = [str(event["stage"])] if event.get("stage") else []
    parts += [f"step {step:,}"] if (step := shown_step(event)) is not None else []
    return f"{', '.join(parts)}: " if parts else ""


_MAKERS: dict[str, Callable[[Mapping[str, Any]], Made | None]] = {
    "finding": _finding, "spike": _spike, "not_finite": _not_finite, "rollback": _rollback, "stall": _stall, "save_failed": _save_failed,
    "rank_exit": _rank_exit, "restart": _restart, "slow_rank": _slow_rank, "host_excluded": _host_excluded, "requeue": _requeue,
    RUN_ENDED: _run_ended,
}  # fmt: skip
