"""A resumed stage reads rows again that it had already trained on."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_REPEATED = 0.5
_BEFORE = 0.05
"""Shares of the rows of a step. A sound resume repeats none; where few rows are read for many epochs, they repeat before it as well."""


def _check(evidence: Evidence) -> Finding | None:
    if not evidence.resumes:
        return None
    first = [event for event in evidence.of("resumed_step") if isinstance(event.get("repeated"), int | float)]
    if not first:
        raise NotJudged("no resumed_step in the ledger: the run was resumed by an earlier version, or its checkpoint was saved by one")
    repeated = evidence.series("train/repeated_rows").finite
    for event in first:
        step = int(event["step"])
        before = repeated.between(0, step + 1).values
        usual = float(before[-20:].mean()) if len(before) else 0.0
        if event["repeated"] >= _REPEATED and usual <= _BEFORE:
            return _finding(evidence, step, float(event["repeated"]), usual)
    return None


def _finding(evidence: Evidence, step: int, share: float, usual: float) -> Finding:
    loss = evidence.series("train/loss").finite
    fall = loss.between(0, step + 1).part(0.9, 1).median - loss.between(step + 1, step + 30).median
    return Finding(
        [
            Measurement(
                "share of the rows of the first resumed step that were trained on before",
                share,
                high=_BEFORE,
                source="64-bit hashes of rows",
            ),
            Measurement("fall of the loss over the resume", fall, unit="nats"),
        ],
        steps=(step, evidence.step),
        exact=True,
        excluded=[
            Exclusion("duplicated-data", f"{usual:.0%} of the rows before step {step} were repeated"),
            Exclusion("optimizer-state-lost", f"the loss changes by {-fall:+.2g} nats"),
        ],
        changes=[
            Change(
                advice=f"keep shards/, train.seed and the phases of a run that has begun; roll back to before step {step} and run it "
                f"again: lmworks ckpt rollback {evidence.files.label} STEP",
                cost=f"the steps since {step}",
            ),
        ],
        check_afterwards="resumed_step in the ledger has repeated 0",
    )


RULE = Rule(
    "data-position-lost",
    "The resumed run reads data again that it was already trained on.",
    "checkpoints",
    ("resume", "too-good"),
    _check,
    "The batch is a function of the step, so a resume needs no position of a loader. Where the order is changed outside of the recipe, or "
    "the stage is driven by a program with a loader of its own, the resumed run may begin anew: the loss falls below its trend, because "
    "the rows are known, and rises to it again where the known rows end (PTL#18780, entrenar#294). The checkpoint has the hashes of its "
    "first and last rows; the first step of the resumed run is compared with them.",
    look_alikes={"duplicated-data": "rows repeat before the resume as well"},
    outranks=("duplicated-data",),
)
