"""Measurements of probes (`lmworks doctor --probe`): kept with the run, and merged with what the rules find in its files.

They are kept in a file beside the metrics of their stage, not in the ledger: the run may be training, and the ledger is written by it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmworks.io.files import write_json
from lmworks.io.run_layout import of_stage
from lmworks.watch.diagnosis import Diagnosis, Probes, all_rules, diagnose
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Finding, Measurement

KEPT = "probes.json"
_CHANGES = ("mixture_changed", "data_changed", "optimizer_reset")  # and recipe_changed, of keys that are not harmless


@dataclass(frozen=True)
class Probed:
    """A measurement that decides about a cause. `exact`: it proves the cause alone, if it is abnormal. `where`: a place, such as an
    operator or a source."""

    code: str
    measurement: Measurement
    exact: bool = False
    where: str = ""


@dataclass(frozen=True)
class ProbeRecord:
    """What the probes of a stage have measured, at `time` (seconds since 1970). `step` is that of the newest checkpoint, whose folder is
    `checkpoint`. `lacking`: by title, why a probe could not run. `seen`: the time of the newest event of the stage in the ledger
    then, which finds its place there: the clock of the run may be another one, and either may be set."""

    stage: str
    step: int
    checkpoint: str
    time: float
    probed: Sequence[Probed]
    lacking: Mapping[str, str] = field(default_factory=dict)
    seen: float | None = None

    def keep(self, run_dir: Path) -> None:
        """Write it beside the metrics of the stage, atomically. Raises `UserError` or `OSError` for a folder that cannot be written."""
        write_json(of_stage(self.stage).place(run_dir) / KEPT, {
            "step": self.step, "checkpoint": self.checkpoint, "time": self.time, "seen": self.seen,
            "lacking": dict(self.lacking),
            "probed": [
                {"code": one.code, "exact": one.exact, "where": one.where}
                | {key: _written(getattr(one.measurement, key)) for key in _KEYS}
                for one in self.probed if not math.isnan(one.measurement.value)
            ],
        })  # fmt: skip


_KEYS = ("name", "value", "low", "high", "source", "unit")  # of a measurement


def _written(value: float | str) -> float | str | None:
    """JSON has no infinity: a missing bound, or an infinite value, is null."""
    return value if isinstance(value, str) or math.isfinite(value) else None


def kept(evidence: Evidence) -> ProbeRecord | None:
    """What the last probes of a stage have measured; None if there were none, or if it no longer holds.

    It no longer holds where the stage has started over since, where the steps were rolled back, and where the run has trained beyond them
    after a change of what is trained: of the recipe (`--allow`), the mixture, the token files or the optimizer's state. Steps without a
    change do not end it: it is shown with its step.
    """
    stage = of_stage(evidence.stage)
    try:
        record = _read(stage.stage, evidence.document(f"{stage.folder}/{KEPT}" if stage.folder else KEPT))
    except OverflowError:  # a number that no float can be
        record = None
    if record is None:
        return None
    later = _later(evidence.events, record)
    for event in later:
        undone = event["event"] == "rollback" and isinstance(event.get("to_step"), int) and event["to_step"] < record.step
        if undone or event["event"] == "start":
            return None
    changed = any(event["event"] in _CHANGES or (event["event"] == "recipe_changed" and event.get("allowed")) for event in later)
    return None if changed and evidence.step > record.step else record


def _later(events: Sequence[Mapping[str, Any]], record: ProbeRecord) -> Sequence[Mapping[str, Any]]:
    """The events after those that the probes could know of; by time for a record without `seen`, and where a bundle lacks that event."""
    places = [number for number, event in enumerate(events) if record.seen is not None and event.get("time") == record.seen]
    if places:
        return events[places[-1] + 1 :]
    return [event for event in events if isinstance(event.get("time"), int | float) and event["time"] > record.time]


def _read(stage: str, document: Mapping[str, Any]) -> ProbeRecord | None:
    """The record in a file, which anybody may have written; None if it is none."""
    step, time, probed, lacking = (document.get(key) for key in ("step", "time", "probed", "lacking"))
    if not isinstance(step, int) or not isinstance(time, int | float) or not isinstance(probed, list):
        return None
    found = [one for one in map(_read_probed, probed) if one is not None]
    reasons = {str(title): str(reason) for title, reason in lacking.items()} if isinstance(lacking, dict) else {}
    seen = float(document["seen"]) if isinstance(document.get("seen"), int | float) else None
    return ProbeRecord(stage, step, str(document.get("checkpoint", "")), float(time), found, reasons, seen)


def _read_probed(one: Any) -> Probed | None:
    if not isinstance(one, dict) or not isinstance(code := one.get("code"), str) or code not in all_rules():
        return None

    def text(key: str) -> str:
        return value if isinstance(value := one.get(key), str) else ""

    def number(key: str, absent: float) -> float:
        return float(value) if isinstance(value := one.get(key), int | float) else absent

    low, high = number("low", -math.inf), number("high", math.inf)
    measurement = Measurement(text("name"), number("value", math.inf), low, high, text("source"), text("unit"))
    return Probed(code, measurement, one.get("exact") is True, text("where"))


def diagnose_probed(evidence: Evidence, record: ProbeRecord | None = None) -> Diagnosis:
    """The diagnosis of a stage by all rules, with what `record` has measured: by default the last probes that still hold."""
    record = record or kept(evidence)
    found = diagnose(evidence)
    return found if record is None else confirmed(found, record)


def confirmed(diagnosis: Diagnosis, record: ProbeRecord) -> Diagnosis:
    """A diagnosis with what was measured: causes that the probes confirm are sure, those that they exclude are gone, and causes that only a
    probe shows are added. The source of each measurement says on which step it was made."""
    by_code: Mapping[str, list[Probed]] = defaultdict(list)
    for one in record.probed:
        source = f"{one.measurement.source} at step {record.step:,}"
        by_code[one.code].append(replace(one, measurement=replace(one.measurement, source=source)))
    problems, unsure, passed, excluded = list[Finding](), list[Finding](), list(diagnosis.passed), list[str]()
    for finding in (*diagnosis.problems, *diagnosis.unsure):
        measured = by_code.get(finding.code, [])
        merged = _merge(finding, measured)
        if finding.sure or merged.sure:
            problems.append(merged)
        elif measured and not any(one.measurement.abnormal for one in measured):
            passed.append(finding.code)
            excluded.append(finding.code)
        else:
            unsure.append(merged)
    known = {one.code for one in (*problems, *unsure)}
    for code, measured in by_code.items():
        if code in known or code not in all_rules() or not any(one.measurement.abnormal for one in measured):
            continue
        rule = all_rules()[code]
        new = _merge(Finding((), code=code, sentence=rule.sentence, area=rule.area, stage=diagnosis.stage), measured)
        (problems if new.sure else unsure).append(new)
        passed = [one for one in passed if one != code]
    probes = Probes(record.step, record.checkpoint, len(record.probed), excluded)
    lacking = {**diagnosis.not_judged, **{f"probe: {title}": reason for title, reason in record.lacking.items()}}
    return replace(diagnosis, problems=problems, unsure=unsure, passed=passed, not_judged=lacking, probes=probes)


def _merge(finding: Finding, measured: Sequence[Probed]) -> Finding:
    where = next((one.where for one in measured if one.where and one.measurement.abnormal), finding.where)
    exact = finding.exact or any(one.exact and one.measurement.abnormal for one in measured)
    return replace(finding, evidence=(*finding.evidence, *(one.measurement for one in measured)), exact=exact, where=where)
