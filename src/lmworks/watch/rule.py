"""A rule of the doctor: one cause, its declaration and its test on the evidence of a stage; and what it has found."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from lmworks.watch.evidence import Evidence

Area = Literal["optimization", "numerics", "data", "tuning", "experts", "checkpoints", "machine", "ranks"]
AREAS: tuple[Area, ...] = ("optimization", "numerics", "data", "tuning", "experts", "checkpoints", "machine", "ranks")

SYMPTOMS = {
    "not-decreasing": "The loss does not decrease, or only slowly",
    "spikes": "The loss spikes or diverges",
    "not-finite": "The loss or the gradient is not finite",
    "too-good": "A number is too good",
    "overfitting": "Held-out loss rises while training loss falls",
    "forgetting": "Earlier abilities get worse",
    "bad-answers": "The answers of the tuned model are wrong, endless or empty",
    "no-reward": "The reward does not rise",
    "out-of-memory": "Memory runs out",
    "slow": "Training is slow",
    "hangs": "Training hangs or ends without a message",
    "resume": "Something is different after a resume",
    "checkpoints": "Saving or loading a checkpoint fails or takes long",
    "experts": "The experts are used unevenly",
}
"""What a user sees, by which the page of causes is sorted."""


@dataclass(frozen=True)
class Measurement:
    """A number with its healthy range, and the `source` of the range: a measurement, a paper, a public report. Bounds are inclusive. NaN:
    it was not measured, which is no sign of anything, and a finding does not show it."""

    name: str
    value: float
    low: float = -math.inf
    high: float = math.inf
    source: str = ""
    unit: str = ""

    @property
    def abnormal(self) -> bool:
        """Whether it was measured and lies outside the healthy range."""
        return self.value < self.low or self.value > self.high

    @property
    def healthy(self) -> str:
        """The range in words."""
        low, high = (f"{bound:.4g}" for bound in (self.low, self.high))
        if math.isinf(self.low):
            return "" if math.isinf(self.high) else f"at most {high}"
        return f"at least {low}" if math.isinf(self.high) else f"{low} to {high}"


@dataclass(frozen=True)
class Exclusion:
    """A look-alike that was ruled out: the code of its rule, and the number that excludes it."""

    code: str
    because: str


@dataclass(frozen=True)
class Change:
    """A change that mends the cause. `key` and `value` as in `--set key=value`; without a key, `advice` says what to do. `cost`: what has
    to be done again. `moves`: whether it helps by a larger or by a smaller number, of a value that does not follow from the present one;
    it is not offered where the recipe has gone further already (`offers.py`)."""

    key: str = ""
    value: str = ""
    advice: str = ""
    cost: str = ""
    moves: Literal["", "up", "down"] = ""

    def __str__(self) -> str:
        setting = f"--set {shlex.quote(f'{self.key}={self.value}')}" if self.key else ""
        return ": ".join(part for part in (setting, self.advice) if part)


@dataclass(frozen=True)
class Finding:
    """What a rule has found in a stage. `steps`: first and last step concerned. `where`: more of the place, such as a rank or a file.

    `exact`: the evidence alone proves the cause (a hash, an exit code, a counter of the kernel). Without, a cause needs two independent
    measurements outside of their healthy ranges; with fewer it is not sure, and `next_measurement` says what would decide.
    `note`: worth knowing, but nothing has to change.
    """

    evidence: Sequence[Measurement]
    steps: tuple[int, int] | None = None
    where: str = ""
    exact: bool = False
    note: bool = False
    excluded: Sequence[Exclusion] = ()
    changes: Sequence[Change] = ()
    check_afterwards: str = ""
    next_measurement: str = ""
    code: str = ""
    sentence: str = ""
    area: str = ""
    stage: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", tuple(one for one in self.evidence if not math.isnan(one.value)))

    @property
    def sure(self) -> bool:
        return self.exact or sum(one.abnormal for one in self.evidence) >= 2

    @property
    def next_step(self) -> str:
        """What would decide a finding that is not sure; empty for others, and for a note, of which nothing is left to decide."""
        return "" if self.sure or self.note else self.next_measurement


class NotJudged(Exception):
    """Raised by a rule that lacks what it needs; the message says what."""


@dataclass(frozen=True)
class Rule:
    """The declaration of a cause.

    code: stable, lower case with hyphens. sentence: stands alone. area: of the summary. symptoms: keys of `SYMPTOMS`.
    needs: metrics without which the rule cannot judge (a name with braces: at least one of them). stages: to which it applies; all if
    empty. applies: whether the run has what the cause concerns, such as experts or several ranks; otherwise it is not mentioned.
    check: returns a `Finding`, or None if the cause is not there; raises `NotJudged` if the evidence is too little. The word RUN in its
    advice and its next measurement stands for the run; without a next measurement it is the probes.
    look_alikes: by code, what tells that cause from this one. explain: how the cause comes about, what it does, and how it is mended; a
    paragraph, with its sources. outranks: codes of causes that are consequences of this one where both are found.
    cheap: also run during training, every few minutes.
    """

    code: str
    sentence: str
    area: Area
    symptoms: tuple[str, ...]
    check: Callable[[Evidence], Finding | None]
    explain: str
    needs: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    look_alikes: Mapping[str, str] = field(default_factory=dict)
    outranks: tuple[str, ...] = ()
    applies: Callable[[Evidence], bool] = lambda evidence: True
    cheap: bool = True

    def judge(self, evidence: Evidence) -> Finding | None:
        """Apply the rule. Raises `NotJudged` with what is missing."""
        missing = [name for name in self.needs if not evidence.has(name)]
        if missing:
            raise NotJudged(f"no {' and no '.join(missing)}")
        found = self.check(evidence)
        if found is None:
            return None
        run = partial(re.compile(r"\bRUN\b").sub, lambda _: shlex.quote(evidence.files.label))
        return replace(
            found, code=self.code, sentence=self.sentence, area=self.area, stage=evidence.stage,
            changes=[replace(change, advice=run(change.advice)) for change in found.changes],
            next_measurement=run(found.next_measurement or "lmworks doctor RUN --probe"),
        )  # fmt: skip


def as_json(finding: Finding) -> dict[str, Any]:
    """A finding for `--json` and the ledger; the form is stable."""
    return {
        "code": finding.code, "sentence": finding.sentence, "area": finding.area, "stage": finding.stage, "sure": finding.sure,
        "note": finding.note, "steps": list(finding.steps) if finding.steps else None, "where": finding.where,
        "evidence": [
            {"name": one.name, "value": _plain(one.value), "low": _plain(one.low), "high": _plain(one.high), "source": one.source,
             "unit": one.unit, "abnormal": one.abnormal}
            for one in finding.evidence
        ],
        "excluded": [{"code": one.code, "because": one.because} for one in finding.excluded],
        "changes": [{"key": one.key, "value": one.value, "advice": one.advice, "cost": one.cost} for one in finding.changes],
        "check_afterwards": finding.check_afterwards, "next_measurement": finding.next_measurement,
    }  # fmt: skip


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
