"""scikit-learn and scipy, which only training and measuring need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lmworks.errors import UserError


def needed(module: str) -> Any:
    """A module of the extra `quality`; `UserError` where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError("training and measuring a quality classifier needs scikit-learn: pip install 'lmworks[quality]'") from None
