"""What a run was trained on, from its recipe, its ledger and the reports of its data: mixtures, domains, passes over the text.

Everything may be missing: reports of earlier versions lack newer fields, and a bundle may lack a report. Then a result is empty or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmworks.recipe.schema.units import Duration
from lmworks.watch.evidence import Evidence, Series, quantity, ratio
from lmworks.watch.rule import NotJudged

Mixture = Mapping[str, float]


@dataclass(frozen=True)
class Stretch:
    """Steps from `start` to before `stop` of pretraining with one mixture."""

    phase: str
    start: float
    stop: float
    mixture: Mixture

    def effective_sources(self, sequences: float) -> float:
        """exp of the entropy of the sources of so many sequences that are shared out by the mixture; at least 1. Four sequences hold at
        most four of eight sources."""
        weights = np.array([weight for weight in self.mixture.values() if weight > 0])
        if not len(weights) or not sequences >= 1:
            return 1.0
        quotas = weights / weights.sum() * int(sequences)
        counts = np.floor(quotas)
        counts[np.argsort(counts - quotas, kind="stable")[: int(sequences) - int(counts.sum())]] += 1  # largest remainders
        shares = counts[counts > 0] / counts.sum()
        return float(np.exp(-(shares * np.log(shares)).sum()))


def number(tree: Any, *path: str) -> float:
    """A number in nested objects; NaN if there is none."""
    for part in path:
        tree = tree.get(part) if isinstance(tree, dict) else None
    return quantity(tree)


def stretches(evidence: Evidence) -> list[Stretch]:
    """The stretches of pretraining with one mixture each, in order. They begin with a phase, or with a change of the mixture within it, by
    the recipe or by the ledger. Raises `NotJudged` without a recipe that has phases."""
    phases = {str(one.get("name")): one for one in evidence.value("train.phases", []) if isinstance(one, dict)}
    begun = [(float(step), name) for step, name in evidence.phase_starts() if name in phases]
    if not begun and phases:
        begun = [(0.0, next(iter(phases)))]
    begins = {step: (name, _mixture(phases[name].get("mixture"))) for step, name in begun}
    for start, name in begun:
        for one in phases[name].get("mixture_changes") or []:
            begins[start + _steps(one.get("at"), phases[name])] = name, _mixture(one.get("mixture"))
    for event in evidence.of("mixture_changed"):
        step = number(event, "step")
        if math.isfinite(step):
            begins[step] = next((name for start, name in reversed(begun) if start <= step), ""), _mixture(event.get("mixture"))
    starts = sorted(begins)
    if not starts:
        raise NotJudged("no phases of training in resolved.json")
    return [Stretch(begins[a][0], a, b, begins[a][1]) for a, b in zip(starts, [*starts[1:], math.inf], strict=True)]


def _steps(at: Any, phase: Mapping[str, Any]) -> float:
    try:
        step, tokens = int(number(phase, "global_batch_tokens")), int(number(phase, "tokens"))
        return float(Duration.parse(str(at)).steps(step_tokens=step, phase_tokens=tokens))
    except ValueError:
        return 0.0


def _mixture(value: Any) -> Mixture:
    found = value.items() if isinstance(value, dict) else ()
    return {str(name): float(weight) for name, weight in found if isinstance(weight, int | float) and weight > 0}


def tokens_by_source(evidence: Evidence) -> dict[str, float]:
    """Tokens that were trained on until the last line, by source, as the mixtures share them out."""
    tokens = evidence.series("train/tokens").finite
    found: dict[str, float] = {}
    before = 0.0
    for one in stretches(evidence):
        part = tokens.between(0, one.stop)
        until = part.last if len(part) else 0.0
        for name, weight in one.mixture.items():
            found[name] = found.get(name, 0.0) + weight * max(0.0, until - before)
        before = max(before, until)
    return found


def text_of_sources(evidence: Evidence) -> dict[str, float]:
    """Training tokens that each source has, by the manifest of the shards."""
    return {name: number(one, "train", "tokens") for name, one in _sources(evidence).items()}


def domains(evidence: Evidence) -> dict[str, str]:
    """The domain of each source, by the manifest of the shards, or else by the recipe."""
    found = {name: str(one.get("domain")) for name, one in _sources(evidence).items()}
    recipe = evidence.value("corpus.sources", [])
    return found or {str(one.get("name")): str(one.get("domain")) for one in recipe if isinstance(one, dict)}


def _sources(evidence: Evidence) -> dict[str, Any]:
    listed = evidence.document("shards/manifest.json").get("sources")
    return {str(one.get("name")): one for one in listed if isinstance(one, dict)} if isinstance(listed, list) else {}


def passes(evidence: Evidence) -> dict[str, float]:
    """Passes over the text of each source until the last line: tokens that were trained on, divided by the tokens that it has."""
    text = text_of_sources(evidence)
    return {name: tokens / text[name] for name, tokens in tokens_by_source(evidence).items() if text.get(name, 0) > 0}


def domain_shares(evidence: Evidence) -> dict[str, float]:
    """Share of the tokens that were trained on, by domain; 0 for a domain that is only validated."""
    of, tokens = domains(evidence), tokens_by_source(evidence)
    total = sum(tokens.values())
    found = dict.fromkeys({*of.values(), *evidence.per("validation/{domain}/loss")}, 0.0)
    for name, count in tokens.items():
        if name in of and total:
            found[of[name]] += count / total
    return found


def validation_by_domain(evidence: Evidence) -> dict[str, Series]:
    """`validation/{domain}/loss`, finite values, of domains with at least two validations."""
    found = {name: one.finite for name, one in evidence.per("validation/{domain}/loss").items() if name != "position"}
    return {name: one for name, one in found.items() if len(one) >= 2}


def mixture_key(evidence: Evidence) -> str:
    """The key of the mixture that was in force last."""
    names = [one.get("name") for one in evidence.value("train.phases", []) if isinstance(one, dict)]
    return f"train.phases.{names.index(stretches(evidence)[-1].phase)}.mixture"


def mixture_with(evidence: Evidence, shares: Mixture) -> str:
    """The mixture that was in force last with these shares of sources instead, as a value of the recipe; the other sources keep their
    proportions."""
    rest = {name: weight for name, weight in stretches(evidence)[-1].mixture.items() if name not in shares}
    scale = (1 - sum(shares.values())) / sum(rest.values())
    found = {name: weight * scale for name, weight in rest.items()} | {name: share for name, share in shares.items() if share}
    rounded = {name: round(weight, 4) for name, weight in found.items()}
    last = next(reversed(rounded))
    rounded[last] = round(1 - sum(weight for name, weight in rounded.items() if name != last), 4)  # weights must sum to one
    return "{" + ", ".join(f"{name}: {weight:g}" for name, weight in rounded.items()) + "}"


def fall(series: Series) -> float:
    """By how much a loss has fallen since the first fifth of its steps, in which any text is learned as far as its frequencies; relative,
    of the last third the median."""
    settled = series.between(0.19 * series.steps[-1], math.inf)
    return 1 - ratio(series.part(2 / 3, 1).median, settled.first)


def middle(values: Iterable[float]) -> float:
    """The middle one of finite values, the lower of two; NaN without any."""
    ordered = sorted(value for value in values if math.isfinite(value))
    return ordered[(len(ordered) - 1) // 2] if ordered else math.nan
