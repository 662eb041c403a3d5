"""A rank was killed or crashed."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, Rule
from lmworks.watch.rules._ranks import AGAIN, failures, has_ranks, hung, place

_NO_KILL = "no process of its control group was killed for want of memory while it ran"


def _check(evidence: Evidence) -> Finding | None:
    for one in reversed(failures(evidence)):
        found = one.first
        if found and not found.get("oom_kill"):
            rank = found["rank"]
            where, what, exact = place(one, rank), f"was ended by {found['signal']} before any other rank", True
        elif not one.exits and "ended without an error message" in one.reason:
            rank, what, exact = one.ranks[0] if one.ranks else 0, "ended without a word", False
            where = place(one, rank)
        elif " failed at step " in one.reason and not hung(one):
            rank, exact = one.ranks[0] if one.ranks else 0, True
            where, what = place(one, rank), "ended with an error of its own"
        else:
            continue
        return Finding(
            [Measurement(f"ranks that {what}", 1, high=0, source="its parent process, or the last heartbeats of all ranks")],
            steps=(one.step, one.step),
            where=f"{where}{f': {one.reason}' if one.reason else ''}",
            exact=exact,
            excluded=[
                Exclusion("hung-rank", "its process had ended when the others gave up"),
                *([Exclusion("out-of-memory-killed", _NO_KILL)] if found.get("oom_kill") is False else []),
            ],
            changes=[
                AGAIN,
                Change(
                    "launch.exclude_after_failures",
                    "1",
                    "go on without a host whose rank has failed once; lmworks health shows what is wrong with it",
                    "a smaller number of ranks",
                    moves="down",
                ),
            ],
            check_afterwards="no further restart of this rank until the next checkpoint",
            next_measurement="dmesg on its host, which has kills for want of memory and errors of the GPU",
        )
    return None


RULE = Rule(
    "dead-rank",
    "A rank was killed or has crashed.",
    "ranks",
    ("hangs",),
    _check,
    "A process that is killed by a signal leaves no message. Its parent knows the signal: SIGKILL comes from a user, a scheduler or the "
    "kernel, SIGSEGV and SIGBUS from broken code or memory, SIGABRT from a library. The other ranks then fail in the next collective, and "
    "their errors name neighbours, not the cause. Of the interruptions of Llama 3, 148 of 419 were faults of a GPU.",
    applies=has_ranks,
    look_alikes={
        "out-of-memory-killed": "the kernel has counted a kill for want of memory",
        "hung-rank": "alive, or stopped, while the others waited",
    },
)
