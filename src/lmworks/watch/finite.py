"""The policy for steps whose loss or gradient norm is not finite (SPEC STB1).

The weights are safe before this code runs: the trainer selects the update away on the device (`torch.where`), on all ranks
alike. Here the step is counted, its batch kept for replay, and a run that cannot recover is stopped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.files import atomic_path

Arrays = Mapping[str, np.ndarray]


def _ignore(event: str, **fields: object) -> None:
    """Where nobody keeps a ledger."""


class BadSteps:
    """Counts bad steps in a row and stops the run after `max_in_a_row` of them.

    `directory` (run_dir/bad_batches) gets at most `keep` batches over the whole run, as `step-00000012.npz`; when it is full the
    newest are not kept, since the first bad batch of a streak tells the most. `in_a_row` belongs into the checkpoint's meta, so
    that a resumed run stops where an undisturbed one would.
    """

    def __init__(self, directory: Path, max_in_a_row: int, keep: int, report: Callable[..., None] = _ignore) -> None:
        self.directory, self.max_in_a_row, self.keep, self.report = Path(directory), max_in_a_row, keep, report
        self.in_a_row = 0

    def observe(self, step: int, loss: float, grad_norm: float, batch: Arrays | Callable[[], Arrays]) -> bool:
        """Tell the policy about one step; True if it was good. `batch` (or a function that makes it) is only used if it was bad.

        Raises `UserError` at the `max_in_a_row`-th bad step in a row.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        saved = self._save(step, batch)
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        self.report("bad_step", step=step, loss=str(loss), grad_norm=str(grad_norm), in_a_row=self.in_a_row, batch=saved and str(saved))
        if self.in_a_row >= self.max_in_a_row:
            self.report("stopped", step=step, reason="bad steps in a row", in_a_row=self.in_a_row)
            raise UserError(
                f"stopped at step {step}: the {what} was not finite in {self.in_a_row} steps in a row (stability.max_bad_steps); "
                f"no weight was changed by them; {self._where()}; lower optimizer.learning_rate or look at the batches"
            )
        return False

    def _where(self) -> str:
        return f"batches for replay are in {self.directory}" if self.keep else "no batch was kept (stability.save_bad_batches is 0)"

    def _save(self, step: int, batch: Arrays | Callable[[], Arrays]) -> Path | None:
        path = self.directory / f"step-{step:08d}.npz"
        if not path.exists() and len(list(self.directory.glob("step-*.npz"))) >= self.keep:
            return None
        with atomic_path(path) as aside, open(aside, "wb") as handle:
            arrays: dict[str, Any] = dict(batch() if callable(batch) else batch)
            np.savez_compressed(handle, **arrays)
            handle.flush()
            os.fsync(handle.fileno())
        return path


def load_bad_batch(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a kept batch, for replay."""
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
