"""What the doctor finds in a run, for the run page: its findings as rows of a section, and as marks on the charts of their stages."""

from __future__ import annotations

from pathlib import Path

from lmworks.errors import UserError
from lmworks.io.run_layout import of_stage
from lmworks.pages.run_records import Json, Mark, Training
from lmworks.ui.amounts import significant
from lmworks.watch.evidence import stages_in
from lmworks.watch.probes import diagnose_probed
from lmworks.watch.rule import Finding, Measurement
from lmworks.watch.run_files import FolderFiles

_KINDS = (("problems", "problem"), ("unsure", "not sure"), ("notes", "note"))
_MOST = 12  # findings of a run; what is worse comes first
_LONGEST = 600


def read_findings(run_dir: Path, training: dict[str, Training]) -> list[Json]:
    """The findings of all stages as the page shows them. Each problem becomes a mark at the first step that it concerns, in place of
    that of a `finding` event of the same cause."""
    found: list[Json] = []
    try:
        diagnoses = [diagnose_probed(evidence) for evidence in stages_in(FolderFiles(run_dir))]
    except (OSError, UserError):  # something else lies where the records should be
        return []
    for number, (kind, word) in enumerate(_KINDS):
        for diagnosis in diagnoses:
            for finding in getattr(diagnosis, kind):
                found.append(_row(finding, word))
                if number == 0 and finding.steps is not None and diagnosis.stage in training:
                    marks = training[diagnosis.stage].marks
                    marks[:] = [one for one in marks if one.kind != "finding" or not one.text.startswith(f"{finding.code}:")]
                    marks.append(Mark("finding", finding.steps[0], f"{finding.code}: {finding.sentence}"))
    return found[:_MOST]


def _row(finding: Finding, kind: str) -> Json:
    return {
        "code": finding.code, "sentence": finding.sentence, "kind": kind, "where": _where(finding),
        "evidence": [_measurement(one) for one in finding.evidence],
        "excluded": [f"{one.code}: {one.because}"[:_LONGEST] for one in finding.excluded],
        "changes": [(f"--set {one.key}={one.value}" if one.key else "", one.advice, one.cost) for one in finding.changes],
        "check": finding.check_afterwards, "next": finding.next_step,
    }  # fmt: skip


def _where(finding: Finding) -> str:
    parts = [of_stage(finding.stage).title]
    if finding.steps is not None:
        first, last = finding.steps
        parts.append(f"step {first:,}" if first == last else f"steps {first:,} to {last:,}")
    return ", ".join([*parts, finding.where] if finding.where else parts)[:_LONGEST]


def _measurement(one: Measurement) -> tuple[str, str, str, str, bool]:
    """Name, value, healthy range, source of the range, and whether the value lies outside of it."""
    value = significant(one.value, 4) if one.value == one.value and abs(one.value) < 1e100 else "not finite"
    return one.name, f"{value} {one.unit}".rstrip(), one.healthy, one.source, one.abnormal
