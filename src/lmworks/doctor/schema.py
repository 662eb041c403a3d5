"""Schemas of the records that the run page reads. Values that do not match are omitted.

A form is a type (float takes whole numbers too, nothing takes true and false), a list of one form, or a map of forms by key, in which "*"
stands for every other key. A key that a form does not have is left as it is.
"""

from __future__ import annotations

from typing import Any

MOST = 1e100
"""What is larger is no measurement, and charts calculate with squares."""

_DEEPEST = 64
_COUNT = {"documents": int, "bytes": float}
_SCORE = {"score": float, "interval": [float], "n": int, "baseline": float, "verdict": str, "form": str}
_MODEL = {
    "bits_per_byte": {"*": {"bits_per_byte": float}},
    "scores": {"*": _SCORE},
    "samples": [{"prompt": str, "completion": str}],
    "unavailable": {"*": str},
}
RESULTS = {
    "models": {"*": _MODEL},
    "references": {"bits_per_byte": {"*": {"*": float}}, "how": {"*": str}},
    "compared": {"*": {"difference": float, "interval": [float], "verdict": str}},
    "not_clean": {"*": str},
    "forgetting": {"summary": str},
    "forgetting_since_start": {"summary": str},
}
_SOURCE = {
    "name": str, "domain": str, "license": str, "came": _COUNT, "train": _COUNT, "validation": _COUNT, "not_drawn": _COUNT,
    "quarantined": {"*": _COUNT}, "steps": [{"step": str, "dropped": {"*": _COUNT}}],
}  # fmt: skip
CORPUS = {"sources": [_SOURCE], "missing": {"*": str}}
_ROW = {"tokenizer": str, "source": str, "domain": str, "bytes_per_token": float, "fertility": float, "round_trip_failures": int}
TOKENIZER = {"evaluation": [_ROW]}
STAGE = {"seconds": float}
LOCK = {"pid": int, "since": float}
EVENT = {"event": str, "stage": str, "time": float, "reason": str, "step": int, "source": str}
SAMPLE = {"prompt": str, "completion": str, "step": int}


def conform(value: Any, form: Any, depth: int = 0) -> Any:
    """`value` without what is not of its form; None if that is all of it. Whatever the form says, numbers that no figure can be made of
    are None, and so is what lies too deep."""
    if form is object and isinstance(value, dict | list):
        form = {} if isinstance(value, dict) else [object]
    if depth > _DEEPEST:
        return None
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return None
        found = {key: conform(item, form.get(key, form.get("*", object)), depth + 1) for key, item in value.items()}
        unread = {key for key, item in value.items() if item is None and key not in form and "*" not in form}
        return {key: item for key, item in found.items() if item is not None or key in unread}
    if isinstance(form, list):
        items = (conform(item, form[0], depth + 1) for item in value) if isinstance(value, list) else ()
        return [item for item in items if item is not None]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if form is object or (isinstance(value, form) and not isinstance(value, bool)) else None
    fits = form in (object, float) or isinstance(value, form)
    return value if fits and -MOST < value < MOST else None
