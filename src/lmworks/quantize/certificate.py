"""The certificate of a quantized model: what was measured, what could not be, and whether it is within its limits.

It accounts for every tensor of the original: quantized, kept, or absent with a reason. A result with a tensor unaccounted for is invalid.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lmworks import __version__
from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_json
from lmworks.quantize.agreement import Agreement
from lmworks.quantize.source import Limits, Scheme
from lmworks.weights.verified import CERTIFICATE


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


_PLAIN = frozenset({"F32", "F16", "BF16"})  # types of weights that are not quantized


def relative_error(original: np.ndarray, found: np.ndarray) -> float:
    """Root-mean-square error relative to the root mean square of `original`; infinite if a value is not finite."""
    difference = found.astype(np.float64).ravel() - original.astype(np.float64).ravel()
    norm = math.sqrt(float(np.square(original.astype(np.float64)).sum()))
    error = math.sqrt(float(np.square(difference).sum()))
    if not math.isfinite(error):
        return math.inf
    return error / norm if norm else (0.0 if not error else math.inf)


def problems(records: Sequence[TensorRecord], limits: Limits) -> list[str]:
    """What is wrong with the tensors, one line each; empty if every tensor is accounted for, and some are quantized."""
    found = []
    if not any(one.fate == "quantized" and one.type not in _PLAIN for one in records):
        why = next((f" ({one.note})" for one in records if _falls_back(one)), "")
        found.append(f"no tensor was quantized{why}")
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
        "fallbacks": [{"name": one.name, "type": one.type, "note": one.note} for one in records if _falls_back(one)],
        "sensitive": {
            role: sorted({one.type for one in records if one.role == role})
            for role in ("router", "embedding", "head")
            if any(one.role == role for one in records)
        },
    }


def _falls_back(record: TensorRecord) -> bool:
    return bool(record.note) and record.fate in ("quantized", "kept")


def require_passed(model: Path) -> None:
    """Raise `UserError` unless the folder or GGUF file `model` has a certificate beside it, which passed and names its files. Whether they
    are the files that passed is compared by `lmworks.weights.verified.verify_export`, which reads them whole."""
    folder = model if model.is_dir() else model.parent
    path = folder / CERTIFICATE
    remedy = "serve a form that `lmworks quantize` has certified, or give --uncertified"
    if not path.is_file():
        raise UserError(f"{model} is quantized and has no {CERTIFICATE}, so nothing shows how far it is from the original; {remedy}")
    with explain_damage(path):
        found = read_json(path)
        failures = [] if found["verdict"] == "passed" else found["failures"] or ["no reason given"]
        known = dict(found.get("files", {}))
    if failures:
        raise UserError(f"{model} has failed its certificate: {failures[0]}; {remedy}")
    if not known or (model.is_file() and model.name not in known):
        what = "keeps no hashes of the files that passed: it was written by an earlier version" if not known else f"is not of {model.name}"
        raise UserError(f"{path} {what}; quantize the model again, or give --uncertified")


def not_measured(why: str) -> dict[str, str]:
    """In place of a measurement."""
    return {"not_measured": why}


@dataclass
class Evidence:
    """What was found about one result.

    made_by, scored_by: the programs that quantized and that computed the logits. bytes, original_bytes: sizes of the weights on disk.
    speed, benchmarks, calibration: measurements, or why there are none. structure: what differs beside the values of tensors.
    mtp: what became of the layers of multi-token prediction, or an empty text without any. engine: what the engine said that the result is
    for, if it could not load it.
    """

    made_by: str
    scored_by: str
    bytes: int
    original_bytes: int
    records: Sequence[TensorRecord]
    agreement: Agreement | None
    structure: list[str] = field(default_factory=list)
    speed: Mapping[str, Any] = field(default_factory=dict)
    benchmarks: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)
    mtp: str = ""
    notes: list[str] = field(default_factory=list)


def certificate(scheme: Scheme, evidence: Evidence, made_from: Mapping[str, Any]) -> dict[str, Any]:
    """The document; its `verdict` is "passed" if `failures` is empty."""
    failures = _failures(scheme, evidence)
    found = evidence.agreement
    return {
        "scheme": scheme.name,
        "about": scheme.about,
        "format": scheme.format,
        "verdict": "failed" if failures else "passed",
        "failures": failures,
        "warnings": _warnings(scheme, evidence),
        "limits": asdict(scheme.limits),
        "agreement": not_measured("the tensors are not those of the original") if found is None else found.to_json(),
        "benchmarks": evidence.benchmarks,
        "bytes": evidence.bytes,
        "original_bytes": evidence.original_bytes,
        "speed": evidence.speed,
        "calibration": evidence.calibration,
        "tensors": summary(evidence.records),
        "mtp": evidence.mtp,
        "template": "equal" if not any("template" in one for one in evidence.structure) else "differs",
        "made_by": evidence.made_by,
        "scored_by": evidence.scored_by,
        "made_from": dict(made_from),
        "lmworks": __version__,
    }


def _failures(scheme: Scheme, evidence: Evidence) -> list[str]:
    limits, found = scheme.limits, evidence.agreement
    failures = [*problems(evidence.records, limits), *evidence.structure]
    if found is None:
        return failures or ["its logits could not be computed"]
    if not found.kl_mean <= limits.kl:
        failures.append(f"the mean KL divergence is {_number(found.kl_mean)}, more than {limits.kl:g}")
    if not found.same_choice >= limits.same_choice:
        failures.append(f"the first choice is the same for {found.same_choice:.1%} of the tokens, fewer than {limits.same_choice:.0%}")
    if not found.perplexity_ratio <= limits.perplexity_ratio:
        failures.append(f"the perplexity is {_number(found.perplexity_ratio)} times the original's, more than {limits.perplexity_ratio:g}")
    return failures


def _warnings(scheme: Scheme, evidence: Evidence) -> list[str]:
    found = list(evidence.notes)
    experts = evidence.calibration.get("experts")
    if isinstance(experts, Mapping):
        few, least = experts["under_limit"], scheme.limits.expert_tokens
        if few:
            found.append(f"{few} of {experts['count']} experts saw fewer than {least} calibration tokens; give more text")
    fallbacks = summary(evidence.records)["fallbacks"]
    if fallbacks:
        found.append(f"{len(fallbacks)} tensors have larger types than the scheme's ({fallbacks[0]['note']})")
    return found


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "not finite"
