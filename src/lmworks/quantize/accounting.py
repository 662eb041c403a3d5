"""What became of every tensor of the original: quantized, kept, or absent with a reason. A result with a gap is no result."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from lmworks.quantize.schemes import Limits


@dataclass(frozen=True)
class TensorRecord:
    """One tensor; a `scaled` one is a norm into which AWQ has moved the scales of the layers behind it.

    `type` is that in the result; `error` the root-mean-square error of a quantized one, relative to the root mean square of the original;
    `note` says why it is absent, or of another type than the scheme's. `role` is router, embedding or head for tensors that are kept in
    high precision, else empty.
    """

    name: str
    fate: Literal["quantized", "kept", "scaled", "absent", "missing", "changed"]
    type: str = ""
    error: float | None = None
    note: str = ""
    role: str = ""
    zero: bool = False


HIGH_PRECISION = frozenset({"F32", "F16", "BF16", "Q8_0"})
"""Types in which an embedding or a head counts as kept in high precision."""


def relative_error(original: np.ndarray, found: np.ndarray) -> float:
    """Root-mean-square error relative to the root mean square of `original`; infinite if a value is not finite."""
    difference = found.astype(np.float64).ravel() - original.astype(np.float64).ravel()
    norm = math.sqrt(float(np.square(original.astype(np.float64)).sum()))
    error = math.sqrt(float(np.square(difference).sum()))
    if not math.isfinite(error):
        return math.inf
    return error / norm if norm else (0.0 if not error else math.inf)


def problems(records: Sequence[TensorRecord], limits: Limits) -> list[str]:
    """What is wrong with the tensors, one line each; empty if every tensor is accounted for."""
    found = []
    for one in records:
        if one.fate == "missing":
            found.append(f"tensor {one.name} is missing")
        elif one.fate == "changed":
            found.append(f"tensor {one.name} was to be kept, but its values differ from the original's")
        elif one.zero:
            found.append(f"tensor {one.name} is all zeros, and the original is not")
        elif one.error is not None and not one.error <= limits.error:
            found.append(f"tensor {one.name} ({one.type}) has an error of {one.error:.1%}, more than {limits.error:.0%}")
        elif one.role == "router" and one.fate != "kept":
            found.append(f"router {one.name} was quantized to {one.type}; routers must be kept")
        elif one.role in ("embedding", "head") and one.fate == "quantized" and one.type not in HIGH_PRECISION:
            found.append(f"{one.role} {one.name} was quantized to {one.type}; it must keep at least 8 bits")
    return found


def summary(records: Sequence[TensorRecord]) -> dict[str, Any]:
    """Counts by fate and type, the tensors with the largest error, the absent ones, and those of another type than the scheme's."""
    worst = max((one for one in records if one.error is not None), key=lambda one: one.error or 0.0, default=None)
    return {
        "total": len(records),
        "fates": dict(Counter(one.fate for one in records)),
        "types": dict(Counter(one.type for one in records if one.type)),
        "worst": None if worst is None else {"name": worst.name, "type": worst.type, "error": worst.error},
        "absent": [asdict(one) for one in records if one.fate in ("absent", "missing")],
        "fallbacks": [{"name": one.name, "type": one.type, "note": one.note} for one in records if one.note and one.fate == "quantized"],
        "sensitive": {
            role: sorted({one.type for one in records if one.role == role})
            for role in ("router", "embedding", "head")
            if any(one.role == role for one in records)
        },
    }
