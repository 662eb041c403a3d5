"""Ranks that should read different rows read the same ones."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_SHARED = 0.1


def _check(evidence: Evidence) -> Finding | None:
    rows = evidence.series("train/shared_rows").finite
    if not len(rows):
        raise NotJudged("one rank, or ranks were not compared yet")
    if not rows.median > _SHARED:
        return None
    return Finding(
        [
            Measurement(
                "share of the rows of a step that several ranks have read", rows.median, high=_SHARED,
                source="0: each rank reads its own rows",
            ),
        ],
        steps=(int(rows.steps[0]), int(rows.steps[-1])),
        exact=True,
        excluded=[Exclusion("duplicated-data", "a row counts only where several ranks have it in one step")],
        changes=[
            Change(
                advice="lmworks preflight RECIPE compares what ranks read with what one process reads; report it with lmworks bundle",
                cost="the steps since were of a smaller batch than planned",
            )
        ],
        check_afterwards="train/shared_rows is 0",
    )


RULE = Rule(
    "rows-repeated-across-ranks",
    "Several ranks read the same rows, so that more ranks bring nothing.",
    "data",
    ("slow", "not-decreasing"),
    _check,
    "Ranks of the data-parallel axes share a step's rows out among them. If all read the same ones, the batch is as small as that of one "
    "rank, and the loss curve is that of one rank at a multiple of its cost (mistral#194, TinyLlama#67). The hashes of the rows of all "
    "ranks are compared every twenty steps.",
    applies=lambda evidence: evidence.ranks > 1,
    needs=("train/shared_rows",),
    look_alikes={"duplicated-data": "rows of one rank repeat too"},
)
