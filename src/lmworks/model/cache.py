"""Keys and values of the tokens seen so far, and states of recurrent layers, for generation.

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

    def states(self) -> tuple[Tensor, ...]:
        """The states (B, ...) of a recurrent layer before the new tokens, in the order of `Model.states`. Those of a row without
        tokens mean nothing: its first token has position 0."""
        ...

    def keep_states(self, states: Sequence[Tensor]) -> None:
        """Store the states after the new tokens."""
        ...

    def counts(self) -> Tensor | None:
        """The number (B, 1) of new tokens of each row that are no padding, which must not change its states; None if all are."""
        ...

    def counted(self) -> Tensor | None:
        """The same as a mask (B, T)."""
        ...


class _Layer:
    def __init__(self, cache: Cache, entries_BESC: Tensor | None, states: Sequence[Tensor]) -> None:
        self._cache, self._entries, self._states = cache, entries_BESC, states

    def attend(self, attend: Callable[..., Tensor], queries: Sequence[Tensor], entries_BETC: Tensor, slides: bool) -> Tensor:
        cache = self._cache
        assert self._entries is not None
        self._entries[cache.rows_B1, :, cache.slots_BT] = entries_BETC.transpose(1, 2)
        return attend(*queries, self._entries[:, :, cache.first(slides) : cache.end], cache.seen(slides, self._entries.dtype))

    def states(self) -> tuple[Tensor, ...]:
        return tuple(state[: self._cache.rows] for state in self._states)

    def keep_states(self, states: Sequence[Tensor]) -> None:
        for kept, state in zip(self.states(), states, strict=True):
            kept.copy_(state)

    def counts(self) -> Tensor | None:
        return self._cache.counts_B1

    def counted(self) -> Tensor | None:
        counts_B1 = self._cache.counts_B1
        return None if counts_B1 is None else torch.arange(self._cache.steps, device=counts_B1.device) < counts_B1


class Cache:
    """KV cache with rows of different lengths: row b has `lengths[b]` tokens; entries beyond are never read. The lengths are numbers of the
    host, so that no step waits for a device to know them.

    Prompts are padded on the right: padding is masked until it is overwritten. Latent attention stores one latent instead of all keys and
    values, and the rotated key behind it: (kv_lora_rank + rope_dim) numbers per token and layer.
    Recurrent layers store states of constant size instead (`Model.states`), which padding must not change: where a step has some,
    `expect` says so before it.
    `tp`: the ranks over which heads are split. Rows can be added, removed and copied; the memory of removed rows is used again.
    """

    def __init__(self, config: Model, rows: int, capacity: int, device: torch.device, dtype: torch.dtype, tp: int = 1) -> None:
        assert config.num_hidden_layers and config.num_key_value_heads and config.head_dim
        entries, size = 2 * (config.num_key_value_heads // tp), int(config.head_dim)
        if mla := config.mla:
            entries, size = 1, mla.kv_lora_rank + mla.qk_rope_head_dim
        # not empty memory: a masked entry has weight 0, and 0 times nan is nan
        layers = range(config.num_hidden_layers)
        self._places = {layer: place for place, layer in enumerate(layer for layer in layers if config.attends(layer))}
        self._entries = torch.zeros(len(self._places), rows, entries, capacity, size, device=device, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self._states = [
            [torch.zeros(rows, *state.shape, device=device, dtype=dtype if state.narrow else wide)
             for state in config.states(layer, tp)]
            for layer in layers
        ]  # fmt: skip
        self.recurrent = any(self._states)
        self._window = int(config.sliding_window) if config.sliding_window else None
        self.capacity, self.device = capacity, device
        self.lengths = [0] * rows
        self.end = self.steps = 0
        self.counts_B1: Tensor | None = None
        self._expected: list[int] | None = None
        self._masks: dict[int | None, Visible] = {}

    @property
    def rows(self) -> int:
        """The number of rows in use."""
        return len(self.lengths)

    @property
    def _rows(self) -> int:
        """The number of rows that there is room for."""
        return self._entries.shape[1]

    @property
    def bytes(self) -> int:
        """All that it holds."""
        return self._entries.nbytes + sum(state.nbytes for states in self._states for state in states)

    def layer(self, index: int) -> LayerCache:
        place = self._places.get(index)
        return _Layer(self, None if place is None else self._entries[place, : self.rows], self._states[index])

    def expect(self, counts: Sequence[int]) -> None:
        """Before a step with padding: the number of its tokens in each row that are none. Only recurrent layers need to know."""
        self._expected = list(counts)

    def begin(self, steps: int) -> Tensor:
        """Reserve slots for `steps` tokens a row and return their positions (B, T)."""
        lengths_B1 = to_device(self.lengths, torch.long, self.device)[:, None]
        self.slots_BT = lengths_B1 if steps == 1 else lengths_B1 + torch.arange(steps, device=self.device)
        self.rows_B1 = torch.arange(self.rows, device=self.device)[:, None]
        self.end, self.steps = min(max(self.lengths) + steps, self.capacity), steps
        padded = self.recurrent and self._expected is not None and min(self._expected) < steps
        self.counts_B1 = to_device(self._expected or [], torch.long, self.device)[:, None] if padded else None
        self._masks = {}
        return self.slots_BT

    def masks(self, window: int | None) -> tuple[None, None]:
        """None: attention over a cache asks each layer of it (`LayerCache.attend`)."""
        return None, None

    def first(self, slides: bool) -> int:
        """The first slot that any of the new tokens sees, in a layer with or without a sliding window."""
        return max(min(self.lengths) - self._window + 1, 0) if slides and self._window else 0

    def seen(self, slides: bool, dtype: torch.dtype) -> Visible:
        """The mask of the new tokens in layers with or without a sliding window: themselves, and earlier tokens of their rows from `first`
        on. It is made once for all layers."""
        window, first = self._window if slides else None, self.first(slides)
        if window not in self._masks:
            seen = visible(self.slots_BT - first if first else self.slots_BT, self.end - first, window)
            self._masks[window] = seen.with_bias(dtype) if self.steps == 1 else seen
        return self._masks[window]

    def finish(self, counts: Sequence[int] | int) -> None:
        """Keep so many of the tokens just written in each row."""
        kept = [counts] * self.rows if isinstance(counts, int) else counts
        expected, self._expected = self._expected or [self.steps] * self.rows, None
        assert not self.recurrent or list(kept) == expected, "states hold all tokens that were expected"
        self.lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        kept = to_device(rows, torch.long, self.device)
        self._entries = self._entries[:, kept]
        self._states = [[state[kept] for state in states] for states in self._states]
        self.lengths = [self.lengths[row] for row in rows]

    def reserve(self, rows: int) -> None:
        """Make room for so many rows."""
        layers, _, *rest = self._entries.shape
        larger = self._entries.new_zeros(layers, rows, *rest)
        larger[:, : self.rows] = self._entries[:, : self.rows]
        self._entries = larger
        self._states = [
            [torch.cat((state[: self.rows], state.new_zeros(rows - self.rows, *state.shape[1:]))) for state in states]
            for states in self._states
        ]

    def add(self, source: Cache, row: int) -> None:
        """Append a copy of a row of another cache, which has at most `capacity` tokens. The memory is doubled if all of it is in use."""
        place, length = self.rows, source.lengths[row]
        if place == self._rows:
            self.reserve(max(1, 2 * place))
        self._entries[:, place, :, :length] = source._entries[:, row, :, :length]
        for own, its in zip(self._states, source._states, strict=True):
            for state, copied in zip(own, its, strict=True):
                state[place] = copied[row]
        self.lengths.append(length)

    def remove(self, row: int) -> None:
        """Drop a row. The last row takes its place. Memory is freed when three quarters are not in use."""
        last = self.rows - 1
        length = self.lengths.pop()
        if row != last:
            self._entries[:, row, :, :length] = self._entries[:, last, :, :length]
            for state in (state for states in self._states for state in states):
                state[row] = state[last]
            self.lengths[row] = length
        if 4 * last <= self._rows > 1:
            half = self._rows // 2
            self._entries = self._entries[:, :half].clone()
            self._states = [[state[:half].clone() for state in states] for states in self._states]

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of the entries of some tokens of a row, in all layers: (layers, E, end - start, C). Recurrent layers have none: their
        state is that after the last token only, so that no beginning of a row can be copied."""
        assert not self.recurrent
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

    def states(self) -> tuple[Tensor, ...]:
        return tuple(torch.cat(parts) for parts in zip(*(layer.states() for layer in self._layers), strict=True))

    def keep_states(self, states: Sequence[Tensor]) -> None:
        for layer, *own in zip(self._layers, *(state.split(self._rows) for state in states), strict=True):
            layer.keep_states(own)

    def counts(self) -> None:
        """None: caches are joined for steps of one token."""

    def counted(self) -> None:
        """None, as `counts`."""
