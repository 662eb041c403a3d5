"""Turns sampled tokens into text that can be shown: whole characters, and never a part of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmworks.inference.generate import Token


class Decoder(Protocol):
    """Decodes ids one at a time, and holds back the bytes of an incomplete character."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(frozen=True)
class Placement:
    """A token and where its text begins in the answer, in characters."""

    token: Token
    offset: int


@dataclass(frozen=True)
class Piece:
    """Text that is safe to show, and the tokens whose text begins in it."""

    text: str = ""
    tokens: tuple[Placement, ...] = ()
    stopped: bool = False


class Assembler:
    """Joins tokens to text and detects stop strings, which may span tokens.

    The longest suffix of the text that could still become a stop string is held back until that is decided. The stop string that is
    complete first ends the answer, so the result does not depend on how the text is split into tokens. The text of the first `unsearched`
    tokens is not searched.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str] = (), unsearched: int = 0) -> None:
        self._decoder = decoder
        self._unsearched = unsearched
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._released = 0
        self._tokens: deque[Placement] = deque()

    def push(self, token: Token) -> Piece:
        """Add the next token; returns the text that can now be shown. After a `stopped` piece no token may be added."""
        self._tokens.append(Placement(token, self._released + len(self._held)))
        self._held += self._decoder.push(token.id)
        if self._unsearched:
            self._unsearched -= 1
            return self._release(len(self._held))
        cut = self._stop()
        if cut is not None:
            return self._release(cut, stopped=True)
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> Piece:
        """After the last token: returns all text that is still held back."""
        self._held += self._decoder.finish()
        cut = self._stop()
        if cut is not None:
            return self._release(cut, stopped=True)
        piece = self._release(len(self._held))
        rest = tuple(self._tokens)
        self._tokens.clear()
        return Piece(piece.text, piece.tokens + rest)

    def _stop(self) -> int | None:
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _undecided(self) -> int:
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _release(self, size: int, stopped: bool = False) -> Piece:
        text, self._held = self._held[:size], "" if stopped else self._held[size:]
        self._released += size
        tokens = []
        while self._tokens and self._tokens[0].offset < self._released:
            tokens.append(self._tokens.popleft())
        if stopped:
            self._tokens.clear()
        return Piece(text, tuple(tokens), stopped)
