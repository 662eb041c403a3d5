"""How a run ended, as an event of the ledger."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lmworks.errors import UserError
from lmworks.io.masking import mask
from lmworks.ui.exit_codes import ExitCode
from lmworks.ui.terminal import Interrupted, Preempted
from lmworks.watch.alerts import RUN_ENDED
from lmworks.watch.ledger import LEDGER, Ledger

_LONGEST = 1000  # characters
_OUTCOMES = {ExitCode.OK.value: "finished", ExitCode.PREEMPTED.value: "preempted", ExitCode.INTERRUPTED.value: "stopped"}
_remembered: list[RunEnd] = []


@dataclass(frozen=True)
class RunEnd:
    """`outcome`: finished, failed, preempted (a scheduler asked to stop) or stopped (Ctrl-C). `code` is the exit code of the command."""

    outcome: str
    code: int
    reason: str = ""

    @classmethod
    def of_code(cls, code: int, reason: str = "") -> RunEnd:
        return cls(_OUTCOMES.get(int(code), "failed"), int(code), mask(reason)[:_LONGEST])

    @classmethod
    def of_error(cls, error: BaseException) -> RunEnd:
        if isinstance(error, Preempted):
            return cls.of_code(ExitCode.PREEMPTED, str(error))
        if isinstance(error, (Interrupted, KeyboardInterrupt)):
            return cls.of_code(ExitCode.INTERRUPTED, str(error))
        if isinstance(error, UserError):
            return cls.of_code(ExitCode.USER_ERROR, str(error))
        if isinstance(error, SystemExit) and isinstance(error.code, int):  # of the handler of a signal; says nothing about the reason
            return cls.of_code(error.code)
        return cls.of_code(ExitCode.BUG, " ".join(f"{type(error).__name__}: {error}".split()))

    def record(self, run_dir: Path, to: str | None = None) -> None:
        """Write the event; `to` is the last stage that was asked for. A disk that is full keeps it out of the file, but not from those who
        listen to the ledger."""
        with suppress(OSError, UserError), Ledger(run_dir / LEDGER) as ledger:
            ledger.write(RUN_ENDED, outcome=self.outcome, code=int(self.code), to=to, reason=self.reason, process=os.getpid())


def remember(end: RunEnd | None) -> None:
    """Keep how the run of this process ended, for the rank that concludes the launch; None before it begins."""
    _remembered[:] = [] if end is None else [end]


def remembered() -> RunEnd | None:
    return _remembered[-1] if _remembered else None
