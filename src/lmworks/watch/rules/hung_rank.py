"""A rank stopped working while the others waited for it."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule
from lmworks.watch.rules._ranks import AGAIN, failures, has_ranks, hung, place


def _check(evidence: Evidence) -> Finding | None:
    for one in reversed(failures(evidence)):
        if not hung(one) or not one.ranks or one.first:
            continue
        rank = one.ranks[0]
        saving = "(save" in one.reason
        if saving:
            continue  # save-timeout
        measured = [
            Measurement(
                "ranks that were missing from a collective in which others timed out",
                len(one.ranks),
                high=0,
                source="the last heartbeats and collectives of all ranks",
            )
        ]
        if one.exits:
            measured.append(
                Measurement(
                    "ranks that did not end by themselves", float(one.exit_of(rank).get("signal") == "SIGKILL"), high=0,
                    source="the signal by which the process ended",
                )
            )
        return Finding(
            measured,
            steps=(one.step, one.step),
            where=f"{place(one, rank)}: {one.reason}",
            exact=True,
            excluded=[Exclusion("dead-rank", "its process had not ended when the others gave up")],
            changes=[
                AGAIN,
                Change(
                    "launch.exclude_after_failures",
                    "1",
                    "if it is the same host again; lmworks health shows what is wrong with it",
                    "a smaller number of ranks",
                    moves="down",
                ),
                Change("launch.timeout", "2 min", "notice it sooner; a longer limit only makes the wait longer", "resume", moves="down"),
            ],
            check_afterwards="no further restart of this rank until the next checkpoint",
        )
    return None


RULE = Rule(
    "hung-rank",
    "A rank stopped responding, and the others waited for it.",
    "ranks",
    ("hangs",),
    _check,
    "A process that is stopped, swapped out or stuck in a driver or a file system enters no collective. The others wait there until "
    "launch.timeout, and fail; what they report is the collective, not the rank. Each rank writes at every step what it is about to do, "
    "from which the missing one is known.",
    applies=has_ranks,
    look_alikes={
        "dead-rank": "its process had ended before",
        "hung-collective": "no rank was missing",
        "save-timeout": "the missing rank was saving",
        "slow-rank": "it goes on, slowly",
    },
)
