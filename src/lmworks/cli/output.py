"""How commands print."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

from lmworks.terminal import Terminal

if TYPE_CHECKING:
    from lmworks.run.runner import StageEvent

_CONTROL = re.compile("[\x7f-\x9f]")  # the others are escaped anyway


def console(piped: int = 1000) -> Terminal:
    """Standard output; in a pipe or a file no line is cut to a width that nothing has, unless a table of long texts asks for one."""
    found = Terminal()
    return found if found.is_terminal else Terminal(width=piped)


def print_json(value: Any) -> None:
    """For machines."""
    plain = (sys.stdout.encoding or "ascii").lower() != "utf-8"
    text = json.dumps(value, indent=2, ensure_ascii=plain)
    print(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def note_stage(event: StageEvent) -> None:
    """Say on stderr that a stage begins, or how long it took."""
    from lmworks.progress import console as notes

    if event.kind == "begin":
        notes.print(f"{event.stage}: begins", style="dim")
    elif event.kind == "end":
        notes.print(f"{event.stage} took {event.seconds:.0f} s", style="dim")
