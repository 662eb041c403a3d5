"""Held-out text of a domain is much harder or easier than its training text from the beginning."""

from __future__ import annotations

from lmworks.watch.data_facts import passes
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules.validation_leak import gap_by_domain

_GAP = 0.5  # nats


def _check(evidence: Evidence) -> Finding | None:
    gaps = gap_by_domain(evidence)
    if not gaps:
        raise NotJudged("fewer than ten lines of train/source/{source}/loss")
    if max(passes(evidence).values(), default=0.0) > 1.5:
        return None  # overfitting, or a staircase
    worst = max(gaps, key=lambda name: abs(gaps[name]))
    if abs(gaps[worst]) <= _GAP:
        return None
    return Finding(
        [
            Measurement(
                f"validation/{worst}/loss minus the training loss of its sources, in nats",
                gaps[worst],
                -_GAP,
                _GAP,
                "chosen: a factor of 1.6 in perplexity",
            )
        ],
        steps=(1, evidence.step),
        where=f"domain {worst}",
        note=True,
        excluded=[Exclusion("overfitting", "it is the first pass over the text")],
        changes=[
            Change(
                advice="hold out a random part of the same documents; a few long documents are not typical of a source "
                "(corpus.max_validation_bytes, corpus.validation_fraction)",
                cost="the corpus is made again",
            )
        ],
        check_afterwards="the gap at the first validation",
    )


RULE = Rule(
    "validation-gap",
    "Held-out text of a domain differs from its training text.",
    "data",
    ("too-good", "overfitting"),
    _check,
    "In the first pass over the text, held-out text costs what training text costs, but for chance. A gap from the beginning says that "
    "the "
    "two are not of one kind: few held-out documents, another language or form, text that was split by date. The validation loss is then "
    "still comparable between runs, but its level says nothing of the training text.",
    needs=("validation/{domain}/loss", "train/source/{source}/loss"),
    stages=("pretrain",),
    look_alikes={"overfitting": "after several passes", "validation-leak": "held-out text that is in the training text"},
)
