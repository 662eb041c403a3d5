"""Much of each step is padding or carries no loss."""

from __future__ import annotations

import math

from lmworks.watch.data_facts import number, text_of_sources
from lmworks.watch.evidence import Evidence, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_USED = 0.75
_FEWEST = 5  # lines


def _check(evidence: Evidence) -> Finding | None:
    valid, batch = evidence.series("train/valid_tokens").finite, evidence.series("train/batch_tokens").finite
    if len(valid) < _FEWEST or len(valid) != len(batch):
        raise NotJudged(f"fewer than {_FEWEST} lines")
    used = ratio(valid.median, batch.median)
    wanted = 1.0
    if evidence.stage == "tune":
        sets = _sets(evidence)
        tokens = sum(number(one, "train", "tokens") for one in sets.values())
        if not tokens > 0:
            raise NotJudged("no tune/data/manifest.json")
        # tokens of questions carry no loss, and are not wasted
        wanted = sum(number(one, "train", "learned_tokens") for one in sets.values()) / tokens
        mean = tokens / max(sum(number(one, "train", "conversations") for one in sets.values()), 1)
        if evidence.value("tune.replay") is not None:
            raise NotJudged("replay mixes rows of another kind into the steps")
    else:
        manifest = evidence.document("shards/manifest.json").get("sources") or []
        documents = sum(number(one, "train", "documents") for one in manifest if isinstance(one, dict))
        mean = sum(text_of_sources(evidence).values()) / max(documents, 1)
    filled = used / max(wanted, 1e-9)
    length = evidence.series("train/sequence_length").last
    if not filled < _USED:
        return None
    key = "tune" if evidence.stage == "tune" else f"train.phases.{_phase(evidence)}"
    longer = next((int(length * factor) for factor in (8, 4, 2) if batch.last % (length * factor) == 0), 0)
    changes = []
    if longer:
        row = Change(f"{key}.sequence_length", f"{longer} tokens", "rows that hold several documents", "start the stage again")
        changes.append(row)
    if evidence.stage == "pretrain" and evidence.value("shards.packing") == "best_fit":
        changes.insert(
            0, Change("shards.packing", "concatenate", "fill rows to their end; documents are cut at it", "start again: the order changes")
        )
    return Finding(
        [
            Measurement(
                "share of the tokens of a step that are of the text",
                filled,
                low=_USED,
                source="1 with packing concatenate; 0.9 and more where several documents fit into a row",
            ),
            Measurement("tokens of a row", length),
            Measurement("mean tokens of a document", mean),
        ],
        steps=(int(valid.steps[0]), int(valid.steps[-1])),
        exact=True,
        excluded=[Exclusion("slow-loader", "the tokens were counted; the time of a step has no part in it")],
        changes=changes or [Change(advice="longer rows that divide the batch, or longer documents", cost="start the stage again")],
        check_afterwards="train/valid_tokens relative to train/batch_tokens, in the first line",
    )


def _sets(evidence: Evidence) -> dict[str, object]:
    found = evidence.document("tune/data/manifest.json").get("data")
    return found if isinstance(found, dict) else {}


def _phase(evidence: Evidence) -> int:
    phase = evidence.series("train/phase").last
    return int(phase) if math.isfinite(phase) else 0


RULE = Rule(
    "wasted-tokens",
    "Much of each step is padding.",
    "data",
    ("slow",),
    _check,
    "A row has sequence_length tokens, and what documents do not fill is computed for nothing. Documents of a little more than half of a "
    "row "
    "leave the rest of it empty where packing keeps them whole. Rows that hold several documents, or packing that cuts them, use it: "
    "attention still ends at the borders of documents.",
    needs=("train/valid_tokens", "train/batch_tokens"),
    stages=("pretrain", "tune"),
    look_alikes={"labels-all-masked": "text without labels, not padding"},
)
