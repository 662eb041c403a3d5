"""What an ablation compares: the names of measures.

A measure is a metric (`lmworks.metrics.names`), or a result of the evaluation stage: `evaluation/bits_per_byte` on all held-out text,
`evaluation/DOMAIN/bits_per_byte`, or `evaluation/SCORE` for a benchmark set or task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmworks.errors import UserError
from lmworks.metrics.names import METRICS, describe, is_score
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.fingerprint import as_tree
from lmworks.recipe.tree.paths import get, nearest

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
