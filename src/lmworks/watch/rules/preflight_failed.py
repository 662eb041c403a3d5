"""A check of `lmworks preflight` failed, before the run or when its bundle was made."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Finding, Measurement, NotJudged, Rule
from lmworks.watch.run_files import PREFLIGHT

_MOST = 6  # checks that are described


def _check(evidence: Evidence) -> Finding | None:
    checks = evidence.document(PREFLIGHT).get("checks")
    known = [one for one in checks if isinstance(one, dict)] if isinstance(checks, list) else []
    if not known:
        raise NotJudged(f"{PREFLIGHT} has no checks")
    failed = [one for one in known if one.get("result") == "fail"]
    if not failed:
        return None
    return Finding(
        [Measurement(f"checks of {len(known)} that failed", len(failed), high=0, source=f"{PREFLIGHT} of the last lmworks preflight")],
        where=", ".join(str(one.get("name")) for one in failed),
        exact=True,
        note=True,
        changes=[
            Change(advice="; ".join(str(part) for part in (f"{one.get('name')}: {one.get('text')}", one.get("advice")) if part))
            for one in failed[:_MOST]
        ],
        check_afterwards="lmworks preflight RECIPE on the machines of the run",
    )


RULE = Rule(
    "preflight-failed",
    "A check of lmworks preflight failed.",
    "machine",
    ("hangs", "slow", "checkpoints"),
    _check,
    "lmworks preflight measures the machines, disks and network of a run, computes its first batches, and compares layouts. The result of "
    "the last one is kept in the run's folder, if there is one, and lmworks bundle --preflight runs the checks when the bundle is made. "
    "What failed there may explain what is found in the run; it is a note, since it was not measured while the run trained.",
    stages=("pretrain",),
    applies=lambda evidence: bool(evidence.document(PREFLIGHT)),
)  # fmt: skip
