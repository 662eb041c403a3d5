"""Failed saves: the run continues, retries before the next regular save, and ends after too many failures in a row."""

from __future__ import annotations

from lmworks.errors import UserError


class FailedSaves:
    """Counts failed saves in a row. `retry_at` is the step after which the next retry is due, None after a successful save."""

    def __init__(self, max_failures: int, every: int) -> None:
        self.max_failures, self.every = max_failures, every
        self.in_a_row = 0
        self.retry_at: int | None = None

    def failed(self, step: int, error: UserError) -> int:
        """Record a failed save that was noticed after `step` steps; returns the steps until the next retry. They are halved each time,
        since every step adds to what a crash would lose. Raises the error after the last retry."""
        self.in_a_row += 1
        if self.in_a_row >= self.max_failures:
            raise UserError(f"{error} (it failed {self.in_a_row} times in a row: stability.max_failed_saves)")
        interval = max(1, self.every >> self.in_a_row)
        self.retry_at = step + interval
        return interval

    def succeeded(self) -> None:
        self.in_a_row, self.retry_at = 0, None

    def retry_due(self, step: int) -> bool:
        """Whether a retry is due after `step` steps."""
        return self.retry_at is not None and step >= self.retry_at
