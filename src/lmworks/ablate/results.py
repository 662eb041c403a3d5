"""Measurements of the finished runs of an ablation: values, noise floors and contrasts, and the measures along training.

Curves are put on one grid for the quality of a measure, and have their spread over seeds for the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.ablate.contrast import UNKNOWN, Contrast, Noise, contrast, own_df, paired, pairing_pays, unpaired, with_earlier
from lmworks.ablate.cost import training_seconds
from lmworks.ablate.measures import EVALUATION, Curve, Measure, Reading, read_run
from lmworks.ablate.resolve import Experiment
from lmworks.ablate.run_set import Arm, Run, run_dir
from lmworks.ablate.runs import recipe_of, state_of
from lmworks.ablate.sample import samples
from lmworks.ablate.verdict import FAMILY_WISE, is_above


@dataclass
class Results:
    """What the finished runs of an experiment say. `readings` are kept from call to call, since a finished run does not change."""

    experiment: Experiment
    jobs: int = 1
    readings: dict[Path, Reading] = field(default_factory=dict)
    seconds: dict[Path, float] = field(default_factory=dict)

    def update(self) -> None:
        """Read the runs that have finished since the last call."""
        for run in self.experiment.runs:
            if run.directory not in self.readings and state_of(self.experiment, run) == "done":
                reading = read_run(run.directory, self.experiment.measures)
                reading.samples.update(samples(run.directory, recipe_of(run), self.experiment.measures, reading))
                self.readings[run.directory] = reading
                self.seconds[run.directory] = training_seconds(run)

    def finished(self, arm: Arm) -> list[Run]:
        return [run for run in self.experiment.runs if run.arm is arm and run.directory in self.readings]

    def reading(self, arm: Arm, seed: int) -> Reading | None:
        """What a run has measured; None while it has not finished."""
        return self.readings.get(run_dir(self.experiment.out, arm.name, seed))

    def regular(self, arm: Arm) -> list[Run]:
        """The finished runs that have not diverged."""
        return [run for run in self.finished(arm) if not self.readings[run.directory].diverged]

    def has_diverged(self, arm: Arm) -> bool:
        """Whether all finished runs of an arm have diverged."""
        return bool(self.finished(arm)) and not self.regular(arm)

    def value(self, measure: Measure, arm: Arm, seed: int) -> float | None:
        """What a run has reached; None where it has not finished or has diverged: its value is no sample of what the arm gets."""
        reading = self.reading(arm, seed)
        return None if reading is None or reading.diverged else reading.values.get(measure.name)

    def seeds(self, measure: Measure, arm: Arm) -> list[int]:
        """The seeds with which an arm has a value of a measure."""
        return [seed for seed in self.experiment.seeds if self.value(measure, arm, seed) is not None]

    def shared(self, measure: Measure, arm: Arm) -> list[int]:
        """The seeds over which an arm is compared with the baseline: those with which both have values."""
        base = self.seeds(measure, self.experiment.baseline)
        return [seed for seed in self.seeds(measure, arm) if seed in base]

    def samples(self, measure: Measure, arm: Arm) -> set[str]:
        """Hashes of what the values of an arm were measured on: one, or none where that is not known."""
        found = (self.readings[run.directory] for run in self.finished(arm))
        return {one.samples[measure.name] for one in found if measure.name in one.values and measure.name in one.samples}

    def same_sample(self, measure: Measure, arm: Arm, other: Arm | None = None) -> bool:
        """Whether the values of an arm and of the other one, the baseline by default, were measured on the same text or items."""
        return len(self.samples(measure, arm) | self.samples(measure, other or self.experiment.baseline)) <= 1

    def compared(self, measure: Measure) -> list[Arm]:
        """The arms that are compared with the baseline on a measure."""
        base = self.experiment.baseline
        return [arm for arm in self.experiment.arms.values()
                if arm is not base and self.shared(measure, arm) and self.same_sample(measure, arm)]  # fmt: skip

    def complete(self, measure: Measure) -> tuple[list[Arm], list[int]]:
        """Arms and seeds of a table without gaps, for what takes all arms together: noise floors, the quality of a measure, a sweep.

        Of the arms that were measured on the same, the baseline among them, it is the table with the most degrees of freedom over seeds: an
        arm that has diverged in most seeds is left out and does not cost the others theirs.
        """
        having = [arm for arm in self.experiment.arms.values() if self.seeds(measure, arm)]
        if not having:
            return [], []
        first = self.experiment.baseline if self.experiment.baseline in having else having[0]
        seeds = {arm: set(self.seeds(measure, arm)) for arm in having if self.same_sample(measure, arm, first)}
        among = [seeds[first] & own for own in seeds.values()]
        tables = [([arm for arm, own in seeds.items() if chosen <= own], chosen) for chosen in [*among, set.intersection(*among)]]
        arms, best = max(tables, key=lambda table: (len(table[0]) * (len(table[1]) - 1), len(table[0]) * len(table[1])))
        return arms, [seed for seed in self.experiment.seeds if seed in best]

    def table(self, measure: Measure, arms: list[Arm], seeds: list[int]) -> np.ndarray:
        """Values (arms, seeds)."""
        return np.array([[self.value(measure, arm, seed) for seed in seeds] for arm in arms], np.float64)

    def floor(self, measure: Measure, arms: list[Arm], seeds: list[int], is_paired: bool) -> tuple[Noise, int]:
        """The noise floor of a measure, of these arms and of the earlier ablation where one is named, and its degrees of freedom per seed.
        It takes all arms to vary alike."""
        own = [arm for arm in arms if not is_paired or self.experiment.is_paired(arm)]
        found = (paired if is_paired else unpaired)(self.table(measure, own, seeds)) if own and seeds else UNKNOWN
        there = self.earlier(measure)
        noise = with_earlier(found, Noise.from_json(there["paired" if is_paired else "unpaired"])) if there else found
        return noise, own_df(len(own), 2, is_paired) if own else 0

    def by_pairs(self, measure: Measure, arms: list[Arm], seeds: list[int]) -> bool:
        """Whether arms with the baseline's data order are compared with it seed by seed (`pairing_pays`)."""
        level = FAMILY_WISE / max(1, (len(arms) - 1) * len(self.experiment.measures))
        if not self.assumes_floor(measure):
            return pairing_pays(len(seeds) - 1, 2 * (len(seeds) - 1), level, welch_df=len(seeds) - 1)
        counts = {"paired": sum(map(self.experiment.is_paired, arms)), "unpaired": len(arms)}
        here = {kind: own_df(count, len(seeds), kind == "paired") if count and seeds else 0 for kind, count in counts.items()}
        earlier = self.earlier(measure)
        both = {kind: df + Noise.from_json(earlier[kind]).df for kind, df in here.items()}
        return pairing_pays(both["paired"], both["unpaired"], level)

    def contrasts(self) -> list[tuple[Arm, Measure, Contrast]]:
        """Every arm against the baseline on every measure that both have, measured on the same. Each is over the seeds of its two arms."""
        found = []
        base = self.experiment.baseline
        for measure in self.experiment.measures:
            compared, (arms, seeds) = self.compared(measure), self.complete(measure)
            for arm in compared:
                shared = self.shared(measure, arm)
                if assumes := self.assumes_floor(measure):
                    by_pairs = self.by_pairs(measure, arms, seeds)
                else:
                    by_pairs = self.by_pairs(measure, [base, *compared], shared)
                is_paired = by_pairs and self.experiment.is_paired(arm)
                assumed, per_seed = self.floor(measure, arms, seeds, is_paired) if assumes else (UNKNOWN, 1)
                own, other = self.table(measure, [arm, base], shared)
                items = self._items(measure, arm, shared)
                found.append((arm, measure, contrast(own, other, is_paired, assumed, items, per_seed)))
        return found

    def earlier(self, measure: Measure) -> Mapping[str, Any]:
        """The noise floors of the earlier ablation that is named, empty unless they were measured on what the baseline is measured on."""
        there = self.experiment.earlier.get(measure.name, {})
        known = self.samples(measure, self.experiment.baseline) | ({there["sample"]} if there.get("sample") else set())
        return there if len(known) <= 1 else {}

    def assumes_floor(self, measure: Measure) -> bool:
        """Whether verdicts take the runs to vary as those of the earlier ablation that is named."""
        there = self.earlier(measure)
        return any(Noise.from_json(there[kind]).df for kind in ("paired", "unpaired") if kind in there)

    def chance(self, measure: Measure) -> float | None:
        """What guessing gets; None where there is no such level, or no run has recorded it."""
        return max((one.baselines[measure.name] for one in self.readings.values() if measure.name in one.baselines), default=None)

    def item_count(self, measure: Measure) -> int | None:
        """The number of items of a score, the fewest of all runs; None where no run has recorded it."""
        return min((count for one in self.readings.values() if (count := one.counts.get(measure.name))), default=None)

    def above_chance(self, measure: Measure, arm: Arm, seeds: list[int]) -> bool:
        """Whether an arm is shown to be above what guessing gets. The error rate of 5% is divided over all arms."""
        chance, scores = self.chance(measure), [one for seed in seeds if (one := self.value(measure, arm, seed)) is not None]
        if chance is None or not scores:
            return False
        return is_above(np.array(scores), chance, self.item_count(measure), FAMILY_WISE / len(self.experiment.arms))

    def _items(self, measure: Measure, arm: Arm, seeds: list[int]) -> np.ndarray | int | None:
        """Differences per item (seeds, items) of a score, over the items that all runs have; their number where they were not recorded."""
        if not measure.has_items:
            return None
        pairs = []
        for seed in seeds:
            readings = self.reading(arm, seed), self.reading(self.experiment.baseline, seed)
            pairs.append([{} if one is None else one.items.get(measure.name, {}) for one in readings])
        names = sorted(set.intersection(*(set(one) for pair in pairs for one in pair)))
        if names:
            return np.array([[one[name] - other[name] for name in names] for one, other in pairs])
        return self.item_count(measure)


_QUALITY_POINTS, _PAGE_POINTS = 20, 200


def aligned(results: Results, measure: Measure, arms: list[Arm], seeds: list[int]) -> np.ndarray:
    """Curves (arms, seeds, points) at equal fractions of the budget; the final value alone where a measure has no curve.

    The last point is the final value, unless that is of the evaluation stage, whose score is of more items than its curve.
    """
    final = results.table(measure, arms, seeds)
    curves = [_curve(results, measure, arm, seed) for arm in arms for seed in seeds]
    points = min(_QUALITY_POINTS, *(len(curve.values) if curve else 1 for curve in curves))
    if points < 3:
        return final[:, :, None]
    found = np.array([_on(np.linspace(curve.tokens[0], curve.tokens[-1], points), curve) for curve in curves if curve])
    found = found.reshape(len(arms), len(seeds), points)
    if not measure.name.startswith(EVALUATION):
        found[:, :, -1] = final
    return found


def spread(results: Results, measure: Measure) -> dict[str, Any]:
    """Mean and extremes over the seeds of each arm along training, by arm; without arms that were measured on something else."""
    found = {}
    for arm in results.experiment.arms.values():
        seeds = results.seeds(measure, arm) if results.same_sample(measure, arm) else []
        curves = [curve for seed in seeds if (curve := _curve(results, measure, arm, seed)) is not None]
        if curves:
            grid = np.array(curves[0].tokens)
            grid = np.linspace(grid[0], grid[-1], _PAGE_POINTS) if len(grid) > _PAGE_POINTS else grid
            y = np.array([_on(grid, curve) for curve in curves])
            sides = {"mean": y.mean(axis=0), "low": y.min(axis=0), "high": y.max(axis=0)}
            found[arm.name] = {"tokens": grid.tolist(), **{name: values.tolist() for name, values in sides.items()}}
    return found


def _curve(results: Results, measure: Measure, arm: Arm, seed: int) -> Curve | None:
    reading = results.reading(arm, seed)
    return None if reading is None else reading.curves.get(measure.name)


def _on(grid: np.ndarray, curve: Curve) -> np.ndarray:
    return np.interp(grid, curve.tokens, curve.values)
