"""Keys and values of the tokens seen so far, for generation.

Shapes: B batch, K key/value heads, S capacity in tokens, C head dimension, T new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmworks.model.documents import Visible, visible
from lmworks.recipe.schema.model import Model


class LayerCache:
    """One layer's share of a `Cache`."""

    def __init__(self, cache: Cache, key: Tensor, value: Tensor) -> None:
        self._cache, self._key, self._value = cache, key, value

    def append(self, key_BKTC: Tensor, value_BKTC: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens at each row's own length, and return all keys and values up to the longest row."""
        where = self._cache.slots_BT[:, None, :, None]
        self._key.scatter_(2, where.expand_as(key_BKTC), key_BKTC)
        self._value.scatter_(2, where.expand_as(value_BKTC), value_BKTC)
        end = self._cache.end
        return self._key[:, :, :end], self._value[:, :, :end]


class Cache:
    """KV cache with rows of different lengths: row b has `lengths[b]` tokens; entries beyond are never read.

    Prompts are padded on the right: padding is masked until it is overwritten. Latent attention stores one latent instead of all keys and
    values, and the rotated key: (kv_lora_rank + rope_dim) numbers per token and layer.
    `heads`: number of key/value heads on this rank; all by default.
    """

    def __init__(
        self, config: Model, rows: int, capacity: int, device: torch.device, dtype: torch.dtype, heads: int | None = None
    ) -> None:  # fmt: skip
        assert config.num_hidden_layers and config.num_key_value_heads and config.head_dim
        heads, sizes = heads or config.num_key_value_heads, (config.head_dim, config.head_dim)
        if mla := config.mla:
            heads, sizes = 1, (mla.kv_lora_rank, mla.qk_rope_head_dim)
        self._keys, self._values = (
            torch.zeros(config.num_hidden_layers, rows, heads, capacity, size, device=device, dtype=dtype) for size in sizes
        )
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

    def mask(self, window: int | None) -> Visible:
        """The mask of the new tokens: earlier tokens of their rows, and themselves."""
        return visible(self.slots_BT, self.end, window)

    def finish(self, counts_B: Tensor) -> None:
        """Keep `counts_B[b]` of the tokens just written in row b."""
        self.lengths = self.lengths + counts_B

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self._keys, self._values = self._keys[:, rows], self._values[:, rows]
        self.lengths = self.lengths[rows]
