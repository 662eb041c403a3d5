"""Terminal output: text is shown literally. Markup in it is not interpreted, and no control characters reach the terminal.

Progress with an ETA: a bar on a terminal, a line now and then in a log.

Exceptions of a run that stops on request.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment

from lmworks.io.files import is_full_disk

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and newlines


def plain(text: str) -> str:
    """Text without control characters that a terminal would interpret: file names and documents may contain some."""
    return _CONTROL.sub("", text)


def leave_closed_terminal() -> bool:
    """Whether standard output or standard error was a terminal that has been closed. Writing to it fails, so they lead nowhere from then
    on: whoever closes a terminal does not ask a run to end without saving."""
    left = False
    for fd in (1, 2):
        try:
            termios.tcgetattr(fd)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # of a file or a pipe: ENOTTY
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)
                left = True
    return left


class Terminal(Console):
    """rich's console for text of any origin. For styles, pass a `Text`, or a `style` for the whole line.

    Output that goes to a file on a full disk does not end the program, which may be a run. What was to go to standard output is `lost`
    then, and the command says so at its end. Output to a terminal that was closed does not end it either.
    """

    lost: ClassVar[OSError | None] = None

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if not is_full_disk(error):
                raise
            if not self.stderr:
                Terminal.lost = error

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            if not leave_closed_terminal():
                raise

    def on_broken_pipe(self) -> None:
        """Nobody reads what is printed any more: the end of a command that prints results, but not of one that reports its progress."""
        self.quiet = True
        if not self.stderr:
            super().on_broken_pipe()

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # rich removes carriage returns from text, so a segment of one comes from the caller
            if segment.control or segment.text == "\r" or not _CONTROL.search(segment.text):
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)


console = Terminal(stderr=True)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send the output of this process and of those that it starts to a file."""
    before, quiet = [os.dup(stream) for stream in (1, 2)], console.quiet
    sys.stdout.flush()
    sys.stderr.flush()
    console.quiet = True
    with open(path, "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        console.quiet = quiet
        for stream, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, stream)
            os.close(kept)


_LOG_EVERY_SECONDS = 15.0


class Bar:
    """The progress of one task, which nobody sees. `advance` moves it; `note` replaces the text after the bar."""

    def advance(self, amount: float = 1) -> None:
        return

    def note(self, text: str) -> None:
        return


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


class Interrupted(Exception):
    """The work stopped on request, and everything is saved; the message says how to resume."""


class Preempted(Interrupted):
    """A scheduler requested the stop, with SIGTERM or SIGUSR1, or the terminal was closed (SIGHUP); the command exits with
    `ExitCode.PREEMPTED`, so that the job is requeued."""
