"""Keys and values of the tokens seen so far, for generation.

Shapes: B batch, K key/value heads, S capacity in tokens, C head dimension, T new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmworks.recipe.model import Model


class LayerCache:
    """One layer's share of a `Cache`."""

    def __init__(self, cache: Cache, key: Tensor, value: Tensor) -> None:
        self._cache, self._key, self._value = cache, key, value

    def append(self, key_BKTC: Tensor, value_BKTC: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens at each row's own length, and return all keys and values up to the longest row."""
        where = self._cache.slots_BT[:, None, :, None].expand_as(key_BKTC)
        self._key.scatter_(2, where, key_BKTC)
        self._value.scatter_(2, where, value_BKTC)
        end = self._cache.end
        return self._key[:, :, :end], self._value[:, :, :end]


class Cache:
    """Rows of different lengths in one tensor: row b holds `lengths[b]` tokens; what lies beyond is never looked at.

    Prompts are padded on the right: padding is overwritten as the row grows, and masked until then.
    """

    def __init__(self, config: Model, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        assert config.layers and config.kv_heads and config.head_dim
        shape = (config.layers, rows, config.kv_heads, capacity, config.head_dim)
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)
        self.capacity = capacity
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.end = 0

    def layer(self, index: int) -> LayerCache:
        return LayerCache(self, self._keys[index], self._values[index])

    def begin(self, steps: int) -> Tensor:
        """Reserve slots for `steps` tokens a row and return their positions (B, T)."""
        self.slots_BT = self.lengths[:, None] + torch.arange(steps, device=self.lengths.device)
        self.end = min(int(self.lengths.max()) + steps, self.capacity)
        return self.slots_BT

    def mask(self, window: int | None) -> Tensor:
        """True where a new token may see a cached one; (B, 1, T, S)."""
        distance = self.slots_BT[:, :, None] - torch.arange(self.end, device=self.lengths.device)
        visible = distance >= 0
        return (visible & (distance < window) if window else visible)[:, None]

    def finish(self, counts_B: Tensor) -> None:
        """Keep `counts_B[b]` of the tokens just written in row b."""
        self.lengths = self.lengths + counts_B

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self._keys, self._values = self._keys[:, rows], self._values[:, rows]
        self.lengths = self.lengths[rows]
