"""Conversations of the default corpus as messages for tuning: human chats, and service dialogues with reasoning and tools.

Messages have the format of `transformers`' chat templates: {"role": "system" | "user" | "assistant" | "tool", "content": str}; an
assistant's message may have "reasoning_content" and "tool_calls" [{"type": "function", "function": {"name": str, "arguments": dict}}].
"""

from __future__ import annotations

import itertools
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.recipe.schema.tune import StoryForm

Message = dict[str, Any]

_DOCSTRING = re.compile(r'\s*"""\n?(.*?)"""[ \t]*\n', re.DOTALL)
_HEADER = re.compile(r"^(system|user|assistant|tool\.[\w.-]+)((?:[ \t]+[^\s:]+)*):[ \t]*$", re.MULTILINE | re.IGNORECASE)
_TOOLS = re.compile(r"^TOOLS:\s*(?:```(?:json)?)?\s*(\[.*\])\s*(?:```)?\s*$", re.MULTILINE | re.DOTALL)
_BOILERPLATE = re.compile(r"^(?:ROLES|CHANNELS|TOOLS):", re.MULTILINE)
_FLAG = re.compile(r"^\[ATTENTION\][ \t]*", re.MULTILINE)
CHATS = "chitchat_dataset/dataset.json"
LANGUAGES = ("en", "ja", "zh")  # of virtual-stories
_CUT_OFF = " -"
_PLAIN_REPLY = re.compile(r"[^\d\n]{1,100}")


class Conversation(list[Message]):
    """Messages in order, the `tools` offered (OpenAI function definitions), the `language`, and the `origin`, equal to that of the same
    text in the corpus.
    """

    def __init__(self, messages: list[Message], tools: list[dict[str, Any]], language: str, origin: str) -> None:
        super().__init__(messages)
        self.tools, self.language, self.origin = tools, language, origin


@dataclass(frozen=True)
class Section:
    """A section of a story: the speaker (`system`, `user`, `assistant`, `tool.NAME`), its channel, and the tool that it addresses."""

    role: str
    channel: str
    to: str
    text: str


@dataclass(frozen=True)
class Story:
    """A service dialogue: a summary line, tool definitions, and sections."""

    summary: str
    tools: list[dict[str, Any]]
    sections: list[Section]


def parse_story(text: str) -> Story | None:
    """Parse a story file of the wheel `virtual-stories`; None if it does not have the format.

    Tool definitions that are not valid JSON are left out.
    """
    head = _DOCSTRING.match(text)
    preface = head[1] if head else ""
    tools: list[dict[str, Any]] = []
    if found := _TOOLS.search(preface):
        try:
            tools = [tool for tool in json.loads(found[1]) if isinstance(tool, dict) and "name" in tool]
        except ValueError:
            tools = []
    marks = list(_HEADER.finditer(text, head.end() if head else 0))
    if not marks:
        return None
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    sections = []
    for mark, end in zip(marks, ends, strict=True):
        labels = dict(part.split("=", 1) for part in mark[2].split() if "=" in part)
        to = labels.get("to", "").removeprefix("tool.")
        sections.append(
            Section(
                mark[1].lower() if "." not in mark[1] else mark[1],
                labels.get("channel", ""),
                to,
                _FLAG.sub("", text[mark.end() : end].strip()),
            )
        )
    summary = _BOILERPLATE.split(preface)[0].strip()
    return Story(summary, tools, [section for section in sections if section.text])


def story_language(name: str) -> str:
    """ISO 639-1 code from the file name of a story (…_en.txt, …_ja.txt, …_ja_jp.txt, …_zh_tw.txt)."""
    match = re.search(r"_(en|ja|zh)(?:_[a-z]{2})?\.txt$", name.lower())
    return match[1] if match else ""


def virtual_stories(
    wheel_path: str | Path, languages: tuple[str, ...] = LANGUAGES, form: StoryForm = "whole"
) -> Iterator[Conversation]:
    """Service dialogues. `form` is whole (system prompt, reasoning and tool calls), spoken (messages of user and assistant only) or
    exchanges (each message of the user with its reply, if the reply is one line of at most 100 characters without a digit).

    Malformed ones (a tool call without a result, invalid JSON) are left out.
    """
    with zipfile.ZipFile(wheel_path) as archive:
        for name in sorted(archive.namelist()):
            language = story_language(name)
            if "/stories/" not in name or language not in languages:
                continue
            story = parse_story(archive.read(name).decode("utf-8", "replace"))
            messages = story_messages(story) if story else None
            if not story or not messages:
                continue
            if form == "whole":
                yield Conversation(messages, [{"type": "function", "function": tool} for tool in story.tools], language, name)
            elif form == "spoken":
                yield Conversation(_spoken(messages), [], language, name)
            else:
                yield from (Conversation(exchange, [], language, name) for exchange in _exchanges(_spoken(messages)))


def _spoken(messages: list[Message]) -> list[Message]:
    """The messages of user and assistant, without tool calls and results."""
    said = (message for message in messages if message["role"] in ("user", "assistant") and message["content"])
    return [{"role": message["role"], "content": message["content"]} for message in said]


def _exchanges(spoken: list[Message]) -> Iterator[list[Message]]:
    """Question and reply pairs that a model of a few million weights can learn. It could only invent room numbers, prices and order
    codes.
    """
    for asked, reply in itertools.pairwise(spoken):
        if (asked["role"], reply["role"]) == ("user", "assistant") and _PLAIN_REPLY.fullmatch(reply["content"]):
            yield [asked, reply]


def story_messages(story: Story) -> list[Message] | None:
    """Sections to messages; None unless they alternate correctly: (system) user assistant..., each tool call followed by its result, and a
    reply of the assistant at the end.
    """
    messages: list[Message] = []
    offered = {tool["name"] for tool in story.tools}
    reasoning: list[str] = []
    for section in story.sections:
        last = messages[-1]["role"] if messages else ""
        if section.role == "system":
            if messages:
                return None
            messages.append({"role": "system", "content": section.text})
        elif section.role == "user":
            if last not in ("", "system", "assistant") or reasoning or _waits_for_tool(messages):
                return None
            messages.append({"role": "user", "content": section.text})
        elif section.role == "assistant" and section.channel == "analysis":
            reasoning.append(section.text)
        elif section.role == "assistant":
            if last not in ("user", "tool") or (section.to and section.to not in offered):
                return None
            message: Message = {"role": "assistant", "content": "" if section.to else section.text}
            if reasoning:
                message["reasoning_content"] = "\n\n".join(reasoning)
                reasoning = []
            if section.to:
                arguments = _json_object(section.text)
                if arguments is None:
                    return None
                message["tool_calls"] = [{"type": "function", "function": {"name": section.to, "arguments": arguments}}]
            messages.append(message)
        else:
            if not _waits_for_tool(messages) or messages[-1]["tool_calls"][0]["function"]["name"] != section.role.removeprefix("tool."):
                return None
            messages.append({"role": "tool", "content": section.text})
    complete = len(messages) >= 2 and messages[-1]["role"] == "assistant" and not _waits_for_tool(messages) and not reasoning
    return messages if complete else None


def _waits_for_tool(messages: list[Message]) -> bool:
    return bool(messages) and "tool_calls" in messages[-1]


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Chat:
    """A human chat: the suggested topic, and turns as (speaker number, messages)."""

    identity: str
    topic: str
    turns: list[tuple[int, list[str]]]


def parse_chats(data: bytes) -> Iterator[Chat]:
    """Parse the dataset file of the wheel `chitchat-dataset`. A message that was cut at the length limit (" -") is joined with its
    continuation.
    """
    for identity, chat in json.loads(data).items():
        numbers: dict[str, int] = {}
        turns: list[tuple[int, list[str]]] = []
        for message in itertools.chain.from_iterable(chat["messages"]):
            text = " ".join(str(message.get("text") or "").split())
            if not text:
                continue
            speaker = numbers.setdefault(message["sender"], len(numbers))
            if not turns or turns[-1][0] != speaker:
                turns.append((speaker, [text]))
            elif turns[-1][1][-1].endswith(_CUT_OFF):
                turns[-1][1][-1] = f"{turns[-1][1][-1].removesuffix(_CUT_OFF)} {text}"
            else:
                turns[-1][1].append(text)
        yield Chat(identity, " ".join((chat.get("prompt") or "").split()), turns)


def chitchat(wheel_path: str | Path) -> Iterator[Conversation]:
    """Human chats of two people as user (the one who wrote first) and assistant, from the first message to the last reply of the assistant.

    Monologues are left out.
    """
    with zipfile.ZipFile(wheel_path) as archive:
        data = archive.read(CHATS)
    for chat in parse_chats(data):
        turns = chat.turns if not chat.turns or chat.turns[-1][0] == 1 else chat.turns[:-1]
        if len(turns) < 2 or any(speaker > 1 for speaker, _ in turns) or any(_is_key_mashing(text) for _, texts in turns for text in texts):
            continue
        messages = [{"role": ("user", "assistant")[speaker], "content": "\n".join(texts)} for speaker, texts in turns]
        yield Conversation(messages, [], "en", f"{CHATS}:{chat.identity}")


def _is_key_mashing(text: str) -> bool:
    """Whether a message is key mashing: three or more one-letter words and nothing else ("a a a a")."""
    words = text.split()
    return len(words) >= 3 and all(len(word) == 1 for word in words)
