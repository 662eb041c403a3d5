"""Steps whose loss or gradient norm is not finite: they are counted, and their batches are saved for replay.

The weights are safe before this code runs: the trainer discards the update on the device (`torch.where`), on all ranks alike.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.files import atomic_path
from lmworks.progress import console

Arrays = Mapping[str, np.ndarray]


def _ignore(event: str, **fields: object) -> None:
    """The default report: no ledger."""


class BadSteps:
    """Counts bad steps in a row.

    `directory` (run_dir/bad_batches) gets at most `keep` batches over the whole run, as `step-00000012.npz`. Once it is full, no more are
    saved, because the first bad batch of a streak is the most useful one. `in_a_row` and `first` (the first step of the streak) are
    stored in the checkpoint's meta, so that a resumed run makes the same decisions as an uninterrupted one.
    """

    def __init__(self, directory: Path, max_in_a_row: int, keep: int, report: Callable[..., None] = _ignore) -> None:
        self.directory, self.max_in_a_row, self.keep, self.report = Path(directory), max_in_a_row, keep, report
        self.in_a_row, self.first = 0, 0

    def observe(self, step: int, loss: float, grad_norm: float, batch: Arrays | Callable[[], Arrays]) -> bool:
        """Record one step; returns whether it was finite. `batch` (or a function that returns it) is used only if it was not."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.first = self.first if self.in_a_row else step
        self.in_a_row += 1
        saved = self.save(step, batch)
        self.report("bad_step", step=step, loss=str(loss), grad_norm=str(grad_norm), in_a_row=self.in_a_row, batch=saved and str(saved))
        return False

    @property
    def too_many(self) -> bool:
        """Whether there were `max_in_a_row` bad steps in a row, so that skipping them is not enough."""
        return self.in_a_row >= self.max_in_a_row

    def reason(self, loss: float) -> str:
        """Why the run is rolled back or stopped, once there are too many."""
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        return f"the {what} was not finite in {self.in_a_row} steps in a row (stability.max_bad_steps)"

    @property
    def where(self) -> str:
        """Where the batches are saved, for messages."""
        return f"the saved batches are in {self.directory}" if self.keep else "no batch was saved (stability.save_bad_batches is 0)"

    def save(self, step: int, batch: Arrays | Callable[[], Arrays]) -> Path | None:
        """Save a batch for replay if fewer than `keep` have been saved; returns its path, or None, also where it cannot be written: a full
        disk is for the next save to judge."""
        path = self.directory / f"step-{step:08d}.npz"
        if not path.exists() and len(list(self.directory.glob("step-*.npz"))) >= self.keep:
            return None
        arrays: dict[str, Any] = dict(batch() if callable(batch) else batch)
        try:
            with atomic_path(path) as aside, open(aside, "wb") as handle:
                np.savez_compressed(handle, **arrays)
                handle.flush()
                os.fsync(handle.fileno())
        except (OSError, UserError) as error:
            console.print(f"the batch of step {step:,} was not saved for replay: {error}", style="yellow")
            return None
        return path


def load_bad_batch(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a saved batch, for replay. Raises `UserError` if the file cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged, or not a batch that a run has saved ({type(error).__name__}: {error})") from None
