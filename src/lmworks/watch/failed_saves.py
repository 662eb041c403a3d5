"""Saves that fail: the run goes on, tries again sooner than it would have saved, and ends after too many."""

from __future__ import annotations

from lmworks.errors import UserError


class FailedSaves:
    """Counts failed saves in a row. `retry_at` is the step after which the next try is due, None while all is well."""

    def __init__(self, most: int, every: int) -> None:
        self.most, self.every = most, every
        self.in_a_row = 0
        self.retry_at: int | None = None

    def failed(self, step: int, error: UserError) -> None:
        """A save failed, and this was found out after `step` steps. Half the distance each time: what is lost if the run dies now grows
        with each step. Raises the error after the last try."""
        self.in_a_row += 1
        if self.in_a_row >= self.most:
            raise UserError(f"{error} (it failed {self.in_a_row} times in a row: stability.max_failed_saves)")
        self.retry_at = step + max(1, self.every >> self.in_a_row)

    def succeeded(self) -> None:
        self.in_a_row, self.retry_at = 0, None

    def retry_due(self, step: int) -> bool:
        """Whether it is time to try again."""
        return self.retry_at is not None and step >= self.retry_at
