"""The tokenizer interface of the server: prompts from messages, and the text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmworks.inference.sampling import Token
from lmworks.serve.text import Placement
from lmworks.tokenizer.special import ToolForm, tool_form

if TYPE_CHECKING:
    from lmworks.tokenizer import StreamDecoder, Tokenizer


class Vocabulary:
    """The ids that clients may name, and the text of each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.size = tokenizer.vocab_size
        self.stop_ids = tuple(sorted(tokenizer.stop_ids))
        self.eos_id = tokenizer.eos_id
        self.special = tokenizer.special
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
    def thinks(self) -> bool:
        """Whether the chat template lets the model think first."""
        return "<think>" in self.template and "set brief = true" not in self.template

    @property
    def tool_form(self) -> ToolForm | None:
        """The form in which the chat template writes tool calls; None if it is not known."""
        return tool_form(self.template)

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
