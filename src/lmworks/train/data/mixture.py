"""Changes of the mixture of a run that has begun: requested in the ledger, and applied from a step whose batch no rank has made yet.

The event `mixture_asked` is a request, `mixture_changed` an applied change. The latter names the first step of the new mixture: the
requested step, or the first whose batch no rank can have made. A resumed run reads only `mixture_changed`, so a change is never repeated.

Replay is another mixture: sequences of general text among the conversations of a stage, so that less of it is forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.io import jsonl
from lmworks.io.files import explain_damage
from lmworks.io.run_layout import BASE
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.tune import Replay as Options
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches
from lmworks.shards.manifest import Manifest
from lmworks.shards.order import KeptRanges, MixtureOverride, OrderChange
from lmworks.watch.ledger import LEDGER, Ledger, RunLock, in_use, read_ledger, since_start_over

_ASKED, _TAKEN, _REFUSED, KEPT = "mixture_asked", "mixture_changed", "mixture_refused", "ranges_kept"


@dataclass(frozen=True)
class Changes:
    """The changes of the order in a ledger: those of the mixture that were applied, and requests that no run has seen yet, by their number;
    and the ranges that changes of the recipe have kept (`lmworks.run.changed_order`)."""

    applied: list[MixtureOverride]
    pending: dict[int, MixtureOverride]
    kept: list[KeptRanges]

    @property
    def order(self) -> list[OrderChange]:
        """What the order follows."""
        return [*self.kept, *self.applied]

    @property
    def all(self) -> list[OrderChange]:
        """All changes, if each request is applied at the requested step."""
        return [*self.order, *self.pending.values()]


def read_changes(run_dir: Path) -> Changes:
    """All changes of a run's order, applied and pending; none without a ledger."""
    path = Path(run_dir) / LEDGER
    lines = read_ledger(path) if path.exists() else []
    with explain_damage(path):
        return _changes(lines)


def _changes(lines: Sequence[Mapping[str, Any]]) -> Changes:
    asked = [MixtureOverride(line["step"], line["mixture"]) for line in lines if line["event"] == _ASKED]
    answered = {line["number"] for line in lines if line["event"] in (_TAKEN, _REFUSED)}  # requests are numbered over the whole ledger
    valid = since_start_over(lines, BASE.stage)
    taken = [MixtureOverride(line["step"], line["mixture"]) for line in valid if line["event"] == _TAKEN]
    kept = [KeptRanges(line["step"], line["ranges"], line["files"]) for line in valid if line["event"] == KEPT]
    return Changes(taken, {number: change for number, change in enumerate(asked) if number not in answered}, kept)


def next_step(run_dir: Path) -> int:
    """The next step of a run, from its metrics."""
    lines = jsonl.read(Path(run_dir) / "metrics.jsonl")
    return max((int(line["step"]) for line in lines), default=0)


def validate_change(run_dir: Path, step: int, weights: Sequence[str]) -> dict[str, float]:
    """Parse `SOURCE=WEIGHT` texts. Raises `UserError` for weights that are malformed or do not sum to 1, and for a past step."""
    if step < next_step(run_dir):
        raise UserError(f"step {step} was trained already; the run is at step {next_step(run_dir)}, choose that or a later one with --at")
    found: dict[str, float] = {}
    for text in weights:
        name, _, number = text.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise UserError(f"--set {text}: write SOURCE=WEIGHT, for example --set web=0.7") from None
    if abs(sum(found.values()) - 1) > 1e-6 or min(found.values()) <= 0:
        total = sum(found.values())
        raise UserError(f"the weights must be positive and sum to 1; these sum to {total:g}: name every source that is to be read")
    return found


def request_change(run_dir: Path, change: MixtureOverride) -> bool:
    """Request a change in the ledger; returns whether the run is active and will apply it at once."""
    line = {"step": change.step, "mixture": dict(change.mixture)}
    if in_use(run_dir):  # the run owns the ledger; appending a whole line is safe
        fd = os.open(Path(run_dir) / LEDGER, os.O_WRONLY | os.O_APPEND)
        try:
            jsonl.append(fd, {"event": _ASKED, **line})
            os.fsync(fd)
        finally:
            os.close(fd)
        return True
    with RunLock(run_dir), Ledger(Path(run_dir) / LEDGER) as ledger:
        ledger.write(_ASKED, **line)
    return False


class MixtureUpdates:
    """Applies requested changes while a run is active, at the same step on all ranks: rank 0 reads the ledger and broadcasts them."""

    def __init__(self, ledger: Ledger, batches: Batches, ranks: Ranks) -> None:
        self._ledger, self._batches, self._ranks, self._seen = ledger, batches, ranks, -1

    def has_pending(self) -> bool:
        """On rank 0, whether a request is pending. While the ledger does not grow, this costs one system call."""
        if not self._ranks.is_first:
            return False
        size = self._ledger.path.stat().st_size
        waiting = size != self._seen and bool(_changes(self._ledger.read()).pending)
        if not waiting:
            self._seen = size
        return waiting

    def apply_pending(self, first: int) -> None:
        """Apply pending requests from their step on, or from `first` if that is later. All ranks call this in the same step."""
        self._batches.set_changes(self._ranks.first(lambda: self._answer(first)))

    def _answer(self, first: int) -> list[OrderChange]:
        """All applied changes, after each pending request has been answered in the ledger."""
        changes = _changes(self._ledger.read())
        taken = changes.order
        for number, change in changes.pending.items():
            change = MixtureOverride(max(change.step, first), change.mixture)
            try:
                self._batches.order_with([*taken, change])
            except UserError as reason:
                self._ledger.write(_REFUSED, number=number, reason=str(reason))
                continue
            self._ledger.write(_TAKEN, number=number, step=change.step, mixture=dict(change.mixture))
            taken = [*taken, change]
        return taken


class Replay:
    """`rows` sequences of the recipe's token files in every step, in the keyed order of a phase of its own: a function of the step."""

    def __init__(self, recipe: Recipe, options: Options, shards_dir: Path, steps: int, rows: int, sequence_length: int) -> None:
        mixture = _mixture(recipe, options, shards_dir)
        self._batches = text_batches(recipe, "replay", mixture, shards_dir, steps, rows, sequence_length)
        self.digests, self.sources = self._batches.manifest.digests(), self._batches.sources

    def batch(self, step: int) -> Batch:
        """The sequences of a step."""
        return self._batches.batch(step)


def text_batches(
    recipe: Recipe, name: str, mixture: dict[str, float], shards_dir: Path, steps: int, rows: int, sequence_length: int
) -> Batches:
    """`steps` batches of `rows` sequences of the recipe's token files, in the keyed order of a phase called `name`."""
    phase = Phase.model_validate({
        "name": name, "tokens": f"{steps * rows * sequence_length} tokens", "mixture": mixture,
        "sequence_length": f"{sequence_length} tokens", "global_batch_tokens": f"{rows * sequence_length} tokens",
    })  # fmt: skip
    train = recipe.train.model_copy(update={"phases": [phase]})
    return Batches(recipe.model_copy(update={"train": train}), shards_dir)


def replayed_rows(options: Options, rows: int) -> int:
    """How many of the `rows` sequences of a step are general text. Raises `UserError` if the share is none or all of them."""
    found = round(options.fraction * rows)
    if not 0 < found < rows:
        raise UserError(
            f"tune.replay.fraction {options.fraction:g} of {rows} sequences in a step is {'none' if not found else 'all'} of them; raise "
            "tune.global_batch_tokens, or choose another share"
        )
    return found


def append_rows(first: Batch, second: Batch) -> Batch:
    """The sequences of two batches of the same step, one after the other; the sources of the second follow those of the first."""
    sources = None
    if first.sources is not None and second.sources is not None:
        (rows, known), (more, others) = first.sources.shape, second.sources.shape
        sources = np.zeros((rows + more, known + others), np.float32)
        sources[:rows, :known], sources[rows:, known:] = first.sources, second.sources
    return Batch(
        np.concatenate([first.tokens, second.tokens]), np.concatenate([first.labels, second.labels]),
        np.concatenate([first.cu_seqlens[:-1], second.cu_seqlens + np.int32(first.tokens.size)]), first.phase, first.step,
        sources=sources,
    )  # fmt: skip


def _mixture(recipe: Recipe, options: Options, shards_dir: Path) -> dict[str, float]:
    if options.mixture:
        return options.mixture
    if recipe.train.phases:
        return recipe.train.phases[-1].mixture
    names = [source.name for source in Manifest.load(shards_dir).sources]
    return dict.fromkeys(names, 1 / len(names))
