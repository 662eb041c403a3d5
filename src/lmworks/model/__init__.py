"""The decoder: see `transformer.py` first."""

from lmworks.model.transformer import Transformer

__all__ = ["Transformer"]
