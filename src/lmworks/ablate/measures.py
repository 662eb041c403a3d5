"""The measures that an ablation compares, by name, and their values in a finished run, with curves, items and the level of guessing.

A measure is a metric (`lmworks.metrics.names`), or a result of the evaluation stage: `evaluation/bits_per_byte` on all held-out text,
`evaluation/DOMAIN/bits_per_byte`, or `evaluation/SCORE` for a benchmark set or task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lmworks.errors import UserError
from lmworks.evaluate.bits_per_byte import OVERALL
from lmworks.io import jsonl
from lmworks.io.files import explain_damage, read_json
from lmworks.metrics.divergence import divergence
from lmworks.metrics.log import read
from lmworks.metrics.names import METRICS, describe, is_score
from lmworks.recipe.changes import as_tree
from lmworks.recipe.keys import get, nearest
from lmworks.recipe.schema.recipe import Recipe

EVALUATION = "evaluation/"
IN_TRAINING, NEEDLE = "eval/", "needle/"
BITS = "bits_per_byte"


@dataclass(frozen=True)
class Measure:
    """One measure. `has_items`: a score of items that are right or wrong."""

    name: str
    unit: str
    better: Literal["lower", "higher", ""]
    has_items: bool = False

    @property
    def per_token(self) -> bool:
        """Whether its values depend on the tokenizer."""
        return "token" in self.unit or self.name == "train/perplexity"

    @property
    def has_chance(self) -> bool:
        """Whether guessing gets a part of it right."""
        return self.has_items or (self.name.startswith(NEEDLE) and self.better == "higher")


def needs_evaluation(measures: Iterable[Measure]) -> bool:
    """Whether the evaluation stage has to run."""
    return any(measure.name.startswith(EVALUATION) for measure in measures)


def resolve(names: Sequence[str], recipes: Mapping[str, Recipe], tokenizer_of: Mapping[str, Any]) -> list[Measure]:
    """The measures that `names` stand for, {domain} spelled out. `tokenizer_of` tells the tokenizers of the arms apart.

    Raises `UserError` for a name that does not exist, that no arm writes, or whose values cannot be compared between the arms.
    """
    domains = sorted({source.domain for recipe in recipes.values() for source in recipe.corpus.sources})
    found: dict[str, Measure] = {}
    for name in names:
        for one in [name.replace("{domain}", domain) for domain in domains] if "{domain}" in name else [name]:
            found[one] = _measure(one, recipes, domains)
    if not found:
        raise UserError("measures: nothing is measured; name at least one, such as validation/bits_per_byte")
    first = next(iter(tokenizer_of))
    other = next((arm for arm, value in tokenizer_of.items() if value != tokenizer_of[first]), None)
    for measure in found.values():
        if other is not None and measure.per_token:
            raise UserError(
                f"measures: {measure.name} is in {measure.unit or 'tokens'}, and the arms {first} and {other} have different tokenizers; "
                "compare bits per byte, such as validation/bits_per_byte"
            )
    return list(found.values())


def _measure(name: str, recipes: Mapping[str, Recipe], domains: Sequence[str]) -> Measure:
    if name.startswith(EVALUATION):
        return _evaluation(name, recipes, domains)
    try:
        metric = describe(name)
    except KeyError:
        close = nearest(name, [*METRICS, f"{EVALUATION}{BITS}"])
        raise UserError(
            f"measures: there is no metric {name!r}; {f'did you mean {close!r}?' if close else 'docs/glossary.md lists them'}"
        ) from None
    part = name.split("/")[1]
    if "{domain}" in metric.name and part not in domains:
        raise UserError(f"measures: no arm writes {name}, because no source has the domain {part!r}; the domains are: {', '.join(domains)}")
    if metric.when and not any(_writes(metric.when, recipe) for recipe in recipes.values()):
        raise UserError(f"measures: no arm writes {name}, which needs {metric.when}; set it, or leave the measure out")
    sets = dict.fromkeys(one.name for recipe in recipes.values() for one in recipe.evaluate.benchmarks)
    if name.startswith(IN_TRAINING) and part not in sets:
        raise UserError(f"measures: no arm writes {name}, because evaluate.benchmarks does not name {part!r}; it names: {', '.join(sets)}")
    return Measure(name, metric.unit, metric.better, has_items=is_score(name))


def _writes(when: str, recipe: Recipe) -> bool:
    """Whether a run of the recipe has what a metric needs. What is no key of the recipe shows only when the run has ended."""
    if when.startswith("a phase with "):
        return any(getattr(phase, when.removeprefix("a phase with ")) for phase in recipe.train.phases)
    return all(_has(key, as_tree(recipe)) for key in when.split(" and "))


def _has(condition: str, tree: dict[str, Any]) -> bool:
    """Whether `KEY` is set, or `KEY: VALUE` has that value; true of anything else."""
    key, _, wanted = condition.partition(": ")
    keys = tuple(key.split("."))
    if keys[0] not in tree:
        return True
    value = get(tree, keys)
    return str(value) == wanted if wanted else bool(value) and value != "never"


def _evaluation(name: str, recipes: Mapping[str, Recipe], domains: Sequence[str]) -> Measure:
    rest = name.removeprefix(EVALUATION)
    if rest == BITS or (rest.endswith(f"/{BITS}") and rest.removesuffix(f"/{BITS}") in domains):
        return Measure(name, "bits/byte", "lower")
    if rest.endswith(f"/{BITS}"):
        domain = rest.removesuffix(f"/{BITS}")
        raise UserError(
            f"measures: no arm writes {name}, because no source has the domain {domain!r}; the domains are: {', '.join(domains)}"
        )
    wanted = [recipe.evaluate for recipe in recipes.values()]
    known = dict.fromkeys(str(getattr(one, "name", one)) for evaluate in wanted for one in (*evaluate.benchmarks, *evaluate.tasks))
    if rest.partition("/")[0] not in known:
        raise UserError(
            f"measures: no arm writes {name}, because evaluate.benchmarks and evaluate.tasks do not name {rest!r}; "
            + (
                f"they name: {', '.join(known)}"
                if known
                else "add it to one of them, for example with set: ['evaluate.benchmarks=[arc-easy]']"
            )
        )
    return Measure(name, "", "higher", has_items=True)


_EACH_STEP = ("train/", "optim/", "perf/", "experts/", "layers/", "system/")
_TAIL = 0.1  # of the steps: over these a metric of every step is averaged


@dataclass(frozen=True)
class Curve:
    """A measure along training, each point behind so many tokens."""

    tokens: list[float]
    values: list[float]


@dataclass(frozen=True)
class Reading:
    """What a run has measured, by measure. For scores, `counts` holds the number of items, `items` right (1) or wrong (0) by item if they
    were recorded, `baselines` what guessing gets, and `forms` how the items were asked. `samples` are hashes of what was measured on
    (`lmworks.ablate.sample`); `tokens` are all that were trained on, 0 where they were not recorded.
    `diverged` says why the run counts as diverged (`lmworks.metrics.divergence`), empty if it does not."""

    values: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    items: dict[str, dict[str, float]] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)
    forms: dict[str, str] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    tokens: float = 0.0
    diverged: str = ""


def read_run(run_dir: Path, measures: Sequence[Measure]) -> Reading:
    """The measures that a run has written. Values that are not finite are left out."""
    lines = read(run_dir)
    tokens = max((float(line.get("train/tokens") or 0) for line in lines), default=0.0)
    reading = Reading(tokens=tokens, diverged=divergence(run_dir, lines))
    for measure in measures:
        if not measure.name.startswith(EVALUATION):
            _read_metric(lines, measure, reading)
    if needs_evaluation(measures):
        _read_evaluation(run_dir / "evaluate", measures, lines, reading)
    return reading


def _read_metric(lines: Sequence[Mapping[str, Any]], measure: Measure, reading: Reading) -> None:
    name = measure.name
    points = _points(lines, name)
    if not points:
        return
    last = max(line.get("step", 0) for line in lines)
    reading.curves[name] = _curve(points)
    tail = [value for step, _, value in points if step > (1 - _TAIL) * last] if name.startswith(_EACH_STEP) else []
    # A validation counts only if it is of the end: a run that diverged before has no value.
    if tail:
        reading.values[name] = float(np.mean(tail))
    elif not name.startswith(_EACH_STEP) and points[-1][0] == last:
        reading.values[name] = points[-1][2]
    if measure.has_chance:
        beside = NEEDLE if name.startswith(NEEDLE) else f"{name.rpartition('/')[0]}/"
        if chance := _points(lines, f"{beside}chance"):
            reading.baselines[name] = chance[-1][2]
        if items := _points(lines, f"{beside}items"):
            reading.counts[name] = int(items[-1][2])


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float, float]]:
    """Step, tokens and value of each line with a finite value of a metric."""
    found, tokens = [], 0.0
    for line in lines:
        tokens = float(line.get("train/tokens") or tokens)
        value = line.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            found.append((int(line["step"]), tokens, float(value)))
    return found


def _curve(points: Sequence[tuple[int, float, float]]) -> Curve:
    return Curve([at for _, at, _ in points], [value for _, _, value in points])


def _read_evaluation(folder: Path, measures: Sequence[Measure], lines: Sequence[Mapping[str, Any]], reading: Reading) -> None:
    path = folder / "results.json"
    if not path.exists():
        return
    with explain_damage(path, "delete it and run the same command again"):
        model = read_json(path)["models"]["base"]
        bits = {name: record[BITS] for name, record in model[BITS].items()}
        scores = model.get("scores", {})
    outcomes = _outcomes(folder)
    for measure in measures:
        if not measure.name.startswith(EVALUATION):
            continue
        rest = measure.name.removeprefix(EVALUATION)
        if not measure.has_items:
            domain = rest.removesuffix(BITS).rstrip("/") or OVERALL
            if domain in bits:
                reading.values[measure.name] = float(bits[domain])
        elif (score := _score_of(rest, scores)) is not None:
            reading.values[measure.name] = float(scores[score]["score"])
            reading.forms[measure.name] = score
            reading.baselines[measure.name] = float(scores[score].get("baseline") or 0)
            reading.items[measure.name] = outcomes.get(score, {})
            reading.counts[measure.name] = int(scores[score].get("n") or len(reading.items[measure.name]))
            if points := _points(lines, _in_training(score)):
                reading.curves[measure.name] = _curve(points)


def _score_of(name: str, scores: Mapping[str, Any]) -> str | None:
    """The score of this name; of a set that is scored in several forms, the one that was chosen for the model."""
    return (
        name
        if name in scores
        else next((one for one, record in scores.items() if record.get("set") == name and record.get("chosen")), None)
    )


def _in_training(score: str) -> str:
    """The metric of a score (SET/FORM/SHOTS-shot) during training, in the same form on a smaller sample."""
    name, _, form = score.partition("/")
    return f"{IN_TRAINING}{name}/{form.replace('/', '-')}"


def _outcomes(folder: Path) -> dict[str, dict[str, float]]:
    """Right (1) or wrong (0) per item, by score. An item is its id and what it asks: finished runs keep the outcomes of earlier rows."""
    found: dict[str, dict[str, float]] = {}
    for line in jsonl.read(folder / "outcomes-base.jsonl"):
        with explain_damage(folder / "outcomes-base.jsonl"):
            found.setdefault(line["score"], {})[f"{line['id']} {line.get('asked', '')}"] = float(line["correct"])
    return found
