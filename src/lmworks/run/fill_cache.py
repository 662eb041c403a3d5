"""Reads the data of a run's next steps into the cache of this machine (`shards.cache`), before ranks start here.

A spare host does this while it waits, so that a run that resumes on it does not wait for its data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lmworks.checkpoint.listing import directories, step_of
from lmworks.errors import UserError
from lmworks.io.files import write_json
from lmworks.io.run_layout import BASE
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.run_dir import require_run
from lmworks.shards.batches import Batches
from lmworks.shards.indexed import token_dtype
from lmworks.train.data.mixture import read_changes
from lmworks.watch.batch_growth import read_growths
from lmworks.watch.ledger import LEDGER

_SHARE = 0.5  # of the cache, at most: a block that is read must not replace one that is needed first
_PAUSE = 2.0  # seconds between two looks at the checkpoints


@dataclass(frozen=True)
class Filled:
    """Steps [first, past) of pretraining whose data the cache has now."""

    first: int
    past: int


class CacheFiller:
    """Fills the cache of this machine for a run. Raises `UserError` if the run has no cache or no token files."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self._recipe = run_dir, require_run(run_dir)
        cache = self._recipe.shards.cache
        if cache is None:
            raise UserError(f"{run_dir} reads its token files without a cache; set one with shards.cache.dir and shards.cache.max_bytes")
        self._steps, self._room = int(cache.prefetch.value), _SHARE * int(cache.max_bytes)
        self._batches = Batches(self._recipe, run_dir / "shards")

    def fill(self, steps: int | None = None) -> Filled:
        """Read what the batches of the next `steps` steps (default: `shards.cache.prefetch`) after the newest checkpoint need, as far as it
        fits into half of the cache."""
        if (self.run_dir / LEDGER).exists():
            self._batches.set_growths(read_growths(self.run_dir))
            self._batches.set_changes(read_changes(self.run_dir).all)
        first = past = resume_step(self.run_dir)
        left = self._room
        for step in range(first, min(self._batches.steps, first + (steps or self._steps))):
            left -= _bytes(self._recipe, self._batches, step)
            if left < 0:
                break
            self._batches.fill_cache(step)
            past = step + 1
        return Filled(first, past)


def resume_step(run_dir: Path) -> int:
    """The first step that the run would do if its ranks were restarted now."""
    found = directories(run_dir / BASE.checkpoints)
    return step_of(found[-1]) if found else 0


def follow(run_dir: Path, status: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[Filled]:
    """Fill the cache after each new checkpoint, and write the steps that it has to `status`. Waits for a run that has not begun."""
    while not ((run_dir / "shards" / "manifest.json").exists() and (run_dir / "resolved.json").exists()):
        sleep(_PAUSE)
    filler, last = CacheFiller(run_dir), -1
    while True:
        if resume_step(run_dir) != last:
            found = filler.fill()
            last = found.first
            write_json(status, {"steps": [found.first, found.past]})
            yield found
        sleep(_PAUSE)


def _bytes(recipe: Recipe, batches: Batches, step: int) -> int:
    """Bytes of the token files that a batch is made of, without what blocks have beside them."""
    _, count = batches.order.sequences(step)
    length = int(recipe.train.phases[batches.order.phase_of(step)].sequence_length)
    return count * (length + 1) * token_dtype(recipe.model.vocab_size or 0).itemsize
