"""How far a quantized model is from the original on held-out text: KL divergence, same first choice, perplexity.

Shapes: T tokens of a window, V vocabulary entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lmworks.evaluate.compare.differences import compare_bits
from lmworks.evaluate.statistics import wilson
from lmworks.model import Transformer
from lmworks.progress import bar
from lmworks.quantize.texts import Window

_ROWS = 64  # rows of logits that are compared at a time, in fp64


class Scorer(Protocol):
    """Computes the logits of a quantized model. `name` says what computes them."""

    name: str

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits (T, V) of the token after each of `ids`, as fp32."""


@dataclass(frozen=True)
class Agreement:
    """The quantized model against the original.

    kl_mean, kl_p99, kl_max: KL divergence of the quantized distribution from the original's, in nats per token
    same_choice: share of tokens at which both rank the same token first, with a 95% interval (Wilson)
    perplexity_ratio: of the quantized model to the original, with a 95% interval (paired bootstrap of windows)
    by_domain: domain -> tokens, kl_mean and same_choice
    """

    tokens: int
    windows: int
    kl_mean: float
    kl_p99: float
    kl_max: float
    same_choice: float
    same_choice_interval: tuple[float, float]
    perplexity: float
    original_perplexity: float
    perplexity_ratio: float
    perplexity_interval: tuple[float, float]
    by_domain: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure_agreement(original: Transformer, scorer: Scorer, windows: Sequence[Window], label: str) -> Agreement:
    """Compare the logits of both models for every token of `windows`."""
    kl: list[np.ndarray] = []
    same: list[np.ndarray] = []
    losses: list[tuple[float, float, int]] = []
    with bar(label, sum(len(window.ids) for window in windows)) as progress:
        for window in windows:
            ids = torch.tensor(window.ids)
            ours_TV, theirs_TV = original(ids[None])[0].float(), scorer.logits(window.ids)
            nats, equal, loss = _compare(ours_TV, theirs_TV, ids)
            kl.append(nats)
            same.append(equal)
            losses.append((*loss, len(ids) - 1))
            progress.advance(len(ids))
    return _summary(windows, kl, same, losses)


def _compare(ours_TV: Tensor, theirs_TV: Tensor, ids: Tensor) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """KL (T,), same first choice (T,), and the summed losses of both on the next tokens. What is not finite is a KL of infinity."""
    nats, equal, sums = [], [], [0.0, 0.0]
    for begin in range(0, len(ids), _ROWS):
        rows = slice(begin, begin + _ROWS)
        p, q = (logits[rows].double().log_softmax(-1) for logits in (ours_TV, theirs_TV))
        nats.append(torch.nan_to_num((p.exp() * (p - q)).sum(-1), nan=math.inf).clamp(min=0.0).numpy())
        equal.append((p.argmax(-1) == q.argmax(-1)).numpy())
        following = ids[begin + 1 : begin + _ROWS + 1]
        for side, logprobs in enumerate((p, q)):
            sums[side] -= float(logprobs[: len(following)].gather(1, following[:, None]).sum())
    return np.concatenate(nats), np.concatenate(equal), (sums[0], sums[1])


def _summary(
    windows: Sequence[Window], kl: list[np.ndarray], same: list[np.ndarray], losses: list[tuple[float, float, int]]
) -> Agreement:  # fmt: skip
    whole, equal = np.concatenate(kl), np.concatenate(same)
    ours, theirs, counts = (np.array(column, dtype=np.float64) for column in zip(*losses, strict=True))
    total = counts.sum()
    finite = bool(np.isfinite(theirs).all())
    difference = compare_bits(ours.tolist(), theirs.tolist(), [int(count) for count in counts]) if finite else None
    ratio = _power(difference.value) if difference else math.inf
    interval = (_power(difference.low), _power(difference.high)) if difference else (math.inf, math.inf)
    domains: dict[str, list[int]] = {}
    for index, window in enumerate(windows):
        domains.setdefault(window.domain, []).append(index)
    by_domain = {
        domain: {
            "tokens": sum(len(kl[i]) for i in indices),
            "kl_mean": float(np.concatenate([kl[i] for i in indices]).mean()),
            "same_choice": float(np.concatenate([same[i] for i in indices]).mean()),
        }
        for domain, indices in domains.items()
    }
    return Agreement(
        len(whole), len(windows), float(whole.mean()), float(np.quantile(whole, 0.99, method="higher")), float(whole.max()),
        float(equal.mean()), wilson(int(equal.sum()), len(equal)), _power(theirs.sum() / total), _power(ours.sum() / total), ratio,
        interval, by_domain,
    )  # fmt: skip


def _power(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
