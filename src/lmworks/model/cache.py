"""Keys and values of the tokens seen so far, and states of recurrent layers, for generation.

Shapes: B batch, K key/value heads, E entries of a token (a key and a value for each of the K heads, or one latent), S slots of a row,
C size of an entry, T new tokens, P earlier tokens within a window, N layers that hold the same tokens, R rows that there is room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lmworks.model.documents import Visible, visible
from lmworks.model.transfers import to_device
from lmworks.recipe.schema.model import Model


class LayerCache(Protocol):
    """One layer's share of a cache."""

    def attend(self, attend: Callable[..., Tensor], queries: Sequence[Tensor], entries_BETC: Tensor) -> Tensor:
        """Keep the entries of the new tokens, and return `attend(*queries, entries, mask)` over those of each row so far, or of its
        window."""
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


class Piece(NamedTuple):
    """Entries (N, E, tokens, C) of some tokens of a row: of the layers that see all tokens, and of those with a window. The latter are None
    if the row no longer held them."""

    full: Tensor
    sliding: Tensor | None


class _Store:
    """Entries (N, R, E, S, C) of layers that hold the same tokens. The entry of position p is in slot p mod S: layers with a window have
    fewer slots than a row may have tokens, and a token takes the slot of the one S before it, which no later token sees."""

    def __init__(self, entries: Tensor, window: int | None) -> None:
        self.entries, self.window = entries, window
        self._past_BP: Tensor | None = None
        self._mask: Visible | None = None

    @property
    def slots(self) -> int:
        """The tokens of a row that it has room for."""
        return self.entries.shape[3]

    def begin(self, lengths: Sequence[int], rows_B1: Tensor, positions_BT: Tensor, counts_B1: Tensor | None) -> None:
        """Choose the slots of new tokens. `counts_B1`: how many are no padding; None if all are."""
        steps, slots = positions_BT.shape[1], self.slots
        self._rows_B1, self._positions_BT, self._slots_BT = rows_B1, positions_BT, positions_BT
        self._end = min(max(lengths) + steps, slots)
        self._past_BP = self._mask = None
        self._wraps = self.window is not None and max(lengths) + steps > slots
        if not self._wraps:
            return
        if steps == 1:
            self._slots_BT = positions_BT % slots
            return
        # Tokens of the step take slots of others that its first tokens see. So these are copied, in order, before the new ones.
        assert self.window is not None
        back, lengths_B1 = min(self.window - 1, max(lengths)), positions_BT[:, :1]
        self._past_BP = (lengths_B1 - back + torch.arange(back, device=positions_BT.device)) % slots
        # Padding, and tokens that the last ones do not see, go to the slot of the next token, which is free.
        next_B1 = lengths_B1 + (steps if counts_B1 is None else counts_B1)
        kept_BT = (positions_BT < next_B1) & (positions_BT > next_B1 - slots)
        self._slots_BT = torch.where(kept_BT, positions_BT, next_B1) % slots

    def attend(self, place: int, attend: Callable[..., Tensor], queries: Sequence[Tensor], entries_BETC: Tensor) -> Tensor:
        """`LayerCache.attend` of one of the layers."""
        held_BESC = self.entries[place, : len(self._rows_B1)]
        past = None if self._past_BP is None else held_BESC[self._rows_B1, :, self._past_BP].transpose(1, 2)
        held_BESC[self._rows_B1, :, self._slots_BT] = entries_BETC.transpose(1, 2)
        seen_BESC = held_BESC[:, :, : self._end] if past is None else torch.cat((past, entries_BETC), dim=2)
        return attend(*queries, seen_BESC, self.mask())

    def mask(self) -> Visible:
        """What the new tokens see of the entries that `attend` is given; made once for all layers."""
        if self._mask is None:
            seen = self._visible()
            self._mask = seen.with_bias(self.entries.dtype) if self._positions_BT.shape[1] == 1 else seen
        return self._mask

    def _visible(self) -> Visible:
        positions_BT, device = self._positions_BT, self._positions_BT.device
        if not self._wraps:
            return visible(positions_BT, self._end, self.window)
        if self._past_BP is not None:
            back, steps = self._past_BP.shape[1], positions_BT.shape[1]
            last_BT = torch.arange(back, back + steps, device=device).expand(positions_BT.shape)
            return visible(last_BT, back + steps, self.window, (back - positions_BT[:, :1]).clamp_min(0))
        assert self.window is not None
        age_BS = (positions_BT - torch.arange(self._end, device=device)) % self.slots
        seen_BS = age_BS < (positions_BT + 1).clamp_max(self.window)
        return Visible(torch.zeros_like(positions_BT), positions_BT.clamp_max(self._end - 1), self._end, seen_BS[:, None, None])

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these."""
        self.entries = self.entries[:, rows]

    def reserve(self, rows: int, used: int) -> None:
        """Make room for so many rows, of which `used` are kept."""
        layers, _, *rest = self.entries.shape
        larger = self.entries.new_zeros(layers, rows, *rest)
        larger[:, :used] = self.entries[:, :used]
        self.entries = larger

    def shrink(self, rows: int) -> None:
        """Make room for so many rows only."""
        self.entries = self.entries[:, :rows].clone()

    def move(self, row: int, to: int, length: int) -> None:
        """Copy a row of `length` tokens over another."""
        held = min(length, self.slots)
        self.entries[:, to, :, :held] = self.entries[:, row, :, :held]

    def copy(self, to: int, source: _Store, row: int, first: int, end: int) -> None:
        """Copy what both have room for of the tokens `first` to `end` of a row of another store."""
        first = max(first, end - min(self.slots, source.slots))
        self.write(to, first, source.entries[:, row, :, source._at(first, end)])

    def read(self, row: int, start: int, end: int) -> Tensor:
        """A copy of the entries (N, E, end - start, C) of tokens of a row."""
        return self.entries[:, row, :, self._at(start, end)].clone()

    def write(self, row: int, start: int, entries: Tensor) -> None:
        """Store the entries (N, E, tokens, C) of tokens from `start` on."""
        self.entries[:, row, :, self._at(start, start + entries.shape[2])] = entries

    def _at(self, start: int, end: int) -> slice | Tensor:
        """The slots of these tokens."""
        first = start % self.slots
        if first + end - start <= self.slots:
            return slice(first, first + end - start)
        return torch.arange(start, end, device=self.entries.device) % self.slots


class _Layer:
    def __init__(self, cache: Cache, place: tuple[_Store, int] | None, states: Sequence[Tensor]) -> None:
        self._cache, self._place, self._states = cache, place, states

    def attend(self, attend: Callable[..., Tensor], queries: Sequence[Tensor], entries_BETC: Tensor) -> Tensor:
        assert self._place is not None
        store, place = self._place
        return store.attend(place, attend, queries, entries_BETC)

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
    Layers that see all tokens have room for `capacity` of them. Layers with a window that is shorter hold the last tokens of each row: as
    many as it sees (`Model.cached_tokens`), and `behind` more, for `read`.
    Recurrent layers store states of constant size instead (`Model.states`).
    Padding must not change states, nor take the place of a token that a window still shows: where a step has some, `expect` says so before
    it.
    `tp`: the ranks over which heads are split. Rows can be added, removed and copied; the memory of removed rows is used again.
    """

    def __init__(
        self, config: Model, rows: int, capacity: int, device: torch.device, dtype: torch.dtype, tp: int = 1, behind: int = 0
    ) -> None:  # fmt: skip
        assert config.num_hidden_layers and config.num_key_value_heads and config.head_dim
        entries, size = 2 * (config.num_key_value_heads // tp), int(config.head_dim)
        if mla := config.mla:
            entries, size = 1, mla.kv_lora_rank + mla.qk_rope_head_dim
        layers = range(config.num_hidden_layers)
        window, stores = int(config.sliding_window) if config.sliding_window else None, []
        self._places: dict[int, tuple[_Store, int]] = {}
        for slides in (False, True):
            alike = [layer for layer in layers if config.attends(layer) and config.slides(layer) == slides]
            slots = min(capacity, config.cached_tokens(alike[0], capacity) + behind) if alike else capacity
            # not empty memory: a masked entry has weight 0, and 0 times nan is nan
            held = torch.zeros(len(alike), rows, entries, slots, size, device=device, dtype=dtype)
            stores.append(_Store(held, window if slides else None))
            self._places |= {layer: (stores[-1], place) for place, layer in enumerate(alike)}
        self._full, self._sliding = stores
        wide = torch.promote_types(dtype, torch.float32)
        self._states = [
            [torch.zeros(rows, *state.shape, device=device, dtype=dtype if state.narrow else wide)
             for state in config.states(layer, tp)]
            for layer in layers
        ]  # fmt: skip
        self.recurrent, self._forgets = any(self._states), self._sliding.slots < capacity  # whether tokens take the slots of earlier ones
        self.capacity, self.device = capacity, device
        self.lengths = [0] * rows
        self._skipped = [0] * rows  # tokens at the beginning of a row that layers with a window have never held: `write`
        self.steps = 0
        self.counts_B1: Tensor | None = None
        self._expected: list[int] | None = None

    @property
    def rows(self) -> int:
        """The number of rows in use."""
        return len(self.lengths)

    @property
    def room(self) -> int:
        """The number of rows that there is room for."""
        return self._full.entries.shape[1]

    @property
    def bytes(self) -> int:
        """All that it holds."""
        return sum(store.entries.nbytes for store in self._stores) + sum(state.nbytes for states in self._states for state in states)

    @property
    def _stores(self) -> tuple[_Store, _Store]:
        return self._full, self._sliding

    def layer(self, index: int) -> LayerCache:
        return _Layer(self, self._places.get(index), self._states[index])

    def expect(self, counts: Sequence[int]) -> None:
        """Before a step with padding: the number of its tokens in each row that are none. Recurrent layers and layers with a window need to
        know."""
        self._expected = list(counts)

    def begin(self, steps: int) -> Tensor:
        """Reserve slots for `steps` tokens a row and return their positions (B, T)."""
        lengths_B1 = to_device(self.lengths, torch.long, self.device)[:, None]
        positions_BT = lengths_B1 if steps == 1 else lengths_B1 + torch.arange(steps, device=self.device)
        self.steps = steps
        padded = (self.recurrent or self._forgets) and self._expected is not None and min(self._expected) < steps
        self.counts_B1 = to_device(self._expected or [], torch.long, self.device)[:, None] if padded else None
        rows_B1 = torch.arange(self.rows, device=self.device)[:, None]
        for store in self._stores:
            store.begin(self.lengths, rows_B1, positions_BT, self.counts_B1)
        return positions_BT

    def masks(self, window: int | None) -> tuple[None, None]:
        """None: attention over a cache asks each layer of it (`LayerCache.attend`)."""
        return None, None

    def finish(self, counts: Sequence[int] | int) -> None:
        """Keep so many of the tokens just written in each row."""
        kept = [counts] * self.rows if isinstance(counts, int) else counts
        expected, self._expected = self._expected or [self.steps] * self.rows, None
        assert not (self.recurrent or self._forgets) or list(kept) == expected, "states and windows hold all tokens that were expected"
        self.lengths = [length + count for length, count in zip(self.lengths, kept, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        kept = to_device(rows, torch.long, self.device)
        for store in self._stores:
            store.keep(kept)
        self._states = [[state[kept] for state in states] for states in self._states]
        self.lengths, self._skipped = [self.lengths[row] for row in rows], [self._skipped[row] for row in rows]

    def reserve(self, rows: int) -> None:
        """Make room for so many rows."""
        for store in self._stores:
            store.reserve(rows, self.rows)
        self._states = [
            [torch.cat((state[: self.rows], state.new_zeros(rows - self.rows, *state.shape[1:]))) for state in states]
            for states in self._states
        ]

    def add(self, source: Cache, row: int) -> None:
        """Append a copy of a row of another cache, which has at most `capacity` tokens. The memory is doubled if all of it is in use."""
        place, length = self.rows, source.lengths[row]
        if place == self.room:
            self.reserve(max(1, 2 * place))
        first = source.first_held(row)
        self._full.copy(place, source._full, row, 0, length)
        self._sliding.copy(place, source._sliding, row, first, length)
        for own, its in zip(self._states, source._states, strict=True):
            for state, copied in zip(own, its, strict=True):
                state[place] = copied[row]
        self.lengths.append(length)
        self._skipped.append(first)

    def remove(self, row: int) -> None:
        """Drop a row. The last row takes its place. Memory is freed when three quarters are not in use."""
        last = self.rows - 1
        length, skipped = self.lengths.pop(), self._skipped.pop()
        if row != last:
            for store in self._stores:
                store.move(last, row, length)
            for state in (state for states in self._states for state in states):
                state[row] = state[last]
            self.lengths[row], self._skipped[row] = length, skipped
        if 4 * last <= self.room > 1:
            half = self.room // 2
            for store in self._stores:
                store.shrink(half)
            self._states = [[state[:half].clone() for state in states] for states in self._states]

    def first_held(self, row: int) -> int:
        """The first token of a row from which on layers with a window hold all."""
        # one less than there are slots: padding may be in that of the next token
        return max(self._skipped[row], self.lengths[row] - self._sliding.slots + 1 if self._forgets else 0)

    def read(self, row: int, start: int, end: int) -> Piece:
        """A copy of the entries of some tokens of a row, in all layers; without those of layers with a window if `start` is before
        `first_held`. Recurrent layers have none: their state is that after the last token only, so that no beginning of a row can be
        copied."""
        assert not self.recurrent
        held = start >= self.first_held(row)
        return Piece(self._full.read(row, start, end), self._sliding.read(row, start, end) if held else None)

    def write(self, row: int, pieces: Sequence[Piece]) -> None:
        """Begin a row, which is empty, with pieces of `read`, one after another. Those within the window before the end must have the
        entries of layers with a window."""
        start = first = 0
        for piece in pieces:
            end = start + piece.full.shape[2]
            self._full.write(row, start, piece.full)
            if piece.sliding is None:
                first = end
            else:
                self._sliding.write(row, start, piece.sliding)
            start = end
        assert not first or first <= start + 1 - (self._sliding.window or 0), "all that the next token sees is there"
        self.lengths[row], self._skipped[row] = start, first


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

    def attend(self, attend: Callable[..., Tensor], queries: Sequence[Tensor], entries_BETC: Tensor) -> Tensor:
        split: list[Any] = [tensor.split(self._rows) for tensor in (*queries, entries_BETC)]
        parts = zip(self._layers, *split, strict=True)
        return torch.cat([layer.attend(attend, own[:-1], own[-1]) for layer, *own in parts])

    def states(self) -> tuple[Tensor, ...]:
        return tuple(torch.cat(parts) for parts in zip(*(layer.states() for layer in self._layers), strict=True))

    def keep_states(self, states: Sequence[Tensor]) -> None:
        for layer, *own in zip(self._layers, *(state.split(self._rows) for state in states), strict=True):
            layer.keep_states(own)

    def counts(self) -> None:
        """None: caches are joined for steps of one token."""

    def counted(self) -> None:
        """None, as `counts`."""
