"""All ranks were in the same collective, which did not end."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule
from lmworks.watch.rules._ranks import AGAIN, failures, has_ranks


def _check(evidence: Evidence) -> Finding | None:
    for one in reversed(failures(evidence)):
        if "no rank was missing from a collective" not in one.reason or "timed out" not in one.reason.lower() or one.first:
            continue
        return Finding(
            [
                Measurement("ranks that were missing from the collective", 0, source="the last heartbeats and collectives of all ranks"),
                Measurement("collectives that timed out although all ranks had entered them", 1, high=0, source="as above"),
            ],
            steps=(one.step, one.step),
            where=one.reason,
            exact=True,
            excluded=[Exclusion("hung-rank", "every rank had entered the collective"), Exclusion("dead-rank", "no rank had ended")],
            changes=[
                AGAIN,
                Change("launch.environment.NCCL_DEBUG", "INFO", "if it happens again: which link is it", "resume; larger logs"),
                Change(advice="lmworks health on all hosts: links, clocks, errors of the GPU"),
            ],
            check_afterwards="launch/last_failure has the records of the collectives of all ranks",
        )
    return None


RULE = Rule(
    "hung-collective",
    "A collective that all ranks had entered did not end.",
    "ranks",
    ("hangs",),
    _check,
    "If no rank is missing and heartbeats go on, the stall is on the devices or in the network between them: a link that has gone down, a "
    "driver, a kernel that waits for ever. In marin#7344, 512 GPUs stood at one step without an error.",
    applies=has_ranks,
    look_alikes={"hung-rank": "one rank was missing", "dead-rank": "one rank had ended"},
)
