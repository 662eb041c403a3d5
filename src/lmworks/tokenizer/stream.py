"""Incremental decoding of ids to text, for text that is shown while it is generated."""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmworks.tokenizer.text_tokenizer import TextTokenizer


class StreamDecoder:
    """Never emits part of a UTF-8 character: its bytes are kept until it is complete.

    All that `push` returned and then `finish()` is the text of `Tokenizer.decode`; invalid UTF-8 becomes U+FFFD. `keep` are ids that have
    their text although `skip_special` would leave it out.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool = False, keep: Collection[int] = ()) -> None:
        self._tokenizer, self._skip, self._keep = tokenizer, skip_special, keep
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty. Ids beyond the vocabulary, which only pad the embedding, have no text."""
        if token >= self._tokenizer.vocab_size:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token, self._skip and token not in self._keep))

    def finish(self) -> str:
        """What is left: nothing, or U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)
