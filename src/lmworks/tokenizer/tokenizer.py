"""A trained tokenizer: text and conversations to token ids, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.tokenizer.chat import Template, assistant_mask, encode, prompts
from lmworks.tokenizer.special import ASSISTANT, SYSTEM
from lmworks.tokenizer.text_tokenizer import TextTokenizer


def load(directory: Path) -> Tokenizer:
    """The tokenizer of a directory with `tokenizer.json` and `chat_template.jinja`, as `lmworks.tokenizer.train` writes it."""
    return Tokenizer(Path(directory))


class Tokenizer(TextTokenizer):
    """A `TextTokenizer` with the chat template of its directory."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the directory has a chat template."""
        return (self.directory / "chat_template.jinja").is_file()

    @cached_property
    def _template(self) -> Template:
        path = self.directory / "chat_template.jinja"
        if not path.is_file():
            raise UserError(f"{path} does not exist; this tokenizer has no chat template")
        return Template(path.read_text(encoding="utf-8"), str(path))

    def apply_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
                   add_generation_prompt: bool = False, thinking: bool | None = None) -> str:
        """The conversation as the one string that `transformers`' apply_chat_template makes of it. See `lmworks.tokenizer.chat`."""
        return self._template.render(messages, tools, add_generation_prompt, thinking)

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
                    add_generation_prompt: bool = False, thinking: bool | None = None) -> tuple[list[int], list[bool]]:
        """The ids of the conversation, and for each whether the assistant wrote it (including the token that ends its turn).

        Special tokens come from the template only; the same characters inside a message stay text, so that text cannot
        impersonate another role. If the template leaves the last answer open, <|endoftext|> is appended, so that the model learns
        to end it.
        """
        ids = encode(self, self._template, messages, tools, add_generation_prompt, thinking)
        if messages[-1]["role"] == "assistant" and not add_generation_prompt and ids[-1] not in self.stop_ids:
            ids.append(self.eos_id)
        prompt_ids = prompts(self, self._template, messages, thinking)
        return ids, assistant_mask(ids, self.special[ASSISTANT], self.special[SYSTEM], self.stop_ids, prompt_ids)
