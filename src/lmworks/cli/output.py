"""How commands print."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from lmworks.terminal import Terminal

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
