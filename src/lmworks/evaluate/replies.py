"""Free answers of a model: by the chat template where it was tuned on it, by a plain question-and-answer prompt where not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


class Answerer:
    """Greedy replies, prompts of like length together, in the order asked. A prompt too long for the model gets the empty reply."""

    def __init__(self, model: Transformer, tokenizer: ChatTokenizer, chat: bool, max_new_tokens: int = 64, batch: int = 32) -> None:
        self.model, self.tokenizer, self.chat = model, tokenizer, chat
        self.max_new_tokens, self.batch = max_new_tokens, batch

    def __call__(self, questions: list[str], advance: Callable[[int], None] | None = None) -> list[str]:
        from lmworks.model.generate import GenerateOptions, generate

        make = chat_prompt if self.chat else plain_prompt
        prompts = [make(self.tokenizer, question) for question in questions]
        limit = int(self.model.config.max_position_embeddings) if self.model.config.max_position_embeddings else None
        options = GenerateOptions(max_new_tokens=self.max_new_tokens, stop_ids=tuple(self.tokenizer.stop_ids))
        replies = [""] * len(prompts)
        fitting = sorted((i for i, prompt in enumerate(prompts) if not limit or len(prompt) < limit), key=lambda i: len(prompts[i]))
        if advance:
            advance(len(prompts) - len(fitting))
        for start in range(0, len(fitting), self.batch):
            part = fitting[start : start + self.batch]
            for index, ids in zip(part, generate(self.model, [prompts[i] for i in part], options), strict=True):
                text = self.tokenizer.decode(ids, skip_special=True)
                # a base model goes on to ask itself the next question; its answer is what comes before
                replies[index] = read(text).content.strip() if self.chat else text.strip().split("\nQuestion:")[0].split("\n\n")[0].strip()
            if advance:
                advance(len(part))
        return replies
