"""The report of a diagnosis, for a terminal and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

from lmworks.watch.diagnosis import Diagnosis, all_rules
from lmworks.watch.rule import AREAS, Finding, Measurement, as_json

JSON_VERSION = 1


@cache
def measured() -> Mapping[str, Mapping[str, Any]]:
    """Precision and recall of each rule, as `make doctor` has measured them on runs with planted causes; empty for rules without."""
    path = resources.files("lmworks.doctor") / "measured.json"
    found: Mapping[str, Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rules"] if path.is_file() else {}
    return found


def verdict(diagnoses: Sequence[Diagnosis]) -> str:
    """One line: how many problems, notes, checks that passed, and checks that could not run, with the reasons."""
    counts = {name: sum(len(getattr(one, name)) for one in diagnoses) for name in ("problems", "unsure", "notes", "passed")}
    parts = [_counted(counts["problems"], "problem")]
    if counts["unsure"]:
        parts.append(f"{counts['unsure']} not sure")
    if counts["notes"]:
        parts.append(_counted(counts["notes"], "note"))
    parts.append(f"{_counted(counts['passed'], 'check')} passed")
    lacking = Counter(reason for one in diagnoses for reason in one.not_judged.values())
    if lacking:
        reasons = "; ".join(f"{reason} ({count})" if count > 1 else reason for reason, count in lacking.most_common(3))
        more = f"; and {len(lacking) - 3} more reasons" if len(lacking) > 3 else ""
        parts.append(f"{sum(lacking.values())} could not run: {reasons}{more}")
    return ", ".join(parts)


def areas(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str]]:
    """A line per area: its name, a mark (ok, fail, warn or skip), and a few words."""
    for area in AREAS:
        codes = {code for code, rule in all_rules().items() if rule.area == area}
        bad = [one.code for one in diagnosis.problems if one.code in codes]
        unsure = [one.code for one in diagnosis.unsure if one.code in codes]
        passed, skipped = codes & set(diagnosis.passed), codes & set(diagnosis.not_judged)
        if bad:
            yield area, "fail", ", ".join(bad)
        elif unsure:
            yield area, "warn", f"not sure: {', '.join(unsure)}"
        elif passed:
            yield area, "ok", f"{_counted(len(passed), 'check')} passed" + (f", {len(skipped)} could not run" if skipped else "")
        elif skipped:
            yield area, "skip", f"{_counted(len(skipped), 'check')} could not run"


def probes_text(diagnosis: Diagnosis) -> str:
    """A line about the probes whose measurements a diagnosis has; empty without any."""
    if (found := diagnosis.probes) is None:
        return ""
    excluded = f"; they excluded {', '.join(found.excluded)}" if found.excluded else ""
    return f"{_counted(found.measurements, 'measurement')} of probes, at step {found.step:,} ({found.checkpoint}){excluded}"


def died_text(diagnosis: Diagnosis) -> str:
    """A line about a process that is gone without a word, which no rule can explain; empty if there is none."""
    if diagnosis.died_at is None:
        return ""
    return (
        f"its process is gone since step {diagnosis.died_at:,}, without a message: it was killed, or the machine stopped "
        "(the kernel log has kills for want of memory); the same command resumes the run"
    )


def lines(finding: Finding) -> Iterator[tuple[str, str]]:
    """A finding as pairs of a label and a text."""
    steps = ""
    if finding.steps is not None:
        first, last = finding.steps
        steps = f", step {first:,}" if first == last else f", steps {first:,} to {last:,}"
    yield "where", f"{finding.stage}{steps}{f', {finding.where}' if finding.where else ''}"
    for one in finding.evidence:
        yield "evidence", evidence_text(one)
    for excluded in finding.excluded:
        yield "ruled out", f"{excluded.code}: {excluded.because}"
    if finding.next_step:
        yield "not sure", f"one signal alone; next: {finding.next_step}"
    for change in finding.changes:
        yield "change", f"{change}{f' (cost: {change.cost})' if change.cost else ''}"
    if finding.check_afterwards:
        yield "check afterwards", finding.check_afterwards
    if rates := measured().get(finding.code):
        yield "this rule", rates_text(rates)


def evidence_text(one: Measurement) -> str:
    value = f"{one.value:.4g}{f' {one.unit}' if one.unit else ''}"
    healthy = f"; healthy: {one.healthy}" if one.healthy else ""
    return f"{one.name} = {value}{healthy}{f' ({one.source})' if one.source else ''}"


def rates_text(rates: Mapping[str, Any]) -> str:
    def rate(name: str) -> str:
        value, low, high = rates[name]
        return f"{name} {value:.2f} ({low:.2f} to {high:.2f})"

    return f"{rate('precision')}, {rate('recall')}, measured on {rates['runs']:,} runs"


def as_document(label: str, diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """For `--json`."""
    return {
        "version": JSON_VERSION, "run": label, "verdict": verdict(diagnoses),
        "stages": [
            {
                "stage": one.stage, "problems": [_with_rates(found) for found in one.problems],
                "unsure": [_with_rates(found) for found in one.unsure], "notes": [_with_rates(found) for found in one.notes],
                "passed": list(one.passed), "not_judged": dict(one.not_judged), "probes": one.probes and asdict(one.probes),
                "died_at": one.died_at,
            }
            for one in diagnoses
        ],
    }  # fmt: skip


def _with_rates(finding: Finding) -> dict[str, Any]:
    return as_json(finding) | {"measured": measured().get(finding.code)}


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
