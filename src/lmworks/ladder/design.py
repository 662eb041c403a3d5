"""What the runs of a ladder determine: the quantities that they leave open, and the runs that would settle them.

The bootstrap fits of a law (`fit`) spread over all laws that agree with the runs. Where the runs do not separate the effect of the size
from that of the tokens, as on the natural ladder of D = 20 N, the fits spread as far as published laws differ, so that intervals are
honest away from the runs, and the width of an interval says what is not determined. A run is worth proposing where the fits disagree about
its loss.
Proposals are chosen one after the other: each is the run whose loss, measured with the noise of the ladder, would narrow the optimal size
most (the covariance over the fits, conditioned on the runs that were proposed before).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lmworks.errors import UserError
from lmworks.plan.laws import LossLaw
from lmworks.ui.amounts import amount

LEVEL = 0.9  # of the intervals
FACTOR = 2.0  # each way: the widest interval of an optimal size that is one
EFFECT = 0.5  # of the median, each way: the widest interval of the effect of size or tokens that is one
_MOST_RUNS = 6  # that are proposed
_DEARER = 2.0  # times the operations of the ladder's largest run that a proposed one may take
_LEAST_NOISE = 1e-3  # of log loss, of a proposed run
_FEWEST_FITS = 10  # that show a spread
_LINE = 1.5  # largest factor by which runs depart from a line in (log N, log D) that are said to lie on it


@dataclass(frozen=True)
class BenchmarkScore:
    """The score of a run on a sample of `items` items; `chance` is that of blind guesses on the same items."""

    score: float
    items: int
    chance: float


@dataclass(frozen=True)
class Point:
    """One run: active parameters (without the embedding look-up), training tokens, its measured loss, its scores by benchmark, its seed,
    the fewest parameters that a size of its recipe can have, and how often it reads the source that it reads most (0: not known)."""

    parameters: float
    tokens: float
    loss: float
    scores: Mapping[str, BenchmarkScore] = field(default_factory=dict)
    seed: int = 0
    fewest: float = 0.0
    epochs: float = 0.0


@dataclass(frozen=True)
class Design:
    """`untold` names the quantities that the runs do not determine, with what is known of each. `line` describes the line that all runs lie
    on, if they do. `runs` are proposed, as parameters and tokens."""

    untold: tuple[str, ...] = ()
    line: str = ""
    runs: tuple[tuple[float, float], ...] = ()

    @property
    def doubts(self) -> list[str]:
        """What to say of the design, one line each."""
        if not self.untold:
            return []
        why = f", because {self.line}" if self.line else ""
        return [f"these runs do not tell {'; nor '.join(self.untold)}{why}. {proposal(self.runs)}"]


def require_rank(points: Sequence[Point], parameters: int) -> None:
    """Raises `UserError` if the runs are at fewer distinct pairs of size and tokens than the law has parameters."""
    distinct = {(one.parameters, one.tokens) for one in points}
    if len(distinct) < parameters:
        runs = list(_crossed(points))[: parameters + 1 - len(distinct)]
        raise UserError(
            f"{len(points)} runs at {len(distinct)} distinct pairs of size and tokens do not determine a law of {parameters} parameters: "
            f"repeating a pair shows the noise, not the law. {proposal(runs)}"
        )


def judge(law: LossLaw, points: Sequence[Point], noise: float) -> Design:
    """What the runs that `law` was fitted to determine. `noise` is the standard deviation of log loss of a run."""
    if len(law.samples) < _FEWEST_FITS:
        return Design()
    untold = tuple(_untold(law, points))
    return Design(untold, _line(points), tuple(_proposed(law, points, max(noise, _LEAST_NOISE))) if untold else ())


def proposal(runs: Sequence[tuple[float, float]]) -> str:
    if not runs:
        return "Add runs whose sizes and budgets differ more, or more seeds"
    return "Add runs of " + ", ".join(f"{amount(size)} parameters on {amount(tokens)} tokens" for size, tokens in runs)


def _effects(law: LossLaw, size: float, tokens: float) -> np.ndarray:
    """(2, fits): by how much log loss falls per unit of log size, and of log tokens."""
    e, a, b, alpha, beta, _, gamma = np.asarray(law.samples).T
    of_size, of_tokens = a / size**alpha, b / tokens**beta
    inner = of_size + of_tokens
    share = gamma * inner**gamma / inner / (e + inner**gamma)
    return np.stack([share * of_size * alpha, share * of_tokens * beta])


def _untold(law: LossLaw, points: Sequence[Point]) -> Iterator[str]:
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    flops = max(6 * one.parameters * one.tokens for one in points)
    low, high = np.quantile(law.optima(flops), ends)
    if high / low > FACTOR**2:
        yield f"the compute-optimal size ({amount(low)} to {amount(high)} parameters for the operations of the largest run)"
    middle = (float(np.exp(np.mean(np.log([getattr(one, name) for one in points])))) for name in ("parameters", "tokens"))
    for name, effect in zip(("a larger model", "more tokens"), _effects(law, *middle), strict=True):
        low, median, high = np.quantile(effect, [ends[0], 0.5, ends[1]])
        if high - low > 2 * EFFECT * median:
            yield f"how much {name} alone gains ({1 - 2**-low:.1%} to {1 - 2**-high:.1%} of the loss per doubling)"


def _line(points: Sequence[Point]) -> str:
    """The line in (log N, log D) that the runs lie on; empty if they spread around it."""
    logs = np.log([(one.parameters, one.tokens) for one in points])
    centered = logs - logs.mean(axis=0)
    along = np.linalg.svd(centered, full_matrices=False)[2][0]
    across = centered @ np.array([-along[1], along[0]])
    if np.exp(np.ptp(across)) > _LINE or abs(along[0]) < 1e-9:
        return ""
    slope = along[1] / along[0]
    if abs(slope - 1) < 0.1:
        ratios = np.exp(logs[:, 1] - logs[:, 0])
        low, high = f"{ratios.min():.3g}", f"{ratios.max():.3g}"
        return f"all of them have {low if low == high else f'{low} to {high}'} tokens per parameter"
    return f"the tokens of all of them follow from the size (D ~ N^{slope:.2g})"


def _crossed(points: Sequence[Point]) -> Iterator[tuple[float, float]]:
    """Pairs of a size and a budget of the ladder, or of one next to them, that are not among its runs, the cheapest first. A smaller size
    is left out if no model has it, as the vocabulary does not shrink with the size."""
    there = {(one.parameters, one.tokens) for one in points}
    most = _DEARER * max(one.parameters * one.tokens for one in points)
    sizes, budgets = (sorted({getattr(one, name) for one in points}) for name in ("parameters", "tokens"))
    sizes, budgets = ([values[0] / 2, *values, 2 * values[-1]] for values in (sizes, budgets))
    if sizes[0] < max(one.fewest for one in points):
        del sizes[0]
    pairs = {(size, tokens) for size in sizes for tokens in budgets} - there
    yield from sorted((pair for pair in pairs if pair[0] * pair[1] <= most), key=lambda pair: (pair[0] * pair[1], pair))


def _proposed(law: LossLaw, points: Sequence[Point], noise: float) -> Iterator[tuple[float, float]]:
    candidates = list(_crossed(points))
    if not candidates:
        return
    e, a, b, alpha, beta, _, gamma = np.asarray(law.samples).T[:, :, None]
    size, tokens = np.array(candidates).T
    losses = np.log(e + (a / size**alpha + b / tokens**beta) ** gamma)
    flops = max(6 * one.parameters * one.tokens for one in points)
    table = np.column_stack([np.log(law.optima(flops)), losses])
    covariance = np.cov(table, rowvar=False)
    wanted = (np.log(FACTOR) / 1.645) ** 2
    chosen: list[int] = []
    for _ in range(min(_MOST_RUNS, len(candidates))):
        gain = covariance[0, 1:] ** 2 / (covariance.diagonal()[1:] + noise**2)
        gain[chosen] = -1
        best = int(np.argmax(gain))
        chosen.append(best)
        yield candidates[best]
        column = covariance[:, best + 1]
        covariance = covariance - np.outer(column, column) / (column[best + 1] + noise**2)
        if covariance[0, 0] <= wanted / 4:
            return
