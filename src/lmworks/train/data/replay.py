"""Replay: sequences of general text among the conversations of a stage, so that less of it is forgotten."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.tune import Replay as Options
from lmworks.shards.format.manifest import Manifest
from lmworks.shards.read.batch import Batch
from lmworks.shards.read.batches import Batches


class Replay:
    """`rows` sequences of the recipe's token files in every step, in the keyed order of a phase of its own: a function of the step."""

    def __init__(self, recipe: Recipe, options: Options, shards_dir: Path, steps: int, rows: int, sequence_length: int) -> None:
        mixture = _mixture(recipe, options, shards_dir)
        self._batches = text_batches(recipe, "replay", mixture, shards_dir, steps, rows, sequence_length)
        self.digests = self._batches.manifest.digests()

    def batch(self, step: int) -> Batch:
        """The sequences of a step."""
        return self._batches.batch(step)


def text_batches(
    recipe: Recipe, name: str, mixture: dict[str, float], shards_dir: Path, steps: int, rows: int, sequence_length: int
) -> Batches:
    """`steps` batches of `rows` sequences of the recipe's token files, in the keyed order of a phase called `name`."""
    phase = Phase.model_validate({
        "name": name, "tokens": f"{steps * rows * sequence_length} tokens", "mixture": mixture,
        "sequence_length": f"{sequence_length} tokens", "global_batch_size": f"{rows * sequence_length} tokens",
    })  # fmt: skip
    train = recipe.train.model_copy(update={"phases": [phase]})
    return Batches(recipe.model_copy(update={"train": train}), shards_dir)


def replayed_rows(options: Options, rows: int) -> int:
    """How many of the `rows` sequences of a step are general text. Raises `UserError` if the share is none or all of them."""
    found = round(options.share * rows)
    if not 0 < found < rows:
        raise UserError(
            f"tune.replay.share {options.share:g} of {rows} sequences in a step is {'none' if not found else 'all'} of them; raise "
            "tune.global_batch_size, or choose another share"
        )
    return found


def append_rows(first: Batch, second: Batch) -> Batch:
    """The sequences of two batches of the same step, one after the other."""
    return Batch(
        np.concatenate([first.tokens, second.tokens]), np.concatenate([first.labels, second.labels]),
        np.concatenate([first.cu_seqlens[:-1], second.cu_seqlens + np.int32(first.tokens.size)]), first.phase, first.step,
    )  # fmt: skip


def _mixture(recipe: Recipe, options: Options, shards_dir: Path) -> dict[str, float]:
    if options.mixture:
        return options.mixture
    if recipe.train.phases:
        return recipe.train.phases[-1].mixture
    names = [source.name for source in Manifest.load(shards_dir).sources]
    return dict.fromkeys(names, 1 / len(names))
