"""A diagnosis: all rules applied to the evidence of a stage, consequences placed below their causes."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from lmworks.watch import rules
from lmworks.watch.evidence import Evidence
from lmworks.watch.offers import offered
from lmworks.watch.rule import Finding, NotJudged, Rule

_CONFUSED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)  # raised by values that no run of ours writes


@cache
def all_rules() -> Mapping[str, Rule]:
    """The rules of `watch/rules/` by code, in the order of their codes."""
    modules = (import_module(f"{rules.__name__}.{module.name}") for module in pkgutil.iter_modules(rules.__path__))
    found = [module.RULE for module in modules if hasattr(module, "RULE")]
    return {rule.code: rule for rule in sorted(found, key=lambda rule: rule.code)}


@dataclass(frozen=True)
class Probes:
    """The probes of a stage: `step` and folder of the checkpoint that they measured, the number of measurements, and the codes of causes
    that the rules suspected and a measurement excluded."""

    step: int
    checkpoint: str
    measurements: int
    excluded: Sequence[str]


@dataclass(frozen=True)
class Diagnosis:
    """Of one stage. problems: the most certain first, causes before their consequences; unsure: causes with fewer than two independent
    signals; notes: worth knowing; passed: codes of the rules that found nothing; not_judged: by code, what a rule lacks. probes: those
    whose measurements are among the evidence (`probes.py`). died_at: the last recorded step of a process that is gone without the end of
    the stage and without a message; None otherwise."""

    stage: str
    problems: Sequence[Finding]
    unsure: Sequence[Finding]
    notes: Sequence[Finding]
    passed: Sequence[str]
    not_judged: Mapping[str, str]
    probes: Probes | None = None
    died_at: int | None = None


def diagnose(evidence: Evidence, apply: Iterable[Rule] | None = None) -> Diagnosis:
    """Apply rules (all by default) to a stage."""
    found: list[Finding] = []
    passed: list[str] = []
    lacking: dict[str, str] = {}
    for rule in all_rules().values() if apply is None else apply:
        if rule.stages and evidence.stage not in rule.stages:
            continue
        try:
            if not rule.applies(evidence):
                continue
            finding = rule.judge(evidence)
        except NotJudged as reason:
            lacking[rule.code] = str(reason)
        except _CONFUSED as error:
            lacking[rule.code] = f"its evidence is damaged ({type(error).__name__}: {str(error)[:120]})"
        else:
            if finding is None:
                passed.append(rule.code)
            else:
                found.append(offered(evidence, finding))
    problems = _causes_first([one for one in found if one.sure and not one.note])
    consequences = {code for one in problems for code in all_rules()[one.code].outranks}
    unsure = [one for one in found if not one.sure and not one.note and one.code not in consequences]
    notes = [one for one in found if one.note]
    return Diagnosis(evidence.stage, problems, unsure, notes, passed, lacking, died_at=evidence.step if evidence.died else None)


def _causes_first(found: Sequence[Finding]) -> list[Finding]:
    """Exact findings first, then by the number of abnormal measurements, those that only cost time last; a cause before its
    consequences."""
    ordered = sorted(
        found, key=lambda one: (all_rules()[one.code].symptoms == ("slow",), not one.exact, -sum(m.abnormal for m in one.evidence))
    )
    below = {code for one in found for code in all_rules()[one.code].outranks}
    return [one for one in ordered if one.code not in below] + [one for one in ordered if one.code in below]
