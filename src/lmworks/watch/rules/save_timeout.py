"""Ranks waited longer than the time limit for one that was saving."""

from __future__ import annotations

import math

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule

_SAVING = ("(saving)", "(waiting to save)")


def _check(evidence: Evidence) -> Finding | None:
    found = [event for event in evidence.of("restart") if any(one in str(event.get("reason")) for one in _SAVING)]
    if not found:
        return None
    steps = evidence.steps_of("restart")
    seconds = [event["seconds"] for event in evidence.of("checkpoint") if isinstance(event.get("seconds"), int | float)]
    slowest = max(seconds, default=float("nan"))
    limit = evidence.number("launch.timeout")
    longer = max([30, *(math.ceil(2 * one / 60) for one in (limit, slowest) if math.isfinite(one))])
    return Finding(
        [
            Measurement("restarts because a rank was still saving", len(found), high=0, source="last heartbeat of the missing rank"),
            *([Measurement("slowest save that ended", slowest, unit="s")] if seconds else []),
        ],
        steps=(min(steps), max(steps)) if steps else None,
        exact=True,
        where=str(found[-1].get("reason"))[:300],
        excluded=[Exclusion("hung-rank", "its last heartbeat says that it was saving")],
        changes=[
            *(
                [
                    Change(
                        "checkpoints.local",
                        "/local/disk",
                        "save to the local disk of each machine, and copy from there",
                        cost="room for two checkpoints",
                    )
                ]
                if evidence.value("checkpoints.local") is None
                else []
            ),
            *(
                [Change("checkpoints.asynchronous", "true", "write in the background", cost="memory for a copy of the state")]
                if evidence.value("checkpoints.asynchronous") is False
                else []
            ),
            Change(
                "launch.timeout",
                f"{longer} min",
                f"only if the saves cannot become faster; it is {evidence.value('launch.timeout', 'not known')} now",
                cost="a rank that hangs is found that much later",
            ),
        ],
        check_afterwards="the next save ends, and the ledger has its checkpoint",
    )


RULE = Rule(
    "save-timeout",
    "A save took longer than the time limit of the other ranks.",
    "checkpoints",
    ("checkpoints", "hangs"),
    _check,
    "While one rank writes, the others wait in a collective, which ends after launch.timeout (torchtune#2093, accelerate#2912). The report "
    "then names the collective, and not the save. Each rank's heartbeat says what it was doing: the missing one was saving.",
    outranks=("hung-rank", "hung-collective", "dead-rank"),
    look_alikes={"hung-rank": "the missing rank was not saving", "slow-saves": "the saves end within the limit"},
)
