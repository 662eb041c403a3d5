"""Text to token ids and back: training, chat template, evaluation. tiktoken, jinja2 and tokenizers are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmworks.tokenizer.opening import load
    from lmworks.tokenizer.text_tokenizer import StreamDecoder
    from lmworks.tokenizer.tokenizer import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer", "load"]
_MODULES = {"StreamDecoder": "text_tokenizer", "Tokenizer": "tokenizer", "load": "opening"}


def __getattr__(name: str) -> Any:
    """Import on first use: the process of a chat template needs no numpy, which alone may take all of its memory limit."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lmworks.tokenizer.{_MODULES[name]}"), name)
