"""Keys and values of the tokens seen so far, for generation.

Shapes: B batch, K key/value heads, S capacity in tokens, C head dimension, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lmworks.model.documents import Visible, visible
from lmworks.recipe.schema.model import Model


class LayerCache(Protocol):
    """One layer's share of a cache."""

    def attend(
        self, attend: Callable[..., Tensor], queries: Sequence[Tensor], key_BKTC: Tensor, value_BKTC: Tensor, slides: bool
    ) -> Tensor:
        """Keep the new keys and values, and return `attend(*queries, keys, values, mask)` over those of each row so far."""
        ...


class _Layer:
    def __init__(self, cache: Cache, key: Tensor, value: Tensor) -> None:
        self._cache, self._key, self._value = cache, key, value

    def attend(
        self, attend: Callable[..., Tensor], queries: Sequence[Tensor], key_BKTC: Tensor, value_BKTC: Tensor, slides: bool
    ) -> Tensor:
        cache = self._cache
        where, end = cache.slots_BT[:, None, :, None], cache.end
        self._key.scatter_(2, where.expand_as(key_BKTC), key_BKTC)
        self._value.scatter_(2, where.expand_as(value_BKTC), value_BKTC)
        return attend(*queries, self._key[:, :, :end], self._value[:, :, :end], cache.seen(slides))


class Cache:
    """KV cache with rows of different lengths: row b has `lengths[b]` tokens; entries beyond are never read.

    Prompts are padded on the right: padding is masked until it is overwritten. Latent attention stores one latent instead of all keys and
    values, and the rotated key: (kv_lora_rank + rope_dim) numbers per token and layer.
    `heads`: number of key/value heads on this rank; all by default. Rows can be added, removed and copied; the memory of removed rows is
    used again.
    """

    def __init__(
        self, config: Model, rows: int, capacity: int, device: torch.device, dtype: torch.dtype, heads: int | None = None
    ) -> None:  # fmt: skip
        assert config.num_hidden_layers and config.num_key_value_heads and config.head_dim
        heads, sizes = heads or config.num_key_value_heads, (config.head_dim, config.head_dim)
        if mla := config.mla:
            heads, sizes = 1, (mla.kv_lora_rank, mla.qk_rope_head_dim)
        # not empty memory: a masked entry has weight 0, and 0 times nan is nan
        self._keys, self._values = (
            torch.zeros(config.num_hidden_layers, rows, heads, capacity, size, device=device, dtype=dtype) for size in sizes
        )
        self._window = int(config.sliding_window) if config.sliding_window else None
        self.capacity = capacity
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.end = 0
        self._masks: dict[int | None, Visible] = {}

    @property
    def rows(self) -> int:
        """The number of rows in use."""
        return len(self.lengths)

    def layer(self, index: int) -> LayerCache:
        return _Layer(self, self._keys[index, : self.rows], self._values[index, : self.rows])

    def begin(self, steps: int) -> Tensor:
        """Reserve slots for `steps` tokens a row and return their positions (B, T)."""
        self.slots_BT = self.lengths[:, None] + torch.arange(steps, device=self.lengths.device)
        self.end = min(int(self.lengths.max()) + steps, self.capacity)
        self._masks = {}
        return self.slots_BT

    def masks(self, window: int | None) -> tuple[None, None]:
        """None: attention over a cache asks each layer of it (`LayerCache.attend`)."""
        return None, None

    def seen(self, slides: bool) -> Visible:
        """The mask of the new tokens in layers with or without a sliding window; made once for all layers."""
        window = self._window if slides else None
        if window not in self._masks:
            self._masks[window] = self.mask(window)
        return self._masks[window]

    def mask(self, window: int | None) -> Visible:
        """The mask of the new tokens: earlier tokens of their rows, and themselves."""
        return visible(self.slots_BT, self.end, window)

    def finish(self, counts_B: Tensor | int) -> None:
        """Keep `counts_B[b]` of the tokens just written in row b."""
        self.lengths = self.lengths + counts_B

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self._keys, self._values = self._keys[:, rows], self._values[:, rows]
        self.lengths = self.lengths[rows]

    def add(self, source: Cache, row: int) -> None:
        """Append a copy of a row of another cache, which has at most `capacity` tokens. The memory is doubled if all of it is in use."""
        place, length = self.rows, int(source.lengths[row])
        if place == self._keys.shape[1]:
            self._keys, self._values = (_with_more_rows(one, max(1, place)) for one in (self._keys, self._values))
        self._keys[:, place, :, :length] = source._keys[:, row, :, :length]
        self._values[:, place, :, :length] = source._values[:, row, :, :length]
        self.lengths = torch.cat((self.lengths, source.lengths[row : row + 1]))

    def remove(self, row: int) -> None:
        """Drop a row. The last row takes its place. Memory is freed when three quarters are not in use."""
        last = self.rows - 1
        if row != last:
            length = int(self.lengths[last])
            self._keys[:, row, :, :length] = self._keys[:, last, :, :length]
            self._values[:, row, :, :length] = self._values[:, last, :, :length]
            self.lengths[row] = self.lengths[last]
        self.lengths = self.lengths[:last]
        if 4 * last <= self._keys.shape[1] > 1:
            self._keys, self._values = (one[:, : one.shape[1] // 2].clone() for one in (self._keys, self._values))

    def read(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of some tokens of a row, in all layers: (layers, K, end - start, C)."""
        return self._keys[:, row, :, start:end].clone(), self._values[:, row, :, start:end].clone()

    def write(self, row: int, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin a row, which is empty, with keys and values of `read`, one after another."""
        at = 0
        for key, value in kept:
            end = at + key.shape[2]
            self._keys[:, row, :, at:end], self._values[:, row, :, at:end] = key, value
            at = end
        self.lengths[row] = at


def _with_more_rows(tensor: Tensor, count: int) -> Tensor:
    layers, _, *rest = tensor.shape
    return torch.cat((tensor, tensor.new_zeros(layers, count, *rest)), dim=1)


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

    def attend(
        self, attend: Callable[..., Tensor], queries: Sequence[Tensor], key_BKTC: Tensor, value_BKTC: Tensor, slides: bool
    ) -> Tensor:
        split: list[Any] = [tensor.split(self._rows) for tensor in (*queries, key_BKTC, value_BKTC)]
        parts = zip(self._layers, *split, strict=True)
        return torch.cat([layer.attend(attend, own[:-2], own[-2], own[-1], slides) for layer, *own in parts])
