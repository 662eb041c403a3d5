"""The model memorizes its training text: held-out loss rises while training loss falls."""

from __future__ import annotations

import math

from lmworks.recipe.scaling_laws import EPOCHS_AS_NEW
from lmworks.watch.data_facts import passes, validation_by_domain
from lmworks.watch.evidence import Evidence, Series, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_RISE, _FALL, _NATS = 0.02, 0.01, 0.03
_FEWEST = 4  # validations


def _check(evidence: Evidence) -> Finding | None:
    held_out, loss = evidence.series("validation/loss").finite, evidence.series("train/loss").finite
    if len(held_out) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} validations")
    lowest = int(held_out.values.argmin())
    at = int(held_out.steps[lowest])
    after = held_out.values[lowest:]
    rise = ratio(after[-1], after[0]) - 1
    if len(after) < 3 or not rise > _RISE or after[-1] - after[0] < _NATS:
        return None
    before, end = _around(loss, at, evidence.step), _around(loss, evidence.step, evidence.step)
    falling = 1 - ratio(end, before)
    read = _passes(evidence)
    if read < 1:
        return None  # no text was read twice
    grown = (after[-1] - end) - (after[0] - before)
    measured = [
        Measurement(
            "rise of validation/loss since its lowest",
            rise,
            high=_RISE,
            source="measured: at most 0.006 in healthy runs, 0.02 where the mixture changes",
        ),
        Measurement(
            "fall of train/loss over the same steps", falling, high=_FALL, source="both rise or both fall where the model is not memorizing"
        ),
        Measurement("validation/loss minus train/loss at the end, in nats", after[-1] - end),
        Measurement("passes over the text", read, high=float(EPOCHS_AS_NEW), source="arXiv:2305.16264"),
    ]
    rising = [name for name, one in validation_by_domain(evidence).items() if one.last > one.values.min() * (1 + _RISE)]
    if not measured[1].abnormal or not grown > _NATS or not after[-2] > after[0] * (1 + _RISE / 2):
        return None  # it diverges, the mixture has changed, or one validation is noise
    section = "train" if evidence.stage == "pretrain" else evidence.stage
    patience = Change(f"{section}.early_stopping", "{patience: 2}", "end once validation no longer improves", "start the stage again")
    best = Change(
        f"{section}.final_weights", "best", f"use the weights of step {at:,}", "start the stage again, which the same seed repeats"
    )
    fewer = Change(advice=f"train for {at:,} steps, or on more text", cost="start the stage again")
    return Finding(
        measured,
        steps=(at, evidence.step),
        where=f"domains {', '.join(sorted(rising))}" if rising else "",
        excluded=[
            Exclusion("learning-rate-too-high", f"train/loss falls by {falling:.1%} over these steps"),
            Exclusion("stalled-domain", f"held-out loss over all domains has risen by {rise:.1%}"),
        ],
        changes=[patience, *([best] if evidence.stage == "tune" else []), fewer],
        check_afterwards="validation/loss is lowest at the last validation",
    )


def _around(loss: Series, step: int, end: int) -> float:
    """The median loss of the tenth of the steps that ends with a step."""
    width = max(1, end // 10)
    return loss.between(step - width, step + 1).median


def _passes(evidence: Evidence) -> float:
    if evidence.stage == "pretrain":
        return max(passes(evidence).values(), default=math.nan)
    epochs = evidence.number(f"{evidence.stage}.epochs")
    if math.isfinite(epochs) or evidence.stage != "tune":
        return epochs
    sets = evidence.document("tune/data/manifest.json").get("data") or {}
    tokens = sum(one.get("train", {}).get("tokens", 0) for one in sets.values())
    return evidence.series("train/tokens").last / tokens if tokens else math.nan


RULE = Rule(
    "overfitting",
    "The model memorizes its training text: held-out loss rises while training loss falls.",
    "data",
    ("overfitting",),
    _check,
    "Text that is read many times is memorized, and what is memorized helps with no other text. Up to about four passes, repeated text is "
    "nearly as good as new text (arXiv:2305.16264); a staircase of the training loss at the borders of epochs is normal as long as "
    "held-out "
    "loss falls. Reported where small sets were tuned for many epochs (alpaca#236, LlamaFactory#7485).",
    needs=("train/loss", "validation/loss"),
    stages=("pretrain", "tune"),
    look_alikes={
        "duplicated-data": "in the first pass, with equal rows",
        "forgetting": "other text gets worse, not that of the stage",
        "stalled-domain": "one domain alone",
    },
)
