"""The credentials of URLs in a recipe, stored separately from the URLs.

A recipe contains masked URLs only (`hide`, called when a node is created), so everything that is written or printed from it (stamps,
reports, origins of documents, ledgers) is masked. Code that opens a URL gets the real one with `reveal`. If other processes or later
commands need the credentials, they are stored in a file that only its owner can read (`save`, `load`).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.files import read_json, write_json
from lmworks.masking import MASK, USER, map_strings, mask, mask_values

NAME = "url_credentials.json"
_MASKED_USER = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://{re.escape(MASK)}@[^\s/?#\"]*")
_MASKED_VALUE = re.compile(rf"[?&;][^=&;?#\s\"]+={re.escape(MASK)}")
_USER_AND_HOST = re.compile(USER.pattern + r"[^\s/?#\"]*")

# Masked text to real text: scheme, user and host, which covers all URLs of a host, and whole URLs with a secret query.
_known: dict[str, str] = {}


def found(text: str) -> dict[str, str]:
    """The secrets that `mask` removes from a text: masked text to real text."""
    masked = mask(text)
    if masked == text:
        return {}
    taken = {mask(real): real for real in (one[0] for one in _USER_AND_HOST.finditer(text)) if mask(real) != real}
    return taken | ({masked: text} if mask_values(text) != text else {})


def hide(value: Any) -> Any:
    """Mask a string, or all strings in lists and maps; the secrets are remembered for `reveal`."""

    def change(text: str) -> str:
        _known.update(found(text))
        return mask(text)

    return map_strings(value, change)


def refuse_conflicting(value: Any) -> None:
    """Raise `UserError` if two strings in `value` differ only in their credentials, because masked they would be equal."""
    seen: dict[str, str] = {}

    def look(text: str) -> str:
        for masked, real in found(text).items():
            if seen.setdefault(masked, real) != real:
                raise UserError(f"{masked} is written with two different credentials; a recipe can have one for each host")
        return text

    map_strings(value, look)


def reveal(value: Any) -> Any:
    """The inverse of `hide`. Raises `UserError` for a URL whose credentials are not known here."""
    return map_strings(value, _reveal)


def _reveal(text: str) -> str:
    if text in _known:
        return _known[text]
    real = _MASKED_USER.sub(lambda one: _known.get(one[0], one[0]), text)
    if _MASKED_USER.search(real) or ("://" in real and _MASKED_VALUE.search(real)):
        raise UserError(f"the credentials of {text} are not known here: write them into the recipe, or give them with --set")
    return real


def save(folder: Path, value: Any) -> None:
    """Write the credentials that the strings of `value` need to a file in `folder` that only its owner can read; no file if they need
    none.
    """
    text = json.dumps(value, ensure_ascii=False)
    needed = {masked: real for masked, real in _known.items() if masked in text}
    if needed:
        write_json(folder / NAME, needed, private=True)
    else:
        (folder / NAME).unlink(missing_ok=True)


def load(folder: Path) -> None:
    """Load credentials that `save` wrote in `folder`, if any. Credentials of the current recipe take precedence."""
    path = folder / NAME
    if os.path.exists(path):  # os.path.exists returns False for invalid paths
        kept = read_json(path)
        if not isinstance(kept, dict) or not all(isinstance(real, str) for real in kept.values()):
            raise UserError(f"{path} is not what lmworks wrote; delete it and run the recipe again")
        for masked, real in kept.items():
            _known.setdefault(masked, real)
