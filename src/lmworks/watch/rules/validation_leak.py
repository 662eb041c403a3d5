"""Held-out text is among the training text."""

from __future__ import annotations

import math

from lmworks.watch.data_facts import domains, number, validation_by_domain
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_SHARE = 0.02
_GAP = -0.15  # nats


def _check(evidence: Evidence) -> Finding | None:
    found, searched = leaked_share(evidence)
    gaps = gap_by_domain(evidence)
    lowest = min(gaps, key=gaps.__getitem__, default="")
    gap = gaps.get(lowest, math.nan)
    if math.isnan(found) and not gaps:
        raise NotJudged("no search of the held-out text in shards/report.json, and no train/source/{source}/loss")
    measured = [
        Measurement(
            "share of the held-out text that is also in the training text",
            found,
            high=_SHARE,
            source="runs of 200 bytes, compared by hash; measured: 0 in decontaminated corpora",
        ),
        Measurement(
            f"validation/{lowest}/loss minus the training loss of its sources, in nats",
            gap,
            low=_GAP,
            source="chosen: a seventh of the perplexity",
        ),
    ]
    proved = measured[0].abnormal
    if not proved and not (measured[1].abnormal and math.isnan(found)):
        return None
    off = evidence.value("corpus.decontaminate") is None
    changes = (
        [
            Change(
                "corpus.decontaminate",
                "{action: drop}",
                "leave training documents with held-out text out",
                "the corpus and the token files are made again; start again",
            )
        ]
        if off
        else []
    )
    return Finding(
        measured,
        where=searched,
        exact=proved,
        excluded=[
            Exclusion("validation-gap", "the text was found by its tokens, whatever the losses are")
            if proved
            else Exclusion("overfitting", "held-out text costs less than training text, not more")
        ],
        changes=[*changes, _alike(evidence)],
        check_afterwards="held_out_found in shards/report.json is 0",
        next_measurement="lmworks run RECIPE --to shards searches the held-out text in the training text",
    )


def _alike(evidence: Evidence) -> Change:
    why, cost = "copies of a document are held out together", "the corpus and the token files are made again; start again"
    threshold = evidence.number("corpus.dedup.minhash.threshold")
    if math.isnan(threshold):
        return Change("corpus.dedup.minhash", "{threshold: 0.8}", why, cost)
    return Change("corpus.dedup.minhash.threshold", f"{max(0.5, threshold - 0.1):g}", f"{why}, less equal ones too", cost, moves="down")


def leaked_share(evidence: Evidence) -> tuple[float, str]:
    """Share of the held-out text that training text contains, and the source that has most of it; NaN if it was not searched."""
    overlap = evidence.document("shards/report.json")
    share = number(overlap, "held_out_found")
    sources = overlap.get("sources")
    worst = max(sources, key=lambda name: number(sources, name), default="") if isinstance(sources, dict) else ""
    return share, f"most of it in source {worst}" if worst and math.isfinite(share) else ""


def gap_by_domain(evidence: Evidence) -> dict[str, float]:
    """The last validation loss of each domain minus the training loss of its sources over the tenth of the steps before, in nats; of
    domains whose sources had at least ten lines."""
    of, trained = domains(evidence), evidence.per("train/source/{source}/loss")
    found: dict[str, float] = {}
    for domain, held_out in validation_by_domain(evidence).items():
        step = int(held_out.steps[-1])
        own = [
            series.finite.between(step - max(10, evidence.step // 10), step + 1)
            for name, series in trained.items()
            if of.get(name) == domain
        ]
        losses = [one.median for one in own if len(one) >= 10]
        if losses:
            found[domain] = held_out.last - sum(losses) / len(losses)
    return found


RULE = Rule(
    "validation-leak",
    "Held-out text is among the training text, so that validation is too good.",
    "data",
    ("too-good",),
    _check,
    "What is held out of one source may stand in another one, or in a copy of the same document. Validation then measures memory, and "
    "overfitting stays hidden. lmworks holds copies of a document out together and drops training documents with held-out passages; both "
    "can be turned off, and imported token files are searched only if corpus.decontaminate is on. Reported in parameter-golf#2127 and "
    "marin#6742.",
    needs=("validation/{domain}/loss",),
    stages=("pretrain",),
    outranks=("validation-gap",),
    look_alikes={"validation-gap": "held-out text that is easier, without being in the training text"},
)
