"""The token that ends an answer is never a label, so the tuned model does not learn to stop."""

from __future__ import annotations

from collections import Counter

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules._commands import show_conversations
from lmworks.watch.rules.labels_all_masked import tuning_counts

_ENDED = 0.5
_ROUND = 64  # tokens


def _check(evidence: Evidence) -> Finding | None:
    counts = tuning_counts(evidence, answers=True)
    if "ended" not in counts:
        raise NotJudged("no count of trained end tokens in tune/data/manifest.json, which an earlier version has written")
    share = counts["ended"] / max(counts["conversations"], 1)
    if not share < _ENDED:
        return None
    trained = counts["learned_tokens"] / max(counts["tokens"], 1)
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
        changes=_changes(evidence, counts),
        check_afterwards="ended in tune/data/manifest.json equals conversations, and samples.jsonl has answers that end",
    )


def _changes(evidence: Evidence, counts: Counter[str]) -> list[Change]:
    if counts["segments"] > 0.5 * counts["conversations"]:
        return [Change("tune.data.0.format", "messages", "rows of messages, which the chat template ends", "start tuning again")]
    others = [
        Change("tokenizer.chat_template", "brief", "a template that ends each answer with a stop token", "start tuning again"),
        Change(advice=f"look at what is trained, and whether an answer ends in it: {show_conversations(evidence)}"),
    ]
    wanted = -(-counts["longest"] // _ROUND) * _ROUND
    if not wanted or not counts["cut"] > 0.5 * (counts["conversations"] - counts["ended"]):
        return others
    most = evidence.number("tune.global_batch_tokens")  # a step has at least one row
    why = f"{counts['cut']:,} answers are cut at their end, and the longest row needs {counts['longest']:,} tokens"
    return [Change("tune.sequence_length", f"{min(wanted, most):.0f} tokens", why, "start tuning again", moves="up"), *others]


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
