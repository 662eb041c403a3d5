"""A save failed because the disk was full."""

from __future__ import annotations

import re

from lmworks.io.files import is_full_disk
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Finding, Measurement, Rule

_OURS = re.compile(r"the disk of .{0,2000}? is full \(", re.DOTALL)
"""What a run says of a full disk, in place of the operating system's words (`checkpoint/save.py`)."""


def _is_full(reason: str) -> bool:
    """Whether a save failed on a full disk."""
    return is_full_disk(reason) or _OURS.search(reason) is not None


def _check(evidence: Evidence) -> Finding | None:
    failed = [event for event in evidence.of("save_failed") if _is_full(str(event.get("reason", "")))]
    if not failed:
        return None
    steps = [event["step"] for event in failed if isinstance(event.get("step"), int)]
    return Finding(
        [Measurement("saves that failed on a full disk", len(failed), high=0, source="the error of the operating system")],
        steps=(min(steps), max(steps)) if steps else None,
        exact=True,
        changes=[
            Change(advice="make room on the file system of the run, then run the same command again", cost="the steps since the last save"),
            Change("checkpoints.keep_last", "1", "keep fewer checkpoints", "older checkpoints for a roll-back are gone", moves="down"),
        ],
        check_afterwards="the next checkpoint in the ledger",
    )


RULE = Rule(
    "disk-full",
    "A checkpoint could not be saved because the disk was full.",
    "checkpoints",
    ("checkpoints",),
    _check,
    "A save writes to a temporary name first, so a full disk damages no checkpoint; training goes on and tries again, and ends after "
    "stability.max_failed_saves failures in a row. lmworks plan says how much room the checkpoints need.",
)
