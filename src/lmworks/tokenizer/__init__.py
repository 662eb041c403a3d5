"""Text to token ids and back: training, chat template, evaluation. tiktoken, jinja2 and tokenizers are imported on first use."""

from lmworks.tokenizer.stream import StreamDecoder
from lmworks.tokenizer.tokenizer import Tokenizer, load

__all__ = ["StreamDecoder", "Tokenizer", "load"]
