"""Token budgets and sizes that fit into a time on a cluster.

A recipe whose budgets are proportions is scaled by one factor (`scale_budgets`). `fit_time` also chooses the size, if the recipe leaves it
open: compute-optimal, or smaller and trained for longer if many tokens are to be served.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.plan.costs import seconds as seconds_of
from lmworks.plan.counts import count_by_component, flops_per_token
from lmworks.plan.laws import CHINCHILLA, LossLaw, Tradeoff
from lmworks.plan.layout import devices
from lmworks.plan.plan import Plan, expected_mfu, make_plan
from lmworks.recipe.keys import Keys
from lmworks.recipe.load import Resolved, load_recipe
from lmworks.recipe.phases import in_force
from lmworks.recipe.scaling_laws import TOKENS_PER_PARAMETER
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import LARGEST, Seconds, Tokens
from lmworks.ui.amounts import amount, days

DEFAULT_RECIPE = "dense-125m"  # a dense model, whose size follows from the time
FEWEST = 20  # steps of a phase, and of tuning
SIZES = [digits * 10**power for power in range(4, 11) for digits in range(10, 100)]  # 100k to 990B, two digits
_NEAR = 1.3  # factor from the optimal tokens per parameter up to which a size is called compute-optimal
_SHOWN = (0.25, 0.5, 1.0, 2.0)  # of the chosen size: sizes that are printed beside it
Numbers = dict[Keys, tuple[Any, str]]


def scale_budgets(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with its token budgets times `factor`, in whole steps, and at least `FEWEST` steps per phase."""

    def budget(tokens: int, batch: int) -> Tokens:
        return Tokens(max(FEWEST, int(factor * tokens / batch)) * batch)

    phases = [phase.model_copy(update={"tokens": budget(phase.tokens, phase.global_batch_tokens)}) for phase in recipe.train.phases]
    tune = recipe.tune
    if tune is not None and tune.epochs is None:
        tune = tune.model_copy(update={"tokens": budget(tune.planned_tokens, tune.global_batch_tokens)})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": phases}), "tune": tune})


def largest_factor(fits: Callable[[float], bool]) -> float:
    """The largest factor for which `fits` holds; 0 if there is none."""
    high = 1.0
    while fits(high) and high < 1e12:
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Candidate:
    """A size with the tokens that fit into the time. `loss` is None without a fitted law."""

    size: str
    active: int
    tokens: int
    loss: float | None

    @property
    def tokens_per_parameter(self) -> float:
        return self.tokens / self.active


@dataclass(frozen=True)
class TimeBudget:
    """The answer to a time or an amount of money: the candidates, and which of them was chosen and why."""

    seconds: float
    why: str
    candidates: tuple[Candidate, ...]
    chosen: str
    loss_unit: str = ""


def seconds_for_money(dollars: float, cluster: Cluster) -> float:
    """The time that `dollars` rent the whole cluster for. Raises `UserError` if the cluster has no price, or for an endless time."""
    if not cluster.dollars_per_device_hour:
        raise UserError(f"--money: cluster {cluster.name} has no price; set dollars_per_device_hour in its file, or give --time")
    found = dollars / (cluster.dollars_per_device_hour * devices(cluster)) * 3600
    if not found <= LARGEST:
        raise UserError(f"--money: {dollars:g} dollars rent {cluster.name} for no time that can be planned; give for example --money 500")
    return found


def fit_time(
    resolved: Resolved, cluster: Cluster, seconds: float, *, choose_size: bool, served_tokens: float = 0.0, law: LossLaw | None = None,
    measured_mfu: float | None = None, measured_source: str = "measured here", layout_in_mfu: bool = True,
    stages: Collection[str] | None = None,
) -> tuple[Resolved, Plan, TimeBudget]:
    """The recipe with the size and token budgets whose pretraining takes `seconds` on the cluster, and its plan.

    The last four arguments are those of `make_plan`.

    With `choose_size`, the size for which the time is optimal (`Tradeoff`); otherwise the recipe's own. Raises `UserError` if no size fits
    into the memory.
    """
    planner = partial(
        make_plan, cluster=cluster, measured_mfu=measured_mfu, measured_source=measured_source, layout_in_mfu=layout_in_mfu, stages=stages
    )
    mfu = expected_mfu(cluster, resolved.recipe.model)[0] if measured_mfu is None else measured_mfu
    fitter = _Fitter(resolved, cluster, seconds, mfu, planner)
    ratio = TOKENS_PER_PARAMETER if law is None else None
    tradeoff = Tradeoff(law or CHINCHILLA, ratio, served_tokens)
    if choose_size:
        if law and law.undetermined:
            raise UserError(
                f"--ladder: its runs do not tell {law.undetermined}, so that no size can be chosen by it: lmworks ladder fit names the "
                "runs to add; or give --size, or leave --ladder out"
            )
        size, why = fitter.best_size(tradeoff)
        chosen, sizes = amount(size), [number for share in _SHOWN if (number := _two_digits(share * size)) >= SIZES[0]]
    else:
        size, why, chosen, sizes = 0, "the size of the recipe", resolved.recipe.size or "as written", []
    found, plan = fitter.fit(size)
    if plan.seconds > 1.001 * seconds:
        why += f"; with the fewest steps, {FEWEST} in each phase, it takes {days(plan.seconds)}"
    candidates = [_candidate(amount(one), fitter.at(one), law) for one in sizes if one != size]
    own = _candidate(chosen, found.recipe, law)
    candidates = sorted([*candidates, own], key=lambda one: one.active)
    return found, plan, TimeBudget(seconds, why, tuple(candidates), chosen, "" if law is None else law.unit)


def default_plan(cluster: Cluster, seconds: float) -> Plan:
    """The plan of `lmworks plan --time` without a recipe: the size and tokens that are compute-optimal for the time. Raises `UserError` if
    no size fits into the memory."""
    resolved = load_recipe(DEFAULT_RECIPE, [f"time={Seconds(seconds).text()}"], "auto")
    return fit_time(resolved, cluster, seconds, choose_size=True)[1]


class _Fitter:
    """Scales the budgets of one recipe, at any size, to one time."""

    def __init__(self, resolved: Resolved, cluster: Cluster, seconds: float, mfu: float, planner: Callable[..., Plan]) -> None:
        self._resolved, self._cluster, self._seconds, self._mfu, self._plan = resolved, cluster, seconds, mfu, planner
        self._sized: dict[int, Resolved] = {0: resolved}
        self._fitted: dict[int, tuple[Resolved, Plan]] = {}

    def _training_seconds(self, recipe: Recipe) -> float:
        """Seconds of the operations of all phases; what comes besides depends on the layout, and the plan knows it."""
        phases = zip(recipe.train.phases, in_force(recipe), strict=True)
        flops = sum(int(phase.tokens) * flops_per_token(model, int(phase.sequence_length)).total for phase, model in phases)
        return seconds_of(flops, devices(self._cluster), self._cluster, self._mfu)

    def _resized(self, size: int) -> Resolved:
        """The recipe at `size` (0: its own). The search comes back to sizes that it has tried."""
        if size not in self._sized:
            self._sized[size] = self._resolved.settled({("size",): (amount(size), "the size that the time allows")})
        return self._sized[size]

    def at(self, size: int) -> Recipe:
        """The recipe at `size` (0: its own) with budgets that fill the time with training alone."""
        return self._scaled(self._resized(size).recipe, self._seconds)

    def _scaled(self, recipe: Recipe, seconds: float) -> Recipe:
        """The budgets that take `seconds`, rounded down to whole steps: training time is proportional to the tokens."""
        return scale_budgets(recipe, seconds / self._training_seconds(recipe))

    def best_size(self, tradeoff: Tradeoff) -> tuple[int, str]:
        """The largest size that is not too large for the time and fits into the memory."""

        def too_large(size: int) -> bool:
            recipe = self.at(size)
            return tradeoff.too_large(count_by_component(recipe.model).active_computed, _tokens(recipe))

        index = max(0, bisect_right(SIZES, False, key=too_large) - 1)
        served = f", if {amount(tradeoff.served_tokens)} tokens are served (arXiv:2401.00448)" if tradeoff.served_tokens else ""
        rule = f"{tradeoff.tokens_per_parameter:g} tokens per active parameter" if tradeoff.tokens_per_parameter else "the fitted law"
        why = f"compute-optimal for this time by {rule}" if not served else f"lowest cost of training and serving{served}"
        try:
            self.fit(SIZES[index])
        except UserError as error:
            fitting = bisect_right(SIZES[:index], False, key=lambda size: not self._fits(size)) - 1
            if fitting < 0:
                raise UserError(f"no size of this model fits on {self._cluster.name}: {error}") from None
            return SIZES[fitting], f"the largest that fits into the memory ({amount(SIZES[index])} would be {why})"
        if served:
            return SIZES[index], why
        return SIZES[index], self._optimal(index, why, tradeoff) + self._spread(SIZES[index], tradeoff.law)

    def _spread(self, size: int, law: LossLaw) -> str:
        """The sizes that the bootstrap fits of a law find optimal for the operations of this time."""
        if not law.samples:
            return ""
        recipe = self.fit(size)[0].recipe
        low, high = np.quantile(law.optima(6.0 * count_by_component(recipe.model).active_computed * _tokens(recipe)), [0.05, 0.95])
        return f"; 90% interval {amount(low)} to {amount(high)} active parameters without the embedding look-up"

    def _optimal(self, index: int, why: str, tradeoff: Tradeoff) -> str:
        """Why this size, where the sizes on both sides of the optimum are not next to each other: shapes are whole, and a vocabulary does
        not shrink with the size."""
        optimum = tradeoff.tokens_per_parameter
        recipe = self.fit(SIZES[index])[0].recipe
        counts = count_by_component(recipe.model)
        ratio = _tokens(recipe) / counts.active_computed
        is_smallest = index == 0 and tradeoff.too_large(counts.active_computed, _tokens(recipe))
        if (optimum is None and not is_smallest) or (optimum is not None and 1 / _NEAR <= ratio / optimum <= _NEAR):
            return why
        other = f"; {counts.components['embedding'] / counts.total:.0%} of it is the embedding, which the size does not shrink"
        other += " (tokenizer.vocab_size does)" if recipe.model.vocab_size else ""
        where = f"where {optimum:g} are compute-optimal" if optimum else "which is more than the fitted law advises"
        if is_smallest or (optimum and ratio < optimum):
            return f"the smallest model of this recipe, with {ratio:.2g} tokens per active parameter {where}{other}"
        return f"the largest model of this recipe with at least the optimal tokens: {ratio:.2g} per active parameter {where}{other}"

    def _fits(self, size: int) -> bool:
        try:
            self.fit(size)
        except UserError:
            return False
        return True

    def fit(self, size: int) -> tuple[Resolved, Plan]:
        """The recipe at `size` whose whole plan takes the time, with that plan. The layout search makes a plan slow, so it is kept."""
        if size not in self._fitted:
            self._fitted[size] = self._fit(size)
        return self._fitted[size]

    def _fit(self, size: int) -> tuple[Resolved, Plan]:
        resized, left = self._resized(size), self._seconds
        for _ in range(4):  # what comes besides training depends on the layout, and that on the budget: a few rounds settle it
            recipe = self._scaled(resized.recipe, left)
            found = resized.settled(_numbers(recipe, size, self._seconds))
            plan = self._plan(found.recipe, found.fingerprint)
            if plan.seconds <= self._seconds:
                return found, plan
            left *= self._seconds / plan.seconds * 0.999
        return found, plan


def _numbers(scaled: Recipe, size: int, seconds: float) -> Numbers:
    why = f"fills {days(seconds)} on this cluster"
    numbers: Numbers = {("size",): (amount(size), "the size that the time allows")} if size else {}
    for index, phase in enumerate(scaled.train.phases):
        numbers["train", "phases", index, "tokens"] = phase.tokens.text(), why
    return numbers


def _candidate(name: str, recipe: Recipe, law: LossLaw | None) -> Candidate:
    counts, tokens = count_by_component(recipe.model), _tokens(recipe)
    return Candidate(name, counts.active, tokens, None if law is None else law.predict(counts.active_computed, tokens))


def _tokens(recipe: Recipe) -> int:
    return sum(int(phase.tokens) for phase in recipe.train.phases)


def _two_digits(value: float) -> int:
    return int(float(f"{value:.2g}"))


def as_plain(budget: TimeBudget) -> dict[str, Any]:
    """The budget as plain values, for --json."""
    candidates = [vars(one) | {"tokens_per_parameter": one.tokens_per_parameter} for one in budget.candidates]
    return vars(budget) | {"candidates": candidates}
