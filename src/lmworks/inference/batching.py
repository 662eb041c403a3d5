"""Continuous batching: rows join and leave the batch of a model at every step (Orca, OSDI 2022).

A step decodes one token for each row whose prompt has been read, and then reads a piece of some prompts, so that a long prompt delays
the others by no more than a piece. Rows of similar length share a cache, whose capacity is a power of two: a row moves on when it outgrows
its cache, attention reads at most twice as far as each row needs, and all other layers process one batch.

Shapes: B rows, D hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.inference.sampling import Draw, GenerateOptions, Grammar, Token, choose
from lmworks.model.cache import Cache, JoinedCache, Piece
from lmworks.model.transfers import to_device
from lmworks.model.transformer import Transformer

_SMALLEST = 128  # tokens: capacity of the smallest cache


class Sampled(NamedTuple):
    """The next token of row `id`. `finish` is "stop" after a stop token, "length" after the last token that was allowed, else None.
    `hit_tokens` are those of the row's prompt that were not read, because another prompt or answer began with them."""

    id: int
    token: Token
    finish: str | None
    hit_tokens: int = 0


@dataclass(frozen=True)
class BatchStats:
    """Rows whose prompts are read or that are generated, and rows that wait; all prompt tokens since the start, and those among them that
    were not read, because another prompt or answer began with them."""

    running: int
    waiting: int
    prompt_tokens: int
    hit_tokens: int


@dataclass(eq=False)
class _Sequence:
    id: int
    prompt: tuple[int, ...]
    draw: Draw
    limit: int
    salt: str
    stop_ids: frozenset[int]
    written: list[int] = field(default_factory=list)
    group: _DecodeBatch | None = None  # once the prompt has been read
    number: int = 0  # of its row in the cache of the group
    hit_tokens: int = 0
    hashes: list[bytes] = field(default_factory=list)  # of its first blocks, in the prefixes

    @property
    def cached(self) -> int:
        """Tokens in the cache while it is generated: all but the last one, which is the next input."""
        return len(self.prompt) + len(self.written) - 1

    @property
    def reserved(self) -> int:
        """Slots of the largest cache that it can come to."""
        return _capacity(len(self.prompt) + self.limit)


@dataclass(eq=False)
class _Prefill:
    """Prompts that are read together. Row b of the cache is of `twins[b]`, which have the same prompt."""

    twins: list[list[_Sequence]]
    cache: Cache

    @property
    def rows(self) -> list[_Sequence]:
        return [row for rows in self.twins for row in rows]


@dataclass(eq=False)
class _DecodeBatch:
    """Rows that are generated, with a cache of one capacity."""

    cache: Cache
    rows: list[_Sequence] = field(default_factory=list)


class Prefixes(Protocol):
    """Keys and values of earlier rows, in blocks of `block` tokens (`lmworks.serve.prefixes`)."""

    block: int

    def find(self, tokens: Sequence[int], salt: str = "", past: int = 0) -> list[Piece]:
        """Entries of the first tokens, as many blocks as are known; those of layers with a window at least of the last `past` tokens."""

    def keep(self, tokens: Sequence[int], cache: Cache, row: int, salt: str, hashes: list[bytes]) -> None:
        """Copy the whole blocks of a row, as far as the row holds them. `hashes` are those of its first blocks, to which this adds."""


class ContinuousBatch:
    """Generates for many prompts at once. All calls must come from one thread.

    At most `max_rows` rows run at a time; the others wait in order. `max_tokens` bounds the slots that running rows have reserved for
    prompt and answer, rounded up to a power of two each; the memory of the caches is at most four times as much, and usually less.
    `prefill_tokens` is the size of the pieces in which prompts are read, counted over all rows of a piece. `prefixes` keeps what has been
    read for prompts that begin alike.

    A row's tokens depend on its prompt, options and seed only, up to rounding: neither on other rows nor on when it was added.
    """

    def __init__(
        self, model: Transformer, max_rows: int = 32, max_tokens: int | None = None, prefill_tokens: int = 512,
        prefixes: Prefixes | None = None,
    ) -> None:  # fmt: skip
        self.model, self.prefixes = model, prefixes
        self.max_rows, self.max_tokens, self.prefill_tokens = max_rows, max_tokens, prefill_tokens
        self._context = int(model.config.max_position_embeddings) if model.config.max_position_embeddings else None
        self._past = int(model.config.sliding_window) - 1 if model.config.sliding_window else 0  # tokens that a window shows besides one
        # What layers with a window hold besides, so that prefixes get all blocks that the end of a row's last whole block sees.
        self._behind = prefixes.block - 1 + -self._past % prefixes.block if prefixes else 0
        self._waiting: deque[_Sequence] = deque()
        self._reading: deque[_Prefill] = deque()
        self._running: dict[int, _DecodeBatch] = {}  # by capacity
        self._next_id = 0
        self.prompt_tokens = self.hit_tokens = 0  # since the start

    def add(
        self, prompt: Sequence[int], options: GenerateOptions, seed: int | None = None, grammar: Grammar | None = None, salt: str = ""
    ) -> int:
        """Queue a prompt; returns the id under which its tokens come out of `step`. `seed` is `options.seed` by default.

        Only rows of the same `salt` share prefixes. Raises `UserError` if the prompt is empty, leaves no room for a token in the model's
        context, or never fits into `max_tokens`; and for fewer than one new token.
        """
        if not prompt:
            raise UserError("a prompt is empty; give at least one token")
        if options.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {options.max_new_tokens}; generate at least 1 token")
        if self._context is not None and len(prompt) >= self._context:
            raise UserError(f"the prompt has {len(prompt)} tokens, but the model's context is {self._context}; shorten the prompt")
        room = options.max_new_tokens if self._context is None else min(options.max_new_tokens, self._context - len(prompt))
        draw = Draw(options, options.seed if seed is None else seed, grammar, tuple(prompt))
        row = _Sequence(self._next_id, tuple(prompt), draw, room, salt, frozenset(options.stop_ids))
        if self.max_tokens is not None and row.reserved > self.max_tokens:
            what = f"{len(row.prompt)} tokens of prompt and {room} new ones need {row.reserved} slots"
            raise UserError(f"{what}, but the caches have {self.max_tokens}; ask for fewer new tokens")
        self._next_id += 1
        self._waiting.append(row)
        return row.id

    def cancel(self, id: int) -> None:
        """Drop a row; nothing happens if it has ended."""
        for row in self._waiting:
            if row.id == id:
                self._waiting.remove(row)
                return
        for group in self._running.values():
            for row in group.rows:
                if row.id == id:
                    self._remove(group, row.number)
                    return
        for reading in list(self._reading):
            for rows in reading.twins:
                rows[:] = [row for row in rows if row.id != id]
            self._drop_unread(reading)

    def clear(self) -> None:
        """Drop all rows, and free their memory."""
        self._waiting.clear()
        self._reading.clear()
        self._running.clear()

    @property
    def busy(self) -> bool:
        """Whether there are rows that have not ended."""
        return bool(self._waiting or self._reading or self._running)

    def upcoming(self) -> int:
        """How many tokens the next `step` will process: one of each running row, and those of a piece of prompts with their padding."""
        self._admit()
        read = self._reading[0] if self._reading else None
        return sum(len(group.rows) for group in self._running.values()) + (self._width(read) * len(read.twins) if read else 0)

    def stats(self) -> BatchStats:
        """Counts of rows now, and of tokens since the start."""
        return BatchStats(len(self._active()), len(self._waiting), self.prompt_tokens, self.hit_tokens)

    @torch.no_grad()  # FSDP2 does not support inference mode
    def step(self) -> list[Sampled]:
        """One token for each running row, and for each row whose prompt has just been read to its end. Rows that finish leave, and
        others take their places in the next step. Empty if only a piece of a prompt has been read, or nothing is left to do.

        The model must be in evaluation mode.
        """
        self._admit()
        rows, hidden = self._decode()
        read_rows, read_hidden = self._read_piece()
        rows += read_rows
        if not rows:
            return []
        tokens = choose(self.model.logits(torch.cat([*hidden, *read_hidden])), [row.draw for row in rows])
        out = []
        for row, token in zip(rows, tokens, strict=True):
            row.written.append(token.id)
            finish = "stop" if token.id in row.stop_ids else "length" if len(row.written) == row.limit else None
            out.append(Sampled(row.id, token, finish, row.hit_tokens))
            if finish:
                self._leave(row)
        return out

    def _active(self) -> list[_Sequence]:
        reading = [row for group in self._reading for row in group.rows]
        return reading + [row for group in self._running.values() for row in group.rows]

    def _admit(self) -> None:
        """Admit waiting requests, in order, while there is room, and start their prefill."""
        if not self._waiting:
            return
        active = self._active()
        places, used = self.max_rows - len(active), sum(row.reserved for row in active)
        twins: dict[tuple[tuple[int, ...], str], list[_Sequence]] = {}
        while self._waiting and places > 0:
            row = self._waiting[0]
            if self.max_tokens is not None and used + row.reserved > self.max_tokens:
                break
            self._waiting.popleft()
            twins.setdefault((row.prompt, row.salt), []).append(row)
            places, used = places - 1, used + row.reserved
        sizes: dict[int, list[list[_Sequence]]] = {}  # prompts of similar length are read together
        for rows in twins.values():
            sizes.setdefault(_capacity(len(rows[0].prompt)), []).append(rows)
        self._reading += [self._begin(prompts) for _, prompts in sorted(sizes.items())]

    def _begin(self, twins: list[list[_Sequence]]) -> _Prefill:
        """Make a cache for some prompts, with what is known of them."""
        prefixes, kept = self.prefixes, []
        for rows in twins:
            prompt = rows[0].prompt
            # the last token is read in any case: its output is needed
            kept.append(prefixes.find(prompt[:-1], rows[0].salt, self._past) if prefixes else [])
            self.prompt_tokens += len(prompt) * len(rows)
            for twin in rows[1:]:
                twin.hit_tokens = len(prompt)
        # a row that begins with a prefix is padded beyond the longest prompt
        known = [len(found) * prefixes.block if prefixes else 0 for found in kept]
        behind = self._behind + self.prefill_tokens if prefixes else 0  # and those that end in a piece, after it
        cache = self.model.cache(len(twins), max(len(rows[0].prompt) for rows in twins) + max(known), behind)
        for number, found in enumerate(kept):
            cache.write(number, found)
            twins[number][0].hit_tokens = known[number]
        self.hit_tokens += sum(row.hit_tokens for rows in twins for row in rows)
        return _Prefill(twins, cache)

    def _read_piece(self) -> tuple[list[_Sequence], list[Tensor]]:
        """Read a piece of the prompts of one group. Rows whose prompts end in it, and the hidden state (B, D) of their last tokens."""
        if not self._reading:
            return [], []
        self._reading.rotate(-1)
        group = self._reading[-1]  # the groups take turns
        cache, prompts, device = group.cache, [rows[0].prompt for rows in group.twins], group.cache.device
        begun, width = cache.lengths, self._width(group)
        pieces = [prompt[start : start + width] for prompt, start in zip(prompts, begun, strict=True)]
        padded = to_device([[*piece, *[0] * (width - len(piece))] for piece in pieces], torch.long, device)
        counts = [len(piece) for piece in pieces]
        cache.expect(counts)
        hidden_BTD, _ = self.model.hidden(padded, cache=cache)
        cache.finish(counts)
        ended = [row for row, (prompt, start) in enumerate(zip(prompts, begun, strict=True)) if start + width >= len(prompt)]
        rows, places = [], []
        if self.prefixes:
            for row in range(cache.rows) if self._past else ended:  # layers with a window forget what was read before the next piece
                first = group.twins[row][0]
                self.prefixes.keep(prompts[row][: cache.lengths[row]], cache, row, first.salt, first.hashes)
        for row in ended:
            for twin in group.twins[row]:
                self._place(twin, cache, row, len(twin.prompt) + 1)
                rows.append(twin)
                places.append(row * width + counts[row] - 1)
            group.twins[row] = []
        self._drop_unread(group)
        return rows, [hidden_BTD.flatten(0, 1)[to_device(places, torch.long, device)]] if rows else []

    def _width(self, group: _Prefill) -> int:
        """The tokens of each prompt in the next piece of a group."""
        longest = max(len(rows[0].prompt) - start for rows, start in zip(group.twins, group.cache.lengths, strict=True))
        return min(longest, max(1, self.prefill_tokens // len(group.twins)))

    def _drop_unread(self, group: _Prefill) -> None:
        """Remove prompts that no row waits for any more."""
        left = [row for row, rows in enumerate(group.twins) if rows]
        if not left:
            self._reading.remove(group)
        elif len(left) < len(group.twins):
            group.twins = [group.twins[row] for row in left]
            group.cache.keep(left)

    def _decode(self) -> tuple[list[_Sequence], list[Tensor]]:
        """Feed the last token of each running row. The rows, and their hidden states (B, D)."""
        for capacity, group in sorted(self._running.items(), reverse=True):
            for row in [row for row in group.rows if row.cached == capacity]:
                number = row.number
                self._place(row, group.cache, number, capacity + 1)
                self._remove(group, number)
        groups = list(self._running.values())
        if not groups:
            return [], []
        rows = [row for group in groups for row in group.rows]
        last = to_device([[row.written[-1]] for row in rows], torch.long, groups[0].cache.device)
        cache = groups[0].cache if len(groups) == 1 else JoinedCache([group.cache for group in groups])
        hidden_B1D, _ = self.model.hidden(last, cache=cache)
        cache.finish(1)
        return rows, [hidden_B1D[:, 0]]

    def _place(self, row: _Sequence, source: Cache, number: int, needed: int) -> None:
        """Copy a row to the cache in which so many tokens fit."""
        capacity = _capacity(needed)
        if capacity not in self._running:
            self._running[capacity] = _DecodeBatch(self.model.cache(0, capacity, self._behind))
            self._running[capacity].cache.reserve(sum(one.reserved >= capacity for one in self._active()))  # those that can come to it
        group = self._running[capacity]
        group.cache.add(source, number)
        row.group, row.number = group, len(group.rows)
        group.rows.append(row)

    def _leave(self, row: _Sequence) -> None:
        """Free the place of a row that has ended."""
        assert row.group is not None
        if self.prefixes:
            self.prefixes.keep((*row.prompt, *row.written[:-1]), row.group.cache, row.number, row.salt, row.hashes)
        self._remove(row.group, row.number)

    def _remove(self, group: _DecodeBatch, number: int) -> None:
        group.cache.remove(number)
        last = group.rows.pop()
        if number < len(group.rows):
            group.rows[number], last.number = last, number
        if not group.rows:
            del self._running[group.cache.capacity]


def _capacity(tokens: int) -> int:
    return max(_SMALLEST, 1 << (tokens - 1).bit_length())
