"""The token that ends an answer is never a label, so the tuned model does not learn to stop."""

from __future__ import annotations

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules.labels_all_masked import tuning_counts

_ENDED = 0.5


def _check(evidence: Evidence) -> Finding | None:
    counts = tuning_counts(evidence)
    if "ended" not in counts:
        raise NotJudged("no count of trained end tokens in tune/data/manifest.json, which an earlier version has written")
    share = counts["ended"] / max(counts["conversations"], 1)
    if not share < _ENDED:
        return None
    trained = counts["learned_tokens"] / max(counts["tokens"], 1)
    segments = counts.get("segments", 0) > 0.5 * counts["conversations"]
    return Finding(
        [
            Measurement(
                "share of the conversations with a trained end token",
                share,
                low=_ENDED,
                source="1 with a chat template, but for answers that are cut",
            ),
            Measurement("share of the tokens that carry loss", trained),
        ],
        exact=True,
        excluded=[Exclusion("forgetting", "the labels were counted, whatever the losses are")],
        changes=[
            Change("tune.data.0.format", "messages", "rows of messages, which the chat template ends", "start tuning again")
            if segments
            else Change("tokenizer.chat_template", "brief", "a template that ends each answer with a stop token", "start tuning again"),
            Change(
                "tune.sequence_length",
                f"{2 * int(evidence.series('train/sequence_length').last)} tokens",
                "if most answers are cut at their end",
                "start tuning again",
            ),
        ][: 1 if segments else 2],
        check_afterwards="ended in tune/data/manifest.json equals conversations, and samples.jsonl has answers that end",
    )


RULE = Rule(
    "end-token-not-trained",
    "The end of answers is not trained, so the tuned model does not stop.",
    "tuning",
    ("bad-answers",),
    _check,
    "A model stops because it has learned to predict the token that ends an answer. If this token is masked, as where padding and end are "
    "one token, or if the rows do not have it, the loss looks normal and answers go on until they are cut (trl#1623, open-r1#494). The "
    "labels of all conversations are counted when they are written.",
    needs=(),
    stages=("tune",),
    look_alikes={"labels-all-masked": "nothing is trained", "answers-cut": "max_new_tokens is too small"},
)
