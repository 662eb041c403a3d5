"""Terminal output: text is shown literally. Markup in it is not interpreted, and no control characters reach the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from lmworks.files import is_full_disk

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and newlines


def plain(text: str) -> str:
    """Text without control characters that a terminal would interpret: file names and documents may contain some."""
    return _CONTROL.sub("", text)


class Terminal(Console):
    """rich's console for text of any origin. For styles, pass a `Text`, or a `style` for the whole line.

    Output that goes to a file on a full disk is kept for the next line instead of ending the program.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if not is_full_disk(error):
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
