"""What a later model has forgotten of the base model: held-out text and scores on which it is shown to be worse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEPT = ("a", "b", "difference", "interval", "adjusted_p", "n", "verdict")


def forgetting(comparison: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The part of `results.json` that says it, from one of the `comparisons` of `lmworks.evaluate.compare.comparison.compare`.

    `measures` has for each measure the values of the base model (a) and of `model` (b), their difference with its 95% interval, and the
    verdict after Holm's correction; `forgotten` names those on which the model is worse.
    """
    measures = {f"bits per byte, {row['domain']}": {key: row[key] for key in _KEPT} for row in comparison["bits_per_byte"]}
    measures |= {row["score"]: {key: row[key] for key in _KEPT} for row in comparison["scores"]}
    return {"model": model, "measures": measures, "forgotten": [name for name, row in measures.items() if row["verdict"] == "worse"]}


def sentence(found: Mapping[str, Any]) -> str:
    """One line for people."""
    measures = found["measures"]
    if not measures:
        return "Nothing was measured that the model could have forgotten: add corpus.sources or evaluate.benchmarks."
    worse = [f"{name} {row['difference']:+.3f} [{row['interval'][0]:+.3f}, {row['interval'][1]:+.3f}]"
             for name, row in measures.items() if name in found["forgotten"]]  # fmt: skip
    if worse:
        return f"Forgotten since the base model ({found['model']} minus base, 95% interval): {'; '.join(worse)}."
    name, row = next(iter(measures.items()))
    low, high = row["interval"]
    others = f" and {len(measures) - 1} more measures" if len(measures) > 1 else ""
    return f"Nothing is shown to be forgotten: {name} {row['difference']:+.3f} [{low:+.3f}, {high:+.3f}]{others}."
