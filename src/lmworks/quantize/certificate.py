"""The certificate of a quantized model: what was measured, what could not be, and whether it is within its limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmworks import __version__
from lmworks.errors import UserError
from lmworks.files import explain_damage, read_json
from lmworks.quantize.accounting import TensorRecord, problems, summary
from lmworks.quantize.agreement import Agreement
from lmworks.quantize.schemes import Scheme
from lmworks.weights.verified import CERTIFICATE


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
