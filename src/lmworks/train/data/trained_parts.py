"""What of a conversation is trained: which answers, and their thoughts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lmworks.recipe.schema.tune import ChatData, Thoughts
from lmworks.tokenizer.chat import with_thoughts
from lmworks.tokenizer.messages import Message, Span
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.data.row_columns import NoRow

Messages = list[Message]


def examples(messages: Messages, tools: list[dict[str, object]] | None, data: ChatData, tokenizer: Tokenizer, noted: Counter[str],
             ) -> Iterator[Messages]:  # fmt: skip
    """A conversation as it is trained: as a whole, or each answer with what comes before it (`answers: each`), as the server renders it.

    `noted` counts what is not trained. Raises `NoRow` if nothing of it can be, and `UserError`.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise NoRow("no answer")
    found = [_without_empty(message, data, noted) if message["role"] == "assistant" else message for message in messages]
    places = [at for at, message in enumerate(found) if message["role"] == "assistant" and message.learned]
    if not places:
        raise NoRow("nothing to train: no answer is marked to be trained, or all are empty")
    if data.answers == "all":
        yield _with_thoughts(found, tools, data.thoughts, tokenizer, noted)
        return
    for place in places if data.answers == "each" else places[-1:]:
        if data.answers == "each" and place + 1 < len(found) and found[place + 1]["role"] == "tool":
            continue  # a call is trained with the answer after its results, of which it is a part
        first = max((at for at in range(place) if found[at]["role"] == "user"), default=-1) if data.answers == "each" else place - 1
        before = enumerate(found[: place + 1])
        only = [one.having(learned=False) if one["role"] == "assistant" and at <= first else one for at, one in before]
        yield _with_thoughts(only, tools, data.thoughts, tokenizer, noted)


def _without_empty(message: Message, data: ChatData, noted: Counter[str]) -> Message:
    if data.empty_answers == "train" or not message.learned or not message.empty:
        return message
    noted["empty answers, not trained"] += 1
    return message.having(learned=False)


def _with_thoughts(messages: Messages, tools: list[dict[str, object]] | None, options: Thoughts, tokenizer: Tokenizer, noted: Counter[str],
                   ) -> Messages:  # fmt: skip
    """A conversation with the switches of `thoughts`."""
    if options.history == "drop":
        last = max((at for at, one in enumerate(messages) if one["role"] == "user"), default=-1)
        messages = [_stripped(one) if one["role"] == "assistant" and at < last else one for at, one in enumerate(messages)]
    if any(one["role"] == "assistant" and _thoughts(one) for one in messages):
        shown = tokenizer.apply_chat(messages, tools)
        hidden = [at for at, one in enumerate(messages) if one["role"] == "assistant" and _thoughts(one) not in shown]
        if hidden and options.history == "keep":
            messages = [_inline(one) if at in hidden else one for at, one in enumerate(messages)]
            shown = tokenizer.apply_chat(messages, tools)
            if any(_thoughts(messages[at]) not in shown for at in hidden):
                raise NoRow("thoughts that the chat template leaves out, against thoughts.history: choose template, or answers: each")
            hidden = []
        noted["thoughts that the chat template leaves out"] += len(hidden)
    if not options.train:
        noted["thoughts not trained"] += sum(one["role"] == "assistant" and one.learned and bool(_thoughts(one)) for one in messages)
        messages = [_unlearned(one) if one["role"] == "assistant" and _thoughts(one) else one for one in messages]
    if options.empty == "prompt":
        messages = [one.having(silent=True) if one["role"] == "assistant" and not _thoughts(one) else one for one in messages]
    return messages


def _thoughts(message: Message) -> str:
    return str(with_thoughts(message).get("reasoning_content") or "").strip()


def _stripped(message: Message) -> Message:
    return with_thoughts(message).saying(reasoning_content=None)


def _inline(message: Message) -> Message:
    """An answer with its thoughts in its text, for templates that have no field for them."""
    thoughts = str(message.get("reasoning_content") or "")
    return message.saying(content=f"<think>\n{thoughts}\n</think>\n\n{message['content']}", reasoning_content=None).having(untrained={})


def _unlearned(message: Message) -> Message:
    """An answer whose thoughts are not trained: their text, not the marks around it."""
    spans: dict[str, list[Span]] = {name: list(found) for name, found in message.untrained.items()}
    if isinstance(thoughts := message.get("reasoning_content"), str) and thoughts.strip():
        return message.having(untrained=spans | {"reasoning_content": [(0, len(thoughts))]})
    begin = str(message["content"]).index(_thoughts(message))
    return message.having(untrained=spans | {"content": [*spans.get("content", []), (begin, begin + len(_thoughts(message)))]})
