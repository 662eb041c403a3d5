"""Free answers of a model: by the chat template where it was tuned on it, by a plain question-and-answer prompt where not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lmworks.tokenizer.reply import read

if TYPE_CHECKING:
    from lmworks.model import Transformer


class ChatTokenizer(Protocol):
    """What is asked of `lmworks.tokenizer.Tokenizer`."""

    vocab_size: int
    eos_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str: ...
    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> tuple[list[int], list[bool]]: ...


def chat_prompt(tokenizer: ChatTokenizer, question: str) -> list[int]:
    """Ids of a conversation in which the user has asked and the assistant is to speak."""
    return tokenizer.encode_chat([{"role": "user", "content": question}], add_generation_prompt=True)[0]


def plain_prompt(tokenizer: ChatTokenizer, question: str) -> list[int]:
    """Ids of `Question: ... Answer:` for a model that knows no chat."""
    return tokenizer.encode(f"Question: {question.strip()}\nAnswer:")


Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Reply:
    """What a model wrote after a prompt of `prompt_tokens` tokens. `truncated`: it had not stopped at the limit of tokens, or the prompt
    was too long for it."""

    text: str
    truncated: bool = False
    prompt_tokens: int = 0


class Answerer:
    """Greedy replies, prompts of similar length together, in the order asked. A prompt too long for the model gets the empty reply."""

    def __init__(self, model: Transformer, tokenizer: ChatTokenizer, chat: bool, max_new_tokens: int = 64, batch: int = 32) -> None:
        self.model, self.tokenizer, self.chat = model, tokenizer, chat
        self.max_new_tokens, self.batch = max_new_tokens, batch

    def __call__(self, questions: list[str], advance: Callable[[int], None] | None = None) -> list[str]:
        """Replies to bare questions."""
        make = chat_prompt if self.chat else plain_prompt
        return [reply.text for reply in self._replies([make(self.tokenizer, question) for question in questions], advance)]

    def replies(self, prompts: Sequence[str | Messages], advance: Callable[[int], None] | None = None) -> list[Reply]:
        """Replies to text that is continued, or to conversations."""
        encoded = [
            self.tokenizer.encode(one) if isinstance(one, str) else self.tokenizer.encode_chat(one, add_generation_prompt=True)[0]
            for one in prompts
        ]
        return self._replies(encoded, advance)

    def _replies(self, prompts: list[list[int]], advance: Callable[[int], None] | None) -> list[Reply]:
        from lmworks.model.generate import GenerateOptions, generate

        limit = int(self.model.config.max_position_embeddings) if self.model.config.max_position_embeddings else None
        options = GenerateOptions(max_new_tokens=self.max_new_tokens, stop_ids=tuple(self.tokenizer.stop_ids))
        replies = [Reply("", True, len(prompt)) for prompt in prompts]
        fitting = sorted((i for i, prompt in enumerate(prompts) if not limit or len(prompt) < limit), key=lambda i: len(prompts[i]))
        if advance:
            advance(len(prompts) - len(fitting))
        for start in range(0, len(fitting), self.batch):
            part = fitting[start : start + self.batch]
            most = max(len(prompts[i]) for i in part) + self.max_new_tokens
            for index, ids in zip(part, generate(self.model, [prompts[i] for i in part], options), strict=True):
                text, room = self.tokenizer.decode(ids, skip_special=True), self.max_new_tokens
                if limit:
                    room = min(room, min(most, limit) - len(prompts[index]))
                truncated = len(ids) >= room
                if self.chat:
                    text = read(text).content
                else:  # a base model goes on to ask itself the next question; its answer is what comes before
                    whole, text = text.strip(), text.strip().split("\nQuestion:")[0].split("\n\n")[0]
                    truncated = truncated and text == whole
                replies[index] = Reply(text.strip(), truncated, len(prompts[index]))
            if advance:
                advance(len(part))
        return replies
