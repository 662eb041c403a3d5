"""Nearly no token carries loss: all labels of most rows are masked."""

from __future__ import annotations

import math
from collections import Counter

from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_LOST, _VALID = 0.5, 0.01
_MASKED = ("wrong mask", "with a question that leaves no room for an answer within sequence_length", "nothing to train", "no answer")
_CUT = "with an answer that is cut"
_COUNTED = ("conversations", "tokens", "learned_tokens", "ended", "whole")


def tuning_counts(evidence: Evidence, answers: bool = False) -> Counter[str]:
    """The counts of tune/data/manifest.json over its sets; with `answers`, over those without documents, which are trained whole, in
    pieces of which most do not end. Those of the training split; `lost` and `masked`, rows that were left out, in all and for want of a
    label; `segments`, rows of this form; `cut`, answers that are cut at their end; `longest`, the sequence_length that would cut none (0
    where none is cut). Raises `NotJudged` without a set."""
    sets = evidence.document("tune/data/manifest.json").get("data")
    if not isinstance(sets, dict) or not sets:
        raise NotJudged("no tune/data/manifest.json")
    found: Counter[str] = Counter()
    judged = [one for one in sets.values() if not (answers and one.get("forms", {}).get("text"))]
    if not judged:
        raise NotJudged("all sets of tune.data are documents, which have no answers")
    for one in judged:
        found.update({name: one["train"][name] for name in _COUNTED if name in one["train"]})
        left_out = one.get("left_out", {})
        found["lost"] += sum(count for name, count in left_out.items() if name != "repeated")
        found["masked"] += sum(count for name, count in left_out.items() if name.startswith(_MASKED))
        cut = sum(count for name, count in one.get("noted", {}).items() if name.startswith(_CUT))
        found.update(segments=one.get("forms", {}).get("segments", 0), cut=cut)
        found["longest"] = max(found["longest"], one.get("sequence_length_for_all", 0))
    return found


def _check(evidence: Evidence) -> Finding | None:
    valid, batch = evidence.series("train/valid_tokens").finite, evidence.series("train/batch_tokens").finite
    share = ratio(valid.median, batch.median)
    lost = math.nan
    if evidence.stage == "tune":
        try:
            counts = tuning_counts(evidence)
            lost = counts["masked"] / max(counts["masked"] + counts["conversations"], 1)
        except NotJudged:
            if not share < _VALID:  # what is trained says enough
                raise
    measured = [
        Measurement(
            "rows that were left out because nothing in them is trained, relative to all",
            lost,
            high=_LOST,
            source="0 in sets that fit sequence_length and the template",
        ),
        Measurement("share of the tokens of a step that carry loss", share, low=_VALID, source="0.2 and more in sets of chats"),
    ]
    found = [one for one in measured if one.abnormal]
    if not found:
        return None
    length = evidence.document("tune/data/manifest.json").get("sequence_length")
    changes = (
        [
            Change(
                f"{evidence.stage}.sequence_length", f"{4 * length} tokens", "if questions leave no room for answers", "start tuning again"
            )
        ]
        if isinstance(length, int)
        else []
    )
    return Finding(
        measured,
        exact=True,
        excluded=[Exclusion("wasted-tokens", "the labels were counted, and are not padding")],
        changes=[
            *changes,
            Change(
                advice="lmworks data conversations RUN shows what is trained; the examples in tune/data/manifest.json name rows and reasons"
            ),
        ],
        check_afterwards="train/valid_tokens in the first line",
    )


RULE = Rule(
    "labels-all-masked",
    "Nearly no token carries loss.",
    "tuning",
    ("bad-answers", "too-good"),
    _check,
    "If the answer of a row is cut off by sequence_length, or the template does not mark it, all its labels are masked. Other trainers "
    "then "
    "show a loss of 0.0 and a run that succeeds (trl#6668); lmworks leaves such rows out and counts them by reason.",
    needs=("train/valid_tokens", "train/batch_tokens"),
    stages=("tune",),
    look_alikes={"wasted-tokens": "padding"},
)
