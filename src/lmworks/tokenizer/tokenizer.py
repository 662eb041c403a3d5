"""A trained tokenizer: text and conversations to token ids, and back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.tokenizer.chat import Template, assistant_mask, encode, prompts, render_marked, take_out, unlearn, unused_markers
from lmworks.tokenizer.messages import Message, normal_tools
from lmworks.tokenizer.named import DEFAULT, read_object
from lmworks.tokenizer.special import ASSISTANT, SYSTEM, THINK, State, ThoughtForm, thought_form
from lmworks.tokenizer.text_tokenizer import TextTokenizer

_PROMPT_END = 32  # tokens, in which the template may open or close the thoughts


class Tokenizer(TextTokenizer):
    """A `TextTokenizer` with the chat template of its directory."""

    prefix: tuple[int, ...] = ()
    """Ids before every document, which `encode` puts there."""
    lossless = True
    """Whether the bytes of the ids are those of the text, for every text."""

    @property
    def start(self) -> tuple[int, ...]:
        """What a model reads before a text without a context: `prefix`, or the end of the text before it."""
        return self.prefix or (self.eos_id,)

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

    @property
    def _tool_template(self) -> Template:
        """The template of conversations with tools."""
        return self._template

    def _template_for(self, tools: Any) -> Template:
        return self._tool_template if normal_tools(tools) else self._template

    def apply_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
                   add_generation_prompt: bool = False, thinking: bool | None = None) -> str:
        """The conversation as the one string that `transformers`' apply_chat_template makes of it. See `lmworks.tokenizer.chat`."""
        return self._template_for(tools).render(messages, tools, add_generation_prompt, thinking)

    @property
    def chat_template(self) -> str:
        """The source of the chat template; `UserError` if there is none."""
        return self._template.source

    @property
    def tool_template(self) -> str:
        """The source of the chat template of conversations with tools, which is another one in some models."""
        return self._tool_template.source

    @property
    def named_templates(self) -> dict[str, str]:
        """The sources of all chat templates, by their names."""
        return {DEFAULT: self.chat_template} if self.has_chat_template else {}

    @cached_property
    def thoughts(self) -> ThoughtForm:
        """The form of thoughts in replies: that of the chat template, else <think>."""
        return (thought_form(self.chat_template) if self.has_chat_template else None) or THINK

    def state_of_thoughts(self, prompt: Sequence[int]) -> State:
        """Whether a rendered prompt has opened the thoughts of the reply, has closed them, or leaves that to the model."""
        return self.thoughts.state(self.decode(prompt[-_PROMPT_END:]))

    def decode_reply(self, ids: Iterable[int]) -> str:
        """The text of a reply: without control tokens, except the marks of thoughts."""
        return self.decode(ids, skip_special=True, keep={self.special[mark] for mark in self.thoughts.marks if mark in self.special})

    def fix_date(self) -> None:
        """Let a chat template that shows the date show the day on which the run took this tokenizer, so that conversations and prompts do
        not depend on when they are rendered; today's for the tokenizer of no run. Templates of a server show each day."""
        if self.has_chat_template and self._template.date is None:
            day = read_object(self.directory / "report.json").get("chat_date") or date.today().isoformat()
            self._template.date = day
            with suppress(UserError):  # it is refused where it is needed
                self._tool_template.date = day

    def render_marked(self, messages: Sequence[dict[str, Any]], marker: str, add_generation_prompt: bool = False) -> str:
        """The conversation as a string in which `marker` breaks up what is not special: see `lmworks.tokenizer.chat.render_marked`."""
        return render_marked(self, self._template, messages, marker, add_generation_prompt=add_generation_prompt)

    def encode_chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None,
                    add_generation_prompt: bool = False, thinking: bool | None = None) -> tuple[list[int], list[bool]]:
        """The ids of the conversation, and for each id whether the assistant wrote it (including the token that ends its turn).

        Special tokens come from the template only; the same characters inside a message remain text, so that text cannot impersonate
        another role. If the template does not close the last answer, <|endoftext|> is appended, so that the model learns to end it.
        """
        found = self._template.checked(messages)
        ids = encode(self, self._template, found, tools, add_generation_prompt, thinking)
        if found[-1]["role"] == "assistant" and not add_generation_prompt and ids[-1] not in self.stop_ids:
            ids.append(self.eos_id)
        learned = [message.learned for message in found if message["role"] == "assistant"]
        prompt_ids = prompts(self, self._template, found, thinking)
        mask = assistant_mask(ids, self.special[ASSISTANT], self.special[SYSTEM], self.stop_ids, prompt_ids, learned)
        if any(message.untrained for message in found):
            self._unlearn(mask, ids, found, tools, thinking)
        return ids, mask

    def _unlearn(self, mask: list[bool], ids: list[int], messages: list[Message], tools: Any, thinking: bool | None) -> None:
        """Take what is not trained inside of answers out of `mask`. Places are in bytes, which the ids have exactly."""
        marker, begin, end = unused_markers(messages, tools, 3)
        text = render_marked(self, self._template, messages, marker, tools, False, thinking, untrained=(begin, end))
        plain, spans = take_out(text, (begin, end), marker)
        plain = plain.replace(marker, "")
        starts = np.cumsum([0, *(len(self.token_bytes(token)) for token in ids)])[:-1].tolist()
        for first, last in spans:
            unlearn(mask, starts, *(len(plain[:position].encode("utf-8", "surrogatepass")) for position in (first, last)))

    def answer_ends(self, ids: Sequence[int], mask: Sequence[bool]) -> list[int]:
        """Where each answer in `ids`, a conversation with its mask, ends: behind the token that ends its turn."""
        silent = [at for at, spoken in enumerate([*mask, False]) if not spoken]
        opened = [at for at, token in enumerate(ids) if token == self.special[ASSISTANT]]
        return [silent[bisect_left(silent, at + 2)] for at in opened]
