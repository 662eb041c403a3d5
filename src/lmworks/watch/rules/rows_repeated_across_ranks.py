"""Ranks that should read different rows read the same ones."""

from __future__ import annotations

import numpy as np

from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules.duplicated_data import repeated_in_steps

_SHARED = 0.1


def _check(evidence: Evidence) -> Finding | None:
    rows, compared = evidence.series("train/repeated_rows").finite, evidence.series("perf/slowest_rank").finite
    if not len(compared):
        raise NotJudged("one rank, or ranks were not compared yet")
    keep = np.isin(rows.steps, compared.steps)
    both = Series(rows.steps[keep], rows.values[keep])
    within, between = repeated_in_steps(evidence).median, both.median
    if not len(both) or not between - np.nan_to_num(within) > _SHARED:
        return None
    return Finding(
        [
            Measurement(
                "share of the rows of a step that several ranks have read", between, high=_SHARED, source="0: each rank reads its own rows"
            ),
            Measurement("share of the rows of one rank that it has read before", float(np.nan_to_num(within))),
        ],
        steps=(int(both.steps[0]), int(both.steps[-1])),
        exact=True,
        excluded=[Exclusion("duplicated-data", "a rank's own rows do not repeat as often")],
        changes=[
            Change(
                advice="lmworks preflight RECIPE compares what ranks read with what one process reads; report it with lmworks bundle",
                cost="the steps since were of a smaller batch than planned",
            )
        ],
        check_afterwards="train/repeated_rows is 0 in the lines that have perf/slowest_rank",
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
    needs=("train/repeated_rows",),
    look_alikes={"duplicated-data": "rows of one rank repeat too"},
)
