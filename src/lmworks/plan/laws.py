"""Scaling laws: of the loss, with what is optimal under it, and of the scores of a benchmark.

The parametric law of the loss is L(N, D) = E + (A / N^alpha + B / D^beta)^gamma. With gamma = 1 it is that of Hoffmann et al.
(arXiv:2203.15556). With E = 0 it is equation 1.5 of Kaplan et al. (arXiv:2001.08361): a larger model then learns more from the same
additional tokens.

The downstream law of a benchmark is score = chance + (ceiling - chance) * sigmoid(slope * (midpoint - loss)). With the law of the loss it
predicts scores in two steps, as Gadre et al. (arXiv:2403.08540) predict the mean error from the loss on held-out text, and Llama 3
(arXiv:2407.21783, section 3.2.1) and the OLMo ladder (arXiv:2412.04403) the accuracy by a sigmoid from the loss of the right answers. Here
it is a sigmoid of the held-out bits per byte.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lmworks.errors import UserError
from lmworks.io.files import write_json
from lmworks.ui.amounts import amount

BENCHMARK_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}/[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"  # SET/FORM, as in the metric eval/SET/FORM
MOST_ITEMS = 10**9


def sigmoid_score(
    loss: float | np.ndarray, chance: float, ceiling: float | np.ndarray, slope: float | np.ndarray, midpoint: float | np.ndarray
) -> np.ndarray:
    """The expected score at a loss. All arguments broadcast."""
    return np.asarray(chance + (ceiling - chance) * (1 + np.tanh(slope * (midpoint - loss) / 2)) / 2)  # tanh does not overflow


@dataclass(frozen=True)
class DownstreamLaw:
    """The score of benchmark `name` on `items` items as a function of the loss, fitted to `runs` runs.

    `p_value` is of the hypothesis that the scores do not rise as the loss falls. Without `signal` they are not shown to, and the curve says
    nothing about another loss. `samples` are bootstrap fits: ceiling, slope, midpoint, and the standard deviation of the expected scores of
    runs around the curve.
    """

    name: str
    chance: float
    ceiling: float
    slope: float
    midpoint: float
    items: int
    runs: int
    p_value: float
    signal: bool
    samples: tuple[tuple[float, float, float, float], ...] = ()

    def score(self, loss: float) -> float:
        return float(sigmoid_score(loss, self.chance, self.ceiling, self.slope, self.midpoint))

    def predict(self, losses: np.ndarray, items: int, level: float = 0.9) -> tuple[float, float, float] | None:
        """Predicted score and its prediction interval, for a run with a loss distributed as `losses`, on `items` items.

        The prediction is the median. The interval contains the uncertainty of the loss and of the curve, the spread of runs around it, and
        the binomial noise of the items. None without a signal.
        """
        if not self.signal or not self.samples:
            return None
        random = np.random.default_rng(0)
        ceiling, slope, midpoint, spread = np.asarray(self.samples)[random.integers(len(self.samples), size=losses.size)].T
        expected = sigmoid_score(losses.ravel(), self.chance, ceiling, slope, midpoint)
        of_runs = np.clip(expected + spread * random.standard_normal(losses.size), 0, 1)
        low, high = np.quantile(random.binomial(items, of_runs) / items, [(1 - level) / 2, (1 + level) / 2])
        return float(np.median(expected)), float(low), float(high)


_Share = Annotated[float, Field(ge=0, le=1)]
_Slope = Annotated[float, Field(ge=0, le=1e9)]
_Loss = Annotated[float, Field(ge=-1e9, le=1e9)]


class DownstreamLawFile(BaseModel):
    """A `DownstreamLaw` in a file that anybody may have written."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=BENCHMARK_NAME)
    chance: float = Field(ge=0, lt=1)
    ceiling: _Share
    slope: _Slope
    midpoint: _Loss
    items: int = Field(gt=0, le=MOST_ITEMS)
    runs: int = Field(gt=0, le=MOST_ITEMS)
    p_value: _Share
    signal: bool
    samples: tuple[tuple[_Share, _Slope, _Loss, _Share], ...] = ()


LAW_FILE = "law.json"  # in the folder of a ladder
_OPEN, _TIMES_NOISE = 0.03, 3.0  # 90% ranges of the fits, of log loss and times that of the noise of a run, above which they disagree
FAR = 30.0  # times the operations of a ladder's largest run, beyond which nobody should rely on its law
_LARGEST_FILE = 16 << 20
_Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class FittedTo:
    """What a law was fitted to: the smallest and the largest number of active parameters and of tokens, and the operations (6 N D) of the
    largest run."""

    parameters: tuple[float, float]
    tokens: tuple[float, float]
    flops: float


@dataclass(frozen=True)
class LossLaw:
    """Loss as a function of N active parameters (without the embedding look-up) and D training tokens, in `unit`; and the scores of
    `benchmarks` as functions of this loss."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    unit: str = "nats per token"
    source: str = ""
    samples: tuple[tuple[float, float, float, float, float, float, float], ...] = ()  # bootstrap fits: e to beta, noise of log loss, gamma
    benchmarks: tuple[DownstreamLaw, ...] = ()
    gamma: float = 1.0
    fitted_to: FittedTo | None = None  # not known of published laws and of those that an earlier version has fitted
    undetermined: str = ""  # what the runs of a ladder leave open (`ladder.design`); empty where they determine the law

    def loss(self, parameters: float, tokens: float) -> float:
        return self.e + (self.a / parameters**self.alpha + self.b / tokens**self.beta) ** self.gamma

    @property
    def formula(self) -> str:
        """The law with its numbers."""
        parts = f"{self.a:.4g} / N^{self.alpha:.3f} + {self.b:.4g} / D^{self.beta:.3f}"
        return f"L = {f'{self.e:.3f} + ' if self.e else ''}{parts if self.gamma == 1 else f'({parts})^{self.gamma:.3f}'} {self.unit}"

    def predict(self, parameters: float, tokens: float) -> float:
        """Predicted loss of a run: the median of `draws`, or that of the law itself without bootstrap fits. They differ where a parameter
        is at its limit: a fit with E = 0 is the lowest of the laws that agree with the runs, not the one in the middle."""
        return float(np.median(self.draws(parameters, tokens))) if self.samples else self.loss(parameters, tokens)

    def interval(self, parameters: float, tokens: float, level: float = 0.9) -> tuple[float, float] | None:
        """Prediction interval of a run's loss: quantiles of `draws`; None without bootstrap fits."""
        if not self.samples:
            return None
        low, high = np.quantile(self.draws(parameters, tokens), [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def draws(self, parameters: float, tokens: float) -> np.ndarray:
        """Losses of a run: each bootstrap fit with 64 draws of the noise of runs around it."""
        e, a, b, alpha, beta, noise, gamma = np.asarray(self.samples).T
        fits = e + (a / parameters**alpha + b / tokens**beta) ** gamma
        return np.asarray(fits * np.exp(noise * np.random.default_rng(0).standard_normal((64, len(fits)))))

    def cautions(self, parameters: float, tokens: float) -> list[str]:
        """Why not to rely on the predicted loss of such a run, one line each."""
        return [*filter(None, (self.extrapolation(parameters, tokens), self.open_question(parameters, tokens)))]

    def open_question(self, parameters: float, tokens: float) -> str | None:
        """What to say where the bootstrap fits disagree about the loss of a run by much more than runs vary; None where they agree."""
        if not self.samples:
            return None
        fits = np.log([LossLaw(*one[:5], gamma=one[6]).loss(parameters, tokens) for one in self.samples])
        low, high = np.quantile(fits, [0.05, 0.95])
        if high - low <= max(_OPEN, _TIMES_NOISE * 3.3 * float(np.median([one[5] for one in self.samples]))):
            return None
        return (
            f"laws that agree with the runs of the ladder differ by {math.expm1(high - low):.0%} about the loss of {amount(parameters)} "
            f"active parameters on {amount(tokens)} tokens ({tokens / parameters:.3g} tokens per parameter): add runs in that direction to "
            "the ladder; lmworks ladder fit names some where its runs leave a question open"
        )

    def extrapolation(self, parameters: float, tokens: float) -> str | None:
        """What to warn of where a prediction is far beyond the runs that the law was fitted to; None within `FAR` times the operations of
        the largest."""
        fitted = self.fitted_to
        if fitted is None or (times := 6 * parameters * tokens / fitted.flops) <= FAR:
            return None
        sizes, budgets = (" to ".join(amount(one) for one in ends) for ends in (fitted.parameters, fitted.tokens))
        return (
            f"the predicted loss is for {times:,.0f} times the operations of the ladder's largest run (fitted to {sizes} active parameters "
            f"and {budgets} tokens); intervals assume that the law holds so far, so add larger runs to the ladder"
        )

    def optimal_parameters(self, flops: float) -> float:
        """N of the lowest loss for 6 N D = `flops`, whatever gamma is."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        return ratio * (flops / 6) ** (self.beta / (self.alpha + self.beta))

    def optima(self, flops: float) -> np.ndarray:
        """`optimal_parameters` of each bootstrap fit."""
        return np.array([LossLaw(*one[:5]).optimal_parameters(flops) for one in self.samples])


CHINCHILLA = LossLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658, source="refit of the Chinchilla data (Besiroglu et al., arXiv:2404.10102)")


@dataclass(frozen=True)
class Tradeoff:
    """When a model of N parameters and D tokens is too large, for a number of served tokens.

    Training costs 6 N D operations and serving S tokens costs 2 N S. Among all (N, D) of equal loss, the total is lowest where

        beta B D^-beta (1 + S / 3 D) = alpha A N^-alpha

    (Sardana et al., arXiv:2401.00448; for S = 0, the compute-optimal point). `law` gives the exponents. `tokens_per_parameter` is the
    compute-optimal ratio D / N where no law was fitted to this data: then only the exponents of the published law are used, anchored at
    this ratio.
    """

    law: LossLaw
    tokens_per_parameter: float | None
    served_tokens: float = 0.0

    def too_large(self, parameters: float, tokens: float) -> bool:
        """Whether a smaller model that is trained on more tokens reaches the same loss at a lower total cost."""
        law, served = self.law, math.log1p(self.served_tokens / (3 * tokens))
        if self.tokens_per_parameter is None:
            size, data = math.log(law.alpha * law.a / parameters**law.alpha), math.log(law.beta * law.b / tokens**law.beta)
        else:  # relative to the compute-optimal point of the same operations
            anchor = math.sqrt(parameters * tokens / self.tokens_per_parameter)
            size, data = law.alpha * math.log(anchor / parameters), law.beta * math.log(anchor * self.tokens_per_parameter / tokens)
        return size < data + served


class _FittedToFile(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    parameters: tuple[_Positive, _Positive]
    tokens: tuple[_Positive, _Positive]
    flops: _Positive


class _LawFile(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    e: float = Field(ge=0)
    a: float = Field(gt=0)
    b: float = Field(gt=0)
    alpha: float = Field(gt=0, le=4)
    beta: float = Field(gt=0, le=4)
    gamma: float = Field(1.0, gt=0, le=1)
    unit: str = Field(max_length=100)
    source: str = Field(max_length=1000)
    samples: tuple[tuple[float, float, float, float, float, float, float], ...] = ()
    fitted_to: _FittedToFile | None = None
    undetermined: str = Field("", max_length=2000)

    @field_validator("samples", mode="before")
    @classmethod
    def _with_gamma(cls, samples: Any) -> Any:
        """Files of earlier versions have no gamma."""
        if not isinstance(samples, list):
            return samples
        return [[*one, 1.0] if isinstance(one, list) and len(one) == 6 else one for one in samples]

    benchmarks: tuple[DownstreamLawFile, ...] = Field((), max_length=1000)


def save_law(law: LossLaw, path: Path) -> None:
    """Write a law as JSON."""
    write_json(path, _LawFile.model_validate(asdict(law)).model_dump(mode="json"))


def load_law(path: Path) -> LossLaw:
    """The law in a file, or in the folder of a ladder. Raises `UserError` if there is none or it is not one."""
    file = path / LAW_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} has no fitted law; name the folder of a ladder that `lmworks ladder` has fitted, or its {LAW_FILE}")
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise ValueError("it is too large")
        found = _LawFile.model_validate(json.loads(file.read_text(encoding="utf-8"))).model_dump()
        fitted = FittedTo(**found["fitted_to"]) if found["fitted_to"] else None
        return LossLaw(**found | {"benchmarks": tuple(DownstreamLaw(**one) for one in found["benchmarks"]), "fitted_to": fitted})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{file} is not a fitted law: {': '.join([*map(str, first['loc']), first['msg']])}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not a fitted law: {str(error).splitlines()[0]}") from None
