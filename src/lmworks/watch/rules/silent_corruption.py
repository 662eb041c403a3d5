"""Arithmetic that is not reproducible, or copies of a weight that differ."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule


def _check(evidence: Evidence) -> Finding | None:
    found = evidence.of("corruption")
    if not found:
        if not evidence.value("stability.recheck_every"):
            raise NotJudged("stability.recheck_every is off, so nothing was computed twice")
        return None
    steps = evidence.steps_of("corruption")
    ranks = sorted({rank for event in found for rank in event.get("ranks", ())})
    bad = sum(event["event"] == "bad_step" for event in evidence.events)
    return Finding(
        [
            Measurement(
                "tests that gave another result the second time", len(found), high=0, source="stability.recheck_every: the same bits"
            )
        ],
        steps=(min(steps), max(steps)) if steps else None,
        exact=True,
        where=f"rank {', '.join(map(str, ranks))}: {found[-1].get('what')}"[:300],
        excluded=[Exclusion("bad-batch", f"the same rows gave two results; {bad} steps were not finite")],
        changes=[
            Change(
                advice="take the machine of this rank out (launch.exclude, or the scheduler's list), test its memory and device with "
                "lmworks health, and run the same command again",
                cost="the steps since the last sound checkpoint",
            ),
            Change("stability.on_corruption", "rollback", "go back by itself the next time"),
        ],
        check_afterwards="no new corruption in the ledger for ten intervals of stability.recheck_every",
    )


RULE = Rule(
    "silent-corruption",
    "A processor or a memory gives wrong results without an error.",
    "numerics",
    ("spikes", "not-finite"),
    _check,
    "A defective core, device or memory changes results without an error message: 6 of the 419 interruptions of Llama 3 were of this kind. "
    "Data that is bad gives the same bad result every time; hardware does not. The test of stability.recheck_every computes a micro-batch "
    "twice and compares every intermediate result, and compares the copies of weights that several ranks hold.",
    look_alikes={
        "bad-batch": "the same rows give the same result again",
        "operator-overflow": "every batch overflows in the same operator",
    },
    outranks=("bad-batch", "operator-overflow"),
)
