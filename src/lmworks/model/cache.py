"""Keys and values of the tokens seen so far, for generation.

Shapes: B batch, K key/value heads, E entries of a token (a key and a value for each of the K heads, or one latent), S capacity in tokens,
C size of an entry, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lmworks.model.documents import Visible, visible
from lmworks.model.transfers import to_device
from lmworks.recipe.schema.model import Model


class LayerCache(Protocol):
    """One layer's share of a cache."""

    def attend(self, attend: Callable[..., Tensor], queries: Sequence[Tensor], entries_BETC: Tensor, slides: bool) -> Tensor:
        """Keep the entries of the new tokens, and return `attend(*queries, entries, mask)` over those of each row so far."""
        ...


class _Layer:
    def __init__(self, cache: Cache, entries_BESC: Tensor) -> None:
        self._cache, self._entries = cache, entries_BESC

    def attend(self, attend: Callable[..., Tensor], queries: Sequence[Tensor], entries_BETC: Tensor, slides: bool) -> Tensor:
        cache = self._cache
        self._entries[cache.rows_B1, :, cache.slots_BT] = entries_BETC.transpose(1, 2)
        return attend(*queries, self._entries[:, :, : cache.end], cache.seen(slides, self._entries.dtype))


class Cache:
    """KV cache with rows of different lengths: row b has `lengths[b]` tokens; entries beyond are never read. The lengths are numbers of the
    host, so that no step waits for a device to know them.

    Prompts are padded on the right: padding is masked until it is overwritten. Latent attention stores one latent instead of all keys and
    values, and the rotated key behind it: (kv_lora_rank + rope_dim) numbers per token and layer.
    `heads`: number of key/value heads on this rank; all by default. Rows can be added, removed and copied; the memory of removed rows is
    used again.
    """

    def __init__(
        self, config: Model, rows: int, capacity: int, device: torch.device, dtype: torch.dtype, heads: int | None = None
    ) -> None:  # fmt: skip
        assert config.num_hidden_layers and config.num_key_value_heads and config.head_dim
        entries, size = 2 * (heads or config.num_key_value_heads), int(config.head_dim)
        if mla := config.mla:
            entries, size = 1, mla.kv_lora_rank + mla.qk_rope_head_dim
        # not empty memory: a masked entry has weight 0, and 0 times nan is nan
        self._entries = torch.zeros(config.num_hidden_layers, rows, entries, capacity, size, device=device, dtype=dtype)
        self._window = int(config.sliding_window) if config.sliding_window else None
        self.capacity, self.device = capacity, device
        self.lengths = [0] * rows
        self.end = 0
        self._masks: dict[int | None, Visible] = {}

    @property
    def rows(self) -> int:
        """The number of rows in use."""
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        """All that it holds."""
        return self._entries.nbytes

    def layer(self, index: int) -> LayerCache:
        return _Layer(self, self._entries[index, : self.rows])

    def begin(self, steps: int) -> Tensor:
        """Reserve slots for `steps` tokens a row and return their positions (B, T)."""
        lengths_B1 = to_device(self.lengths, torch.long, self.device)[:, None]
        self.slots_BT = lengths_B1 if steps == 1 else lengths_B1 + torch.arange(steps, device=self.device)
        self.rows_B1 = torch.arange(self.rows, device=self.device)[:, None]
        self.end = min(max(self.lengths) + steps, self.capacity)
        self._masks = {}
        return self.slots_BT

    def masks(self, window: int | None) -> tuple[None, None]:
        """None: attention over a cache asks each layer of it (`LayerCache.attend`)."""
        return None, None

    def seen(self, slides: bool, dtype: torch.dtype) -> Visible:
        """The mask of the new tokens in layers with or without a sliding window; made once for all layers."""
        window = self._window if slides else None
        if window not in self._masks:
            self._masks[window] = self.mask(window, dtype)
        return self._masks[window]

    def mask(self, window: int | None, dtype: torch.dtype = torch.float32) -> Visible:
        """The mask of the new tokens: earlier tokens of their rows, and themselves."""
        seen = visible(self.slots_BT, self.end, window)
        return seen.with_bias(dtype) if self.slots_BT.shape[1] == 1 else seen

    def finish(self, counts: Sequence[int] | int) -> None:
        """Keep so many of the tokens just written in each row."""
        kept = [counts] * self.rows if isinstance(counts, int) else counts
        self.lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self._entries = self._entries[:, to_device(rows, torch.long, self.device)]
        self.lengths = [self.lengths[row] for row in rows]

    def reserve(self, rows: int) -> None:
        """Make room for so many rows."""
        layers, _, *rest = self._entries.shape
        larger = self._entries.new_zeros(layers, rows, *rest)
        larger[:, : self.rows] = self._entries[:, : self.rows]
        self._entries = larger

    def add(self, source: Cache, row: int) -> None:
        """Append a copy of a row of another cache, which has at most `capacity` tokens. The memory is doubled if all of it is in use."""
        place, length = self.rows, source.lengths[row]
        if place == self._entries.shape[1]:
            self.reserve(max(1, 2 * place))
        self._entries[:, place, :, :length] = source._entries[:, row, :, :length]
        self.lengths.append(length)

    def remove(self, row: int) -> None:
        """Drop a row. The last row takes its place. Memory is freed when three quarters are not in use."""
        last = self.rows - 1
        length = self.lengths.pop()
        if row != last:
            self._entries[:, row, :, :length] = self._entries[:, last, :, :length]
            self.lengths[row] = length
        if 4 * last <= self._entries.shape[1] > 1:
            self._entries = self._entries[:, : self._entries.shape[1] // 2].clone()

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of the entries of some tokens of a row, in all layers: (layers, E, end - start, C)."""
        return self._entries[:, row, :, start:end].clone()

    def write(self, row: int, kept: Sequence[Tensor]) -> None:
        """Begin a row, which is empty, with entries of `read`, one after another."""
        at = 0
        for entries in kept:
            end = at + entries.shape[2]
            self._entries[:, row, :, at:end] = entries
            at = end
        self.lengths[row] = at


class JoinedCache:
    """Several caches as one batch, first all rows of the first: rows of similar length can be in a cache of their own, so that attention
    reads no further than it has to, while all other layers process one batch."""

    def __init__(self, parts: Sequence[Cache]) -> None:
        self.parts = parts

    def begin(self, steps: int) -> Tensor:
        """Reserve slots for `steps` tokens a row and return their positions (B, T)."""
        return torch.cat([part.begin(steps) for part in self.parts])

    def masks(self, window: int | None) -> tuple[None, None]:
        """As `Cache.masks`."""
        return None, None

    def layer(self, index: int) -> LayerCache:
        return _JoinedLayer([part.layer(index) for part in self.parts], [part.rows for part in self.parts])

    def finish(self, counts: int) -> None:
        """Keep `counts` of the tokens just written in each row."""
        for part in self.parts:
            part.finish(counts)


class _JoinedLayer:
    def __init__(self, layers: list[LayerCache], rows: list[int]) -> None:
        self._layers, self._rows = layers, rows

    def attend(self, attend: Callable[..., Tensor], queries: Sequence[Tensor], entries_BETC: Tensor, slides: bool) -> Tensor:
        split: list[Any] = [tensor.split(self._rows) for tensor in (*queries, entries_BETC)]
        parts = zip(self._layers, *split, strict=True)
        return torch.cat([layer.attend(attend, own[:-1], own[-1], slides) for layer, *own in parts])
