"""The questions of conversations are trained like the answers."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules.labels_all_masked import tuning_counts

_TRAINED = 0.97
_FEWEST = 8  # conversations


def _check(evidence: Evidence) -> Finding | None:
    counts = tuning_counts(evidence, answers=True)
    if counts["conversations"] < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} conversations in tune/data/manifest.json")
    share = counts["learned_tokens"] / max(counts["tokens"] - counts["conversations"], 1)  # the first token is never a label
    valid, batch = evidence.series("train/valid_tokens").finite.median, evidence.series("train/batch_tokens").finite.median
    measured = [
        Measurement(
            "share of the tokens of conversations that carry loss",
            share,
            high=_TRAINED,
            source="0.2 to 0.8 where questions are masked; measured on sets of chats",
        ),
        Measurement("share of the tokens of a step that carry loss", ratio(valid, batch), high=0.85, source="as above, less the padding"),
    ]
    if "whole" in counts:
        measured.append(
            Measurement(
                "share of the conversations without a masked token",
                counts["whole"] / counts["conversations"],
                high=0.5,
                source="0 where questions are masked",
            )
        )
    if not measured[0].abnormal:
        return None
    return Finding(
        measured,
        excluded=[Exclusion("forgetting", "the labels were counted, whatever the losses are")],
        changes=[
            Change(
                "tune.data.0.format",
                "messages",
                "rows of messages: the loss is on answers only; or label the questions of segments false",
                "start tuning again",
            )
        ],
        check_afterwards="learned_tokens in tune/data/manifest.json is the share of the answers",
        next_measurement="lmworks data conversations RUN shows what is trained",
    )


RULE = Rule(
    "prompt-not-masked",
    "The questions are trained like the answers.",
    "tuning",
    ("bad-answers", "forgetting"),
    _check,
    "With loss on all tokens, much of the gradient teaches the model to write questions, and short answers get little of it; the loss "
    "curve "
    "looks as good (nanochat#570). Set `format: text` for documents that are meant to be trained whole.",
    stages=("tune",),
    look_alikes={"end-token-not-trained": "the end of answers", "labels-all-masked": "the opposite"},
)
