"""lm-evaluation-harness (extra `harness`): our models behind its model interface, its tasks on our data, our sets as its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from lmworks.errors import UserError


def require_extra() -> None:
    """Raise `UserError` unless lm-evaluation-harness is installed."""
    if find_spec("lm_eval") is None:
        raise UserError("--harness needs lm-evaluation-harness: pip install 'lmworks[harness]'")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put another value into an attribute of lm-evaluation-harness, which has no option for it, within the block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
