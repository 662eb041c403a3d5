"""Keys and values of prompts and answers that were read before, for prompts that begin alike: a system prompt, earlier turns of a chat.

They are kept in blocks of some tokens. A block is found by a hash of its tokens and all tokens before it, so equal beginnings are stored
once, whatever follows (vLLM, arXiv:2309.06180, describes such blocks). The least recently used blocks are dropped.

A row does not hold all of its tokens in layers with a window. A block that was copied too late has no entries of these layers: a prompt can
begin with it, but cannot go on behind it before all blocks within the window have them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from lmworks.model.cache import Cache, Piece


class PrefixCache:
    """At most `max_tokens` tokens of keys and values, shared by all rows of a model.

    Only rows with the same `salt` share blocks: a client could otherwise learn from the time of an answer what others have asked.
    It must be cleared when weights change. `block` is the size of a block in tokens.
    """

    def __init__(self, max_tokens: int, block: int = 32) -> None:
        self.max_tokens, self.block = max_tokens, block
        self._blocks: OrderedDict[bytes, Piece] = OrderedDict()

    @property
    def tokens(self) -> int:
        """The number of tokens that are kept."""
        return len(self._blocks) * self.block

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()

    def find(self, tokens: Sequence[int], salt: str = "", past: int = 0) -> list[Piece]:
        """Entries of the first tokens, as many blocks as are known; those of layers with a window at least of the last `past` tokens, or of
        all."""
        found: list[bytes] = []
        usable = run = 0  # blocks; the last ones that have all entries
        for key in _keys(tokens, salt, self.block):
            if key not in self._blocks:
                break
            found.append(key)
            run = 0 if self._blocks[key].sliding is None else run + 1
            if run * self.block >= min(past, len(found) * self.block):
                usable = len(found)
        self._touch(found[:usable])
        return [self._blocks[key] for key in found[:usable]]

    def keep(self, tokens: Sequence[int], cache: Cache, row: int, salt: str, hashes: list[bytes]) -> None:
        """Copy what is new of a row's whole blocks, and is still there; `tokens` are those whose keys and values are in the row.

        `hashes` are those of its first blocks, to which this adds: a row that is kept after each piece of its prompt is hashed once.
        """
        hashes += [*_keys(tokens, salt, self.block, hashes)]
        keys = hashes[: self.max_tokens // self.block]
        for number, key in enumerate(keys):
            start, known = number * self.block, self._blocks.get(key)
            if known is None or (known.sliding is None and start >= cache.first_held(row)):
                self._blocks[key] = cache.read(row, start, start + self.block)
        self._touch(keys)
        while self.tokens > self.max_tokens:
            self._blocks.popitem(last=False)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used now, the first one last: a block is of no use without those before it."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


def _keys(tokens: Sequence[int], salt: str, size: int, before: Sequence[bytes] = ()) -> Iterator[bytes]:
    """The key of each whole block behind those whose keys are known."""
    key = before[-1] if before else salt.encode("utf-8", "surrogatepass")
    for start in range(len(before) * size, len(tokens) - size + 1, size):
        block = array("q", tokens[start : start + size]).tobytes()
        key = hashlib.blake2b(block, key=hashlib.blake2b(key, digest_size=32).digest(), digest_size=32).digest()
        yield key
