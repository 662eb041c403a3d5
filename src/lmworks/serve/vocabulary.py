"""Text of requests and answers: prompts from messages, and text that can be shown from sampled tokens, which is whole characters and never
a part of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lmworks.inference.sampling import Token
from lmworks.tokenizer.special import State, ThoughtForm, ToolForm, thought_form, tool_form

if TYPE_CHECKING:
    from lmworks.tokenizer import StreamDecoder, Tokenizer


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


class Vocabulary:
    """The ids that clients may name, and the text of each. `special` are the tokens that are no text in an answer: those of the
    tokenizer, and its marks of thoughts and calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.stop_ids = tuple(sorted(tokenizer.stop_ids))
        self.eos_id = tokenizer.eos_id
        self.special = dict(tokenizer.markup) | tokenizer.special
        self.special_ids = frozenset(self.special.values())

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; text that looks like a special token is encoded as text."""
        return self._tokenizer.encode(text)

    def chat_prompt(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, thinking: bool | None = None
    ) -> list[int]:
        """Ids of a conversation up to the start of the assistant's answer. Raises `UserError` if the template rejects it."""
        return self._tokenizer.encode_chat(messages, tools, add_generation_prompt=True, thinking=thinking)[0]

    @property
    def template(self) -> str:
        """The source of the chat template; empty without one."""
        return self._tokenizer.chat_template if self._tokenizer.has_chat_template else ""

    @property
    def tool_template(self) -> str:
        """As `template`, for conversations with tools."""
        return self._tokenizer.tool_template if self._tokenizer.has_chat_template else ""

    @property
    def thoughts(self) -> ThoughtForm:
        """The form of thoughts in answers."""
        return self._tokenizer.thoughts

    @property
    def thinks(self) -> bool:
        """Whether a model with this chat template may think first."""
        return thought_form(self.template) is not None and "set brief = true" not in self.template

    def state_of_thoughts(self, prompt: Sequence[int]) -> State:
        """Whether a prompt has opened the thoughts of the answer, has closed them, or leaves that to the model."""
        return self._tokenizer.state_of_thoughts(prompt)

    @property
    def tool_form(self) -> ToolForm | None:
        """The form in which the chat template writes tool calls; None if it is not known."""
        return tool_form(self.tool_template)

    def decoder(self, marks: Sequence[str] = ()) -> StreamDecoder:
        """A new decoder for one answer, in which control tokens have no text, except `marks`."""
        from lmworks.tokenizer import StreamDecoder

        return StreamDecoder(self._tokenizer, skip_special=True, keep={self.special[mark] for mark in marks if mark in self.special})

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt, control tokens included."""
        return self._tokenizer.decode(ids)

    def token_text(self, token: int) -> str:
        """The text of one token; incomplete characters become the replacement character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; empty for an id that only pads the embedding."""
        return self._tokenizer.token_bytes(token) if token < self.size else b""

    def place(self, tokens: Sequence[Token]) -> tuple[Placement, ...]:
        """The tokens of a prompt with the offsets of their text in the result of `decode`."""
        from lmworks.tokenizer import StreamDecoder

        decoder, offset, placed = StreamDecoder(self._tokenizer), 0, []
        for token in tokens:
            placed.append(Placement(token, offset))
            offset += len(decoder.push(token.id))
        return tuple(placed)
