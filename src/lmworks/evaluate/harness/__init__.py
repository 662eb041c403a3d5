"""lm-evaluation-harness (extra `harness`): our models behind its model interface, its tasks on our data, our sets as its tasks."""

from __future__ import annotations

from importlib.util import find_spec

from lmworks.errors import UserError


def require_extra() -> None:
    """Raise `UserError` unless lm-evaluation-harness is installed."""
    if find_spec("lm_eval") is None:
        raise UserError("--harness needs lm-evaluation-harness: pip install 'lmworks[harness]'")
