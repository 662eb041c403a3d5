"""Imports of scikit-learn and scipy, which only training and evaluation need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lmworks.errors import UserError


def require_module(module: str) -> Any:
    """Import a module of the extra `quality`; `UserError` if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError("training and evaluating a quality classifier needs scikit-learn: pip install 'lmworks[quality]'") from None
