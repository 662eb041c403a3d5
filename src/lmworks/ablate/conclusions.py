"""What kinds of ablations conclude beyond verdicts: the optimum of a sweep, and the critical batch size."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.ablate import noise_scale
from lmworks.ablate.measures import Measure
from lmworks.ablate.results import Results
from lmworks.ablate.run_set import Arm
from lmworks.ablate.runs import recipe_of
from lmworks.ablate.statistics import parabola
from lmworks.files import read_json, write_json


@dataclass(frozen=True)
class Findings:
    """What `Ablation.conclude` may ask of the results."""

    results: Results

    def _by_label(self, measure: Measure) -> tuple[np.ndarray, np.ndarray, list[int], list[Arm]]:
        """The numbers that the arms stand for, their mean values, the seeds and the arms."""
        arms, seeds = self.results.complete(measure)
        arms = [arm for arm in arms if arm.label is not None]
        means = self.results.table(measure, arms, seeds).mean(axis=1) if arms and seeds else np.empty(0)
        return np.array([arm.label for arm in arms], np.float64)[: len(means)], means, seeds, arms[: len(means)]

    def optimum(self, what: str) -> dict[str, Any] | None:
        """The best value of what the arms stand for, by the first measure in which lower is better."""
        measure = next((one for one in self.results.experiment.measures if one.better == "lower"), None)
        if measure is None:
            return None
        rates, means, seeds, arms = self._by_label(measure)
        if len(rates) < 3:
            return None
        found = parabola.fit(rates, means, self.results.floor(measure, arms, seeds, True)[0], len(seeds))
        return {
            "title": f"Optimum of the {what}", "what": what, "measure": measure.name, "points": _points(rates, means),
            "text": _optimum_text(what, found), **asdict(found),
        }  # fmt: skip

    def critical_batch(self, name: str, tolerance: float) -> dict[str, Any] | None:
        """The largest batch up to which the loss is within `tolerance` of the first, beside the gradient noise scale of the checkpoint."""
        experiment = self.results.experiment
        measure = next((one for one in experiment.measures if one.name == name), None)
        if measure is None or experiment.baseline.branch is None:
            return None
        sizes, means, _, arms = self._by_label(measure)
        if len(sizes) < 2 or experiment.baseline not in arms:
            return None
        rise = means - means[arms.index(experiment.baseline)]
        beyond = min((float(size) for size, one in zip(sizes, rise, strict=True) if one > tolerance), default=None)
        critical = max(float(size) for size in sizes if beyond is None or size < beyond)
        scale = self._noise_scale(experiment.baseline.branch.checkpoint)
        known = scale.get("tokens")
        least = "at least " if beyond is None else ""
        text = f"critical batch {least}{critical:,.0f} tokens (loss within {tolerance:g} nats per token of that of the first batch)"
        text += f"; gradient noise scale {f'{known:,.0f} tokens' if known else 'not bounded: the gradient is all noise'}"
        return {
            "title": "Critical batch size", "what": "batch size in tokens", "measure": name, "tolerance": tolerance, "critical": critical,
            "beyond": beyond, "points": _points(sizes, rise), "noise_scale": scale, "text": text,
        }  # fmt: skip

    def _noise_scale(self, checkpoint: Path) -> dict[str, Any]:
        """Measured once, on the data of the first finished run of the baseline."""
        experiment = self.results.experiment
        path = experiment.out / "noise_scale.json"
        if not path.exists():
            run = self.results.finished(experiment.baseline)[0]
            write_json(path, noise_scale.measure(recipe_of(run), run.directory, checkpoint).to_json())
        found: dict[str, Any] = read_json(path)
        return found


def _points(x: np.ndarray, y: np.ndarray) -> list[list[float]]:
    return [[float(one), float(other)] for one, other in zip(x, y, strict=True)]


def _optimum_text(what: str, found: parabola.Optimum) -> str:
    if found.best is None:
        text = f"no minimum was found: the parabola in the {what} does not open upward"
    elif found.low is None or found.high is None:
        text = f"best {what} {found.best:.3g}, without an interval: the curvature is within the noise"
    else:
        text = f"best {what} {found.best:.3g}, 95% interval {found.low:.3g} to {found.high:.3g}"
    return text + ("; the lowest arm is at the edge of the sweep, so extend it there" if found.at_edge else "")
