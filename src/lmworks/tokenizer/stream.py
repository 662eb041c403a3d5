"""Incremental decoding of ids to text, for text that is shown while it is generated."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmworks.tokenizer.text_tokenizer import TextTokenizer


class StreamDecoder:
    """Never emits part of a UTF-8 character: its bytes are kept until it is complete.

    All that `push` returned and then `finish()` is the text of `Tokenizer.decode`; invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool = False) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty. Ids beyond the vocabulary, which only pad the embedding, have no text."""
        if token >= self._tokenizer.vocab_size:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token, self._skip))

    def finish(self) -> str:
        """What is left: nothing, or U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)
