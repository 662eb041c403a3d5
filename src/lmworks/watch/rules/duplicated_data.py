"""The same rows come again within one pass over the text."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.data_facts import passes, stretches
from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_REPEATED = 0.02
_FEWEST = 20  # lines


def _check(evidence: Evidence) -> Finding | None:
    rows = evidence.series("train/repeated_rows").finite
    if len(rows) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines of train/repeated_rows")
    read = passes(evidence)
    if not read:
        raise NotJudged("no shards/manifest.json, which tells copies from a second pass over the text")
    weights: dict[str, float] = {}
    for one in stretches(evidence):
        weights |= {name: max(weight, weights.get(name, 0.0)) for name, weight in one.mixture.items()}
    again = sum(weights.get(name, 0.0) for name, count in read.items() if count > 1)
    late = rows.part(0.5, 1)
    mean = late.mean
    if not mean - again > _REPEATED:
        return None
    if _begins_at_resume(evidence, rows):
        return None  # data-position-lost
    dedup = {key: evidence.value(f"corpus.dedup.{key}") for key in ("exact", "minhash")}
    gap = evidence.series("validation/loss").finite.last - evidence.series("train/loss").finite.part(0.9, 1).median
    measured = [
        Measurement(
            "share of the rows of a step that were read shortly before",
            mean,
            high=again + _REPEATED,
            source="0 within one pass: each row is read once",
        ),
        Measurement("most passes over a source so far", max(read.values(), default=math.nan)),
        Measurement("validation/loss minus train/loss, in nats", gap),
    ]
    changes = [
        Change(f"corpus.dedup.{key}", value, "drop copies of documents", "the corpus is made again; start again")
        for key, value in (("exact", "true"), ("minhash", "{threshold: 0.8}"))
        if not dedup[key]
    ]
    return Finding(
        measured,
        steps=(int(rows.steps[rows.values > 0][0]), int(rows.steps[-1])),
        exact=True,
        excluded=[
            Exclusion("data-position-lost", "the rows do not begin to repeat at a resume"),
            Exclusion("overfitting", f"sources that are in a second pass have {again:.0%} of the mixture"),
        ],
        changes=changes
        or [
            Change(
                advice="drop the copies before the text comes here: token files that are imported are not deduplicated", cost="start again"
            )
        ],
        check_afterwards="train/repeated_rows is 0 in the first pass",
    )


def _begins_at_resume(evidence: Evidence, rows: Series) -> bool:
    first = int(rows.steps[rows.values > _REPEATED][0])
    return any(-1 <= first - step <= max(2, 0.02 * evidence.step) for step in evidence.resumes) and trends.at(rows, 0) <= _REPEATED


RULE = Rule(
    "duplicated-data",
    "Rows repeat within one pass over the text: it has copies.",
    "data",
    ("too-good", "overfitting"),
    _check,
    "Copies of a document are read as often as they are there, are memorized, and lower the training loss without teaching anything; a "
    "tenth "
    "of the text, repeated a hundred times, halves the useful size of a model (arXiv:2205.10487). The hash of each row is compared with "
    "those of the rows before. A second pass over a source repeats its rows too, and is no fault.",
    needs=("train/repeated_rows",),
    stages=("pretrain",),
    outranks=("overfitting", "validation-leak"),
    look_alikes={
        "overfitting": "more than one pass",
        "data-position-lost": "begins at a resume",
        "rows-repeated-across-ranks": "within one step",
        "validation-leak": "a copy of a held-out document is one of the copies",
    },
)
