"""Progress with an ETA: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lmworks.terminal import Terminal

console = Terminal(stderr=True)
_LOG_EVERY_SECONDS = 15.0


class Bar:
    """The progress of one task. `advance` moves it; `note` replaces the text after the bar."""

    def advance(self, amount: float = 1) -> None:
        raise NotImplementedError

    def note(self, text: str) -> None:
        raise NotImplementedError


class _TerminalBar(Bar):
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)

    def note(self, text: str) -> None:
        self._progress.update(self._task, note=text)


class _LogBar(Bar):
    def __init__(self, label: str, total: float | None, done: float) -> None:
        self._label, self._total, self._done, self._first = label, total, done, done
        self._start = self._last = time.monotonic()
        self._note = ""

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._last >= _LOG_EVERY_SECONDS:
            self._last = now
            self._print(now)

    def note(self, text: str) -> None:
        self._note = text

    def _print(self, now: float) -> None:
        line = f"{self._label}: {self._done:,.0f}"
        if self._total:
            rate = (self._done - self._first) / max(now - self._start, 1e-9)
            left = (self._total - self._done) / rate if rate > 0 else float("inf")
            line += f" of {self._total:,.0f} ({100 * self._done / self._total:.0f}%), ETA {clock(left)}"
        console.print(f"{line}  {self._note}".rstrip(), soft_wrap=True)


def clock(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`; `?` if unknown."""
    if seconds != seconds or seconds == float("inf"):
        return "?"
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


@contextmanager
def bar(label: str, total: float | None = None, done: float = 0) -> Iterator[Bar]:
    """Show progress of work with `total` units, of which `done` are already done.

    On a terminal this is a live bar; in a log it is a line every 15 seconds, so that short work prints nothing.
    """
    if not console.is_terminal:
        yield _LogBar(label, total, done)
        return
    columns = (TextColumn("{task.description:<22}", markup=False), BarColumn(bar_width=28), TaskProgressColumn(), TimeElapsedColumn(),
               TextColumn("ETA"), TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False))
    with Progress(*columns, console=console, transient=False) as progress:
        task = progress.add_task(label, total=total, completed=int(done), note="")
        yield _TerminalBar(progress, task)
