"""`lmworks doctor RUN --against RUN2`: the loss curves of two runs at equal tokens: where they part, by how much, and which keys differ.

A run that is worse than its reference from the first tokens on has another cause than one that parts from it at a phase or a resume.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.watch.evidence import Evidence
from lmworks.watch.ledger import GREW

_BINS = 40
_SIGMAS = 4.0
_LASTING = 3  # bins in a row, so that one spike of either run is no parting
_NEUTRAL = ("run_dir", "name", "threads", "launch", "metrics", "alerts", "checkpoints")
_MOST_KEYS = 40


@dataclass(frozen=True)
class Comparison:
    """Two curves over the tokens that both have trained.

    tokens: of the shorter run. parted_at: tokens from which on the losses differ by more than four standard errors, None if they do not.
    difference: mean loss of the run minus that of the reference in the last quarter of the common tokens, in nats per token, and its
    standard error. bins: (tokens, loss of the run, loss of the reference). keys: recipe keys that differ, with both values.
    before: what the ledger of the run has in the tokens before they part.
    """

    tokens: float
    parted_at: float | None
    difference: float
    error: float
    bins: list[tuple[float, float, float]]
    keys: dict[str, tuple[Any, Any]]
    before: list[str]


def compare(run: Evidence, reference: Evidence) -> Comparison:
    """Compare the training losses of two runs. Raises `UserError` if one of them has none, or if they have no tokens in common."""
    curves = []
    for evidence in (run, reference):
        tokens, loss = evidence.series("train/tokens").finite, evidence.series("train/loss").finite
        steps, at, of = np.intersect1d(tokens.steps, loss.steps, return_indices=True)
        if len(steps) < 8:
            raise UserError(f"{evidence.files.label} has fewer than 8 lines with a loss in {evidence.stage}")
        curves.append((tokens.values[at], loss.values[of]))
    start, stop = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if stop <= start:
        raise UserError("the two runs have no tokens in common: one begins after the other has ended")
    # Bins of equal width in the logarithm of tokens: a curve falls most in its first tokens.
    edges = np.exp(np.linspace(math.log(max(start, 1)), math.log(stop), _BINS + 1))
    bins, scores = [], []
    for low, high in pairwise(edges):
        inside = [y[(x >= low) & (x <= high)] for x, y in curves]
        if min(map(len, inside)) < 2:
            continue
        means = [float(values.mean()) for values in inside]
        error = math.sqrt(sum(float(values.var(ddof=1)) / len(values) for values in inside))
        bins.append((float(high), means[0], means[1]))
        scores.append((means[0] - means[1]) / max(error, 1e-12))
    parted = _first_lasting(np.array(scores))
    late = [y[(x >= start + 0.75 * (stop - start)) & (x <= stop)] for x, y in curves]
    difference = float(late[0].mean() - late[1].mean()) if min(map(len, late)) else float("nan")
    error = math.sqrt(sum(float(values.var()) / max(len(values), 1) for values in late))
    parted_at = None if parted is None else bins[parted][0]
    return Comparison(float(stop), parted_at, difference, error, bins, _differing(run.tree, reference.tree), _before(run, parted_at))


def _first_lasting(scores: np.ndarray) -> int | None:
    """The first bin from which on `_LASTING` bins in a row differ in one direction."""
    for sign in (1, -1):
        apart = sign * scores > _SIGMAS
        for index in range(len(apart) - _LASTING + 1):
            if apart[index : index + _LASTING].all():
                return index
    return None


def _before(run: Evidence, tokens: float | None) -> list[str]:
    """Events of the ledger up to the step at which the curves part, the last ones."""
    if tokens is None:
        return []
    series = run.series("train/tokens")
    step = int(series.steps[min(int(np.searchsorted(series.values, tokens)), len(series) - 1)])
    kinds = ("resume", "phase", "rollback", "spike", "bad_step", "recipe_changed", "mixture_changed", "resized", GREW)
    found = [f"{event['event']} at step {event['step']:,}" for event in run.of(*kinds) if isinstance(event.get("step"), int)
             and event["step"] <= step]  # fmt: skip
    return found[-5:]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys with different values, without those that affect no weight."""
    values = [dict(_leaves(tree)) for tree in (one, other)]
    keys = [key for key in dict.fromkeys((*values[0], *values[1])) if values[0].get(key) != values[1].get(key)]
    keys = [key for key in keys if key.split(".")[0] not in _NEUTRAL]
    return {key: (values[0].get(key), values[1].get(key)) for key in keys[:_MOST_KEYS]}


def _leaves(tree: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > 32 or not isinstance(tree, dict | list):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        yield from _leaves(value, f"{path}.{key}" if path else str(key), depth + 1)
