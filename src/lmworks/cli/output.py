"""How commands print."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console


def console() -> Console:
    """Standard output; in a pipe or a file no line is cut to a width that nothing has."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=1000)


def print_json(value: Any) -> None:
    """For machines."""
    print(json.dumps(value, indent=2, ensure_ascii=False))
