"""What a model has forgotten of an earlier one: held-out text and scores on which it is shown to be worse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmworks.model_stages import BASE

START = "start"
"""The name of the weights of `start_from` in an evaluation, where the run has pretrained them further."""
_KEPT = ("a", "b", "difference", "interval", "adjusted_p", "n", "verdict")


def forgetting(comparison: Mapping[str, Any], model: str, since: str = BASE.model) -> dict[str, Any]:
    """The part of `results.json` that says it, from one of the `comparisons` of `lmworks.evaluate.compare.comparison.compare`.

    `measures` has for each measure the values of `since` (a), the base model or `START`, and of `model` (b), their difference with its 95%
    interval, and the verdict after Holm's correction; `forgotten` names those on which the model is worse;
    `summary` says it in one line.
    """
    measures = {f"bits per byte, {row['domain']}": {key: row[key] for key in _KEPT} for row in comparison["bits_per_byte"]}
    measures |= {row["score"]: {key: row[key] for key in _KEPT} for row in comparison["scores"]}
    worse = [name for name, row in measures.items() if row["verdict"] == "worse"]
    return _with_summary({"model": model, "since": since, "measures": measures, "forgotten": worse})


def not_compared(model: str, reason: str) -> dict[str, Any]:
    """The same where the weights of `start_from` could not be measured."""
    return _with_summary({"model": model, "since": START, "not_compared": reason})


def _with_summary(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"summary": sentence(found)}


def sentence(found: Mapping[str, Any]) -> str:
    """One line for people."""
    since = found["since"]
    earlier = "the weights of start_from" if since == START else f"the {since} model"
    if "not_compared" in found:
        return f"What was forgotten since {earlier} is not known: {found['not_compared']}."
    measures = found["measures"]
    if not measures:
        return "Nothing was measured that the model could have forgotten: add corpus.sources or evaluate.benchmarks."
    worse = [f"{name} {row['difference']:+.3f} [{row['interval'][0]:+.3f}, {row['interval'][1]:+.3f}]"
             for name, row in measures.items() if name in found["forgotten"]]  # fmt: skip
    if worse:
        return f"Forgotten since {earlier} ({found['model']} minus {since}, 95% interval): {'; '.join(worse)}."
    name, row = next(iter(measures.items()))
    low, high = row["interval"]
    others = f" and {len(measures) - 1} more measures" if len(measures) > 1 else ""
    which = f" since {earlier}" if since == START else ""
    return f"Nothing is shown to be forgotten{which}: {name} {row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]{others}."
