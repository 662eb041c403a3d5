"""The training text comes in order: by source, by file or by topic."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmworks.watch import trends
from lmworks.watch.data_facts import Stretch, stretches, validation_by_domain
from lmworks.watch.evidence import Evidence, Series, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules._commands import show_batch

_SOURCES, _MEMORY, _UNSTEADY = 0.7, 0.3, 1.2
_MIXED = 1.3  # effective sources, below which a step of one source is no sign
_FEWEST = 40  # lines


@dataclass(frozen=True)
class Mixing:
    """How the sources are mixed in a stretch of steps. sources: effective number of sources per step, relative to what its sequences hold
    where the mixture shares them out, a value per line; empty where that is about one. memory: autocorrelation of the training loss around
    its trend; NaN if there are too few lines."""

    stretch: Stretch
    sources: Series
    memory: float


def mixing(evidence: Evidence) -> list[Mixing]:
    """Of each stretch of pretraining with one mixture of several sources. Raises `NotJudged` if there is none with enough lines."""
    found = []
    tokens, length = evidence.series("train/batch_tokens"), evidence.series("train/sequence_length")
    for one in stretches(evidence):
        loss = evidence.series("train/loss").finite.between(one.start + 1, one.stop + 1)
        # the loss falls fastest in the first fifth, where no low polynomial follows it
        settled = loss.part(0.2, 1)
        if len(settled) < _FEWEST:
            continue
        sources = evidence.series("train/effective_sources").finite.between(one.start + 1, one.stop + 1)
        of_step, of_row = (series.between(one.start + 1, one.stop + 1).median for series in (tokens, length))
        most = one.effective_sources(ratio(of_step, of_row))
        if most < _MIXED:
            sources = sources.between(0, 0)
        found.append(Mixing(one, Series(sources.steps, sources.values / most), _memory(settled)))
    if not found:
        raise NotJudged(f"fewer than {_FEWEST} lines of one mixture")
    return found


def _memory(loss: Series) -> float:
    """The mean autocorrelation of log loss around its trend, a cubic, over lags of one and two lines."""
    x = np.linspace(-1, 1, len(loss))
    values = np.log(np.maximum(loss.values, 1e-9))
    apart = values - np.polyval(np.polyfit(x, values, 3), x)
    limit = 4 * trends.spread(apart)  # one spike is no level
    apart = np.clip(apart, -limit, limit)
    return (trends.autocorrelation(apart, 1) + trends.autocorrelation(apart, 2)) / 2


def unsteadiness(evidence: Evidence) -> float:
    """How much the held-out losses of domains move against each other: the sum of the moves of a domain's loss from one validation to the
    next, relative to the mean of all domains, over the fall of that mean; the largest of all domains. A spike moves all of them alike. NaN
    with fewer than two domains or five validations."""
    curves = [one for one in validation_by_domain(evidence).values() if len(one) >= 5]
    if len(curves) < 2 or any(not np.array_equal(one.steps, curves[0].steps) for one in curves):
        return math.nan
    values = np.array([one.values for one in curves])
    mean = values.mean(0)
    moves = np.abs(np.diff(values - mean, axis=1)).sum(1).max()
    fall = mean[0] - mean[-1]
    return float(moves / fall) if fall > 0.05 * mean[0] else math.nan


def _check(evidence: Evidence) -> Finding | None:
    stages = mixing(evidence)
    worst = min(stages, key=lambda one: one.sources.median if len(one.sources) else 1.0)
    share = worst.sources.median
    memory = max((one.memory for one in stages), default=math.nan)
    if len(worst.sources) and worst.sources.part(0, 0.2).median > 0.9:
        return None  # order-changed
    measured = [
        Measurement(
            "train/effective_sources relative to the mixture's",
            share,
            low=_SOURCES,
            source="1 by the order of lmworks; measured: at least 0.95",
        ),
        Measurement(
            "autocorrelation of train/loss around its trend",
            memory,
            high=_MEMORY,
            source="measured: at most 0.1 in healthy runs of make doctor",
        ),
        Measurement(
            "moves of the domains' validation against each other, relative to its fall",
            unsteadiness(evidence),
            high=_UNSTEADY,
            source="measured: at most 0.3 in healthy runs of make doctor, 0.9 where the mixture changes",
        ),
    ]
    if len(worst.sources) and not measured[0].abnormal:
        return None
    abnormal = [one for one in measured if one.abnormal]
    if not abnormal or (len(abnormal) < 2 and abnormal[0] is not measured[0]):
        return None
    first = int(worst.stretch.start) + 1
    return Finding(
        measured,
        steps=(first, min(int(min(worst.stretch.stop, 1 << 53)), evidence.step)),
        excluded=[Exclusion("order-changed", "it is so from the first step on")],
        changes=[
            Change(
                advice="read the token files in the order of lmworks (docs/data-order.md); shuffle text of your own before it is tokenized",
                cost="start again: the order of steps that were trained cannot be changed",
            )
        ],
        check_afterwards="train/effective_sources is that of the mixture in every line",
        next_measurement=f"{show_batch(evidence, first)}, which shows the rows of step {first:,}",
    )


RULE = Rule(
    "unshuffled-data",
    "The training text comes in order, so that steps hold text of one kind only.",
    "data",
    ("not-decreasing", "spikes"),
    _check,
    "Gradients of a step that holds text of one kind pull the model towards it and away from the others, so that it forgets them until "
    "they "
    "come again: the training loss moves in levels, and the held-out loss of each domain goes up and down. lmworks computes the order "
    "from "
    "the seed, each source in its share in every step; what brings text in order is a change of that code, or token files that were "
    "written in order, such as by topic or by length.",
    needs=("train/loss",),
    stages=("pretrain",),
    look_alikes={
        "order-changed": "the first steps are mixed",
        "learning-rate-too-high": "no memory from step to step",
        "batch-too-small": "no memory from step to step",
    },
)
