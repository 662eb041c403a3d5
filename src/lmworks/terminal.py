"""What people read: text is shown as it is, whoever wrote it. No markup in it is obeyed, and no control character reaches the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and newlines


def plain(text: str) -> str:
    """Text without the control characters that a terminal would obey: names of files and texts from anywhere may have some."""
    return _CONTROL.sub("", text)


class Terminal(Console):
    """rich's console for text of any origin. What is to be styled is a `Text`, or the whole line has a `style`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # a carriage return at the end is the caller's: rich takes it out of every text
            if segment.control or segment.text == "\r" or not _CONTROL.search(segment.text):
                yield segment
            else:
                yield Segment(plain(segment.text), segment.style)
