"""A few pages of general text that come with lmworks: prose, code and eight other languages, 18 KB, freely licensed.

They are what a real model is compared on where the recipe brings no text: its loss on them is that of a language model, while random tokens
cost more than a blind guess.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def general_text() -> dict[str, tuple[str, ...]]:
    """The documents of each domain: `prose`, `code` and `languages`."""
    found: dict[str, tuple[str, ...]] = {}
    for line in (Path(__file__).parent / "general_text.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found[row["domain"]] = (*found.get(row["domain"], ()), row["text"])
    return found
