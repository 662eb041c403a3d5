"""Keys and values of prompts and answers that were read before, for prompts that begin alike: a system prompt, earlier turns of a chat.

They are kept in blocks of some tokens. A block is found by a hash of its tokens and all tokens before it, so equal beginnings are stored
once, whatever follows (vLLM, arXiv:2309.06180, describes such blocks). The least recently used blocks are dropped.

Shapes: E entries of a token, C size of an entry (`lmworks.model.cache`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from torch import Tensor

from lmworks.model.cache import Cache


class PrefixCache:
    """At most `max_tokens` tokens of keys and values, shared by all rows of a model.

    Only rows with the same `salt` share blocks: a client could otherwise learn from the time of an answer what others have asked.
    It must be cleared when weights change. `block` is the size of a block in tokens.
    """

    def __init__(self, max_tokens: int, block: int = 32) -> None:
        self.max_tokens, self.block = max_tokens, block
        self._blocks: OrderedDict[bytes, Tensor] = OrderedDict()

    @property
    def tokens(self) -> int:
        """The number of tokens that are kept."""
        return len(self._blocks) * self.block

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def find(self, tokens: Sequence[int], salt: str = "") -> list[Tensor]:
        """Entries (layers, E, `block`, C) of the first tokens, as many blocks as are known."""
        found: list[bytes] = []
        for key in _keys(tokens, salt, self.block):
            if key not in self._blocks:
                break
            found.append(key)
        self._touch(found)
        return [self._blocks[key] for key in found]

    def keep(self, tokens: Sequence[int], cache: Cache, row: int, salt: str = "") -> None:
        """Copy what is new of a row's whole blocks; `tokens` are those whose keys and values are in the row."""
        keys = list(_keys(tokens, salt, self.block))[: self.max_tokens // self.block]
        for number, key in enumerate(keys):
            if key not in self._blocks:
                self._blocks[key] = cache.read(row, number * self.block, (number + 1) * self.block)
        self._touch(keys)
        while self.tokens > self.max_tokens:
            self._blocks.popitem(last=False)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now, the first one last: a block is of no use without those before it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _keys(tokens: Sequence[int], salt: str, size: int) -> Iterator[bytes]:
    """The key of each whole block."""
    key = salt.encode("utf-8", "surrogatepass")
    for start in range(0, len(tokens) - size + 1, size):
        block = array("q", tokens[start : start + size]).tobytes()
        key = hashlib.blake2b(block, key=hashlib.blake2b(key, digest_size=32).digest(), digest_size=32).digest()
        yield key
