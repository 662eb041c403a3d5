"""The benchmarks of a recipe: the published sets by name, own tasks, and their items with the worked examples before them."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lmworks.corpus.contamination import Question
from lmworks.errors import UserError
from lmworks.evaluate.generation import gsm8k, humaneval, ruler
from lmworks.evaluate.generation.interface import GENERATED_ONLY, Declared, given
from lmworks.evaluate.sets import choice_sets, sources
from lmworks.evaluate.sets.choice_sets import ChoiceSet
from lmworks.evaluate.sets.items import ChoiceItem, Item, digest, protected_question, ranked
from lmworks.evaluate.sets.own_tasks import task_items
from lmworks.evaluate.sets.sources import Data, rows, where
from lmworks.io.files import explain_os_errors, sha256_file
from lmworks.recipe.schema.evaluate import Benchmark, load_task, local_paths


def _by_name(sets: Iterable[Any]) -> dict[str, Any]:
    return {one.name: one for one in sorted(sets, key=lambda one: str(one.name))}


CHOICE: dict[str, ChoiceSet] = _by_name(choice_sets.SETS)
"""The multiple-choice sets."""
GENERATION: dict[str, Declared] = _by_name((*gsm8k.SETS, *humaneval.SETS, *ruler.SETS))
"""The sets that are answered by generated text and judged by code of their own."""


def is_generated(benchmark: Benchmark) -> bool:
    """Whether a benchmark is one of `GENERATION`."""
    return benchmark.file is None and benchmark.name in GENERATION


def check_names(benchmarks: Iterable[Benchmark]) -> None:
    """Raise `UserError` for a set that does not exist, with the nearest that does, for an option that it does not have, and for two sets
    whose scores would have one name. A task of the user's own may have any name."""
    known = [*CHOICE, *GENERATION]
    asked: set[tuple[str, str, int | None]] = set()
    for one in benchmarks:
        if (one.name, one.form, one.shots) in asked:
            raise UserError(f"evaluate.benchmarks: {one.name} is listed twice, and its scores have one name; keep one, or rename a file")
        asked.add((one.name, one.form, one.shots))
        if is_generated(one):
            GENERATION[one.name].open(one)
        elif odd := given(one, GENERATED_ONLY):
            raise UserError(f"evaluate.benchmarks.{one.name}.{odd[0]}: only sets that are answered by generation have it; leave it out")
        if one.file is None and one.name not in known:
            near = difflib.get_close_matches(one.name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known sets: {', '.join(known)}"
            raise UserError(f"evaluate.benchmarks: no benchmark set is called {one.name!r}; {hint}")


MOST_EXAMPLES = 5  # worked examples that a set takes out of its items where it has no others


@dataclass(frozen=True)
class Loaded:
    """A sample of a set. `examples` are the worked examples of all subjects, in order; `origin` says where they come from. `left_out` items
    stand among the examples, and are not asked."""

    items: Sequence[Item]
    examples: Sequence[Item]
    per_subject: bool
    origin: str
    left_out: int = 0

    def shown_before(self, item: Item, shots: int) -> Sequence[Item]:
        """The worked examples that are shown before an item."""
        if not self.per_subject:
            return self.examples[:shots]
        return [one for one in self.examples if one.subject == item.subject][:shots]


def load_all(benchmark: Benchmark) -> tuple[Item, ...]:
    """Every item, in the order of its source. Raises `UserError` or `Unavailable` if the data is missing or is of another form."""
    if benchmark.file is not None:
        return _own_items(benchmark.name, benchmark.file)
    return _set_items(benchmark.name, benchmark.path, benchmark.hub, sources.state(benchmark.path))


@cache
def _set_items(name: str, path: str | None, hub: bool, state: Hashable) -> tuple[Item, ...]:
    chosen = CHOICE[name]
    found = tuple(_read(chosen, chosen.data, path, hub))
    sources.require_ids(name, (item.id for item in found), where(path, hub))
    return found


def _own_items(name: str, file: str) -> tuple[Item, ...]:
    found = tuple(task_items(name, file, load_task(file)))
    if not found:
        raise UserError(f"the task {file} has no items; put some rows into its data file")
    return found


def _read(chosen: ChoiceSet, data: Data, path: str | None, hub: bool) -> Iterator[ChoiceItem]:
    numbers: Counter[str] = Counter()
    place = where(path, hub)
    found = False
    for number, row in rows(data, path, hub):
        try:
            if chosen.per_subject:  # numbered within the subject, whether or not each has a file of its own
                subject = row["subject"]
                number = str(numbers[subject])
                numbers[subject] += 1
            made = chosen.build(chosen.name, chosen.read(row, number))
            yield replace(made, preamble=preamble(chosen, made.subject))
            found = True
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            wanted = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"evaluate.benchmarks.{chosen.name}: row {number} of {place} is not of this set ({wanted}); give its rows with the columns "
                f"of {data.repository}, or describe your own with a task file (`file`)"
            ) from None
    if not found:
        raise UserError(f"evaluate.benchmarks.{chosen.name}: {place} has no rows; give a file with the rows of the set")


def preamble(chosen: ChoiceSet, subject: str) -> str:
    """The text before the first question of a subject."""
    return chosen.preamble.replace("{subject}", subject.replace("_", " "))


def load(benchmark: Benchmark, most: int | None, shots: int) -> Loaded:
    """At most `most` items of the set in the order of `ranked`, and the worked examples that are shown before each.

    The examples do not depend on the model. Where a set has none apart from its items, they are its last items in that order, which are
    then not asked.
    """
    items = ranked(load_all(benchmark))
    if not shots:
        return Loaded(items[:most], [], False, "")
    examples, per_subject, origin = _examples(benchmark)
    if not examples:
        enough = _most_of_items(len(items))
        if shots > enough:
            raise UserError(f"evaluate.benchmarks.{benchmark.name}.shots: {shots} worked examples are asked for, and the set has {enough}")
        examples, origin, items = items[: -shots - 1 : -1], "items that are not asked", items[:-shots]
    available = _fewest(examples, items) if per_subject else len(examples)
    if shots > available:
        raise UserError(f"evaluate.benchmarks.{benchmark.name}.shots: {shots} worked examples are asked for, and the set has {available}")
    if not per_subject:
        examples = examples[:shots]
    shown = {protected_question(one).text for one in examples}
    asked = [one for one in items if protected_question(one).text not in shown]
    if not asked:
        raise UserError(f"evaluate.benchmarks.{benchmark.name}: all items stand among its worked examples; give it others, or fewer shots")
    return Loaded(asked[:most], examples, per_subject, origin, len(items) - len(asked))


def most_shots(benchmark: Benchmark) -> int:
    """The largest number of worked examples that can be shown before each item."""
    items = load_all(benchmark)
    examples, per_subject, _ = _examples(benchmark)
    return _fewest(examples, items) if per_subject else len(examples) or _most_of_items(len(items))


def _most_of_items(count: int) -> int:
    """Worked examples that a set of so many items can do without."""
    return min(MOST_EXAMPLES, count // 2)


def _fewest(examples: Sequence[Item], items: Sequence[Item]) -> int:
    """The examples of the subject that has the fewest."""
    return min((sum(one.subject == name for one in examples) for name in {one.subject for one in items}), default=0)


def _examples(benchmark: Benchmark) -> tuple[list[Item], bool, str]:
    """Worked examples apart from the items, whether each subject has its own, and where they come from; none if there are none."""
    if benchmark.file is not None:
        task = load_task(benchmark.file)
        found = list(task_items(benchmark.name, benchmark.file, task, examples=True)) if task.examples else []
        return found, False, task.examples or ""
    chosen, split = CHOICE[benchmark.name], CHOICE[benchmark.name].examples
    in_place = split is not None and (
        sources.has_split(benchmark.path, split.split) if benchmark.path else benchmark.hub or split.members is not None
    )
    if split is not None and in_place:
        made: list[Item] = list(_set_examples(benchmark.name, benchmark.path, benchmark.hub, sources.state(benchmark.path)))
        # the examples of a subject in their own order; of a large training split those that come first in the order of samples
        return made if chosen.per_subject else ranked(made)[:25], chosen.per_subject, f"{split.split} split"
    if benchmark.path is None and not benchmark.hub and chosen.prepared:
        return list(_prepared(benchmark.name)), False, "the five curated ones of OLMES"
    return [], False, ""


@cache
def _set_examples(name: str, path: str | None, hub: bool, state: Hashable) -> tuple[ChoiceItem, ...]:
    chosen = CHOICE[name]
    assert chosen.examples is not None
    return tuple(_read(chosen, chosen.examples, path, hub))


@cache
def _prepared(name: str) -> tuple[ChoiceItem, ...]:
    return tuple(CHOICE[name].prepared_examples())


def questions(benchmark: Benchmark) -> Iterator[Question]:
    """Question and right answer of every item of the set (not only of a sample), for decontamination."""
    yield from map(protected_question, load_all(benchmark))


def contents(benchmarks: Iterable[Benchmark]) -> list[Any]:
    """What decides which items are asked and how, as JSON values: the options of each benchmark and the hashes of its local files. What is
    kept of an evaluation is kept under it, because rows change while the names of their files remain."""
    return [
        [one.model_dump(mode="json"), [_hash(path) for place in local_paths(one) for path in sources.files_at(place)]] for one in benchmarks
    ]  # fmt: skip


def _hash(path: Path) -> str:
    with explain_os_errors(path):
        return sha256_file(path)


def fingerprint(examples: Sequence[Item]) -> str:
    """Identifies worked examples: scores under one name are comparable if it is the same."""
    return digest(*(text for one in examples for text in (one.question, one.text))).hex()[:12]


def check_local(benchmarks: Iterable[Benchmark]) -> None:
    """Raise `UserError` for local data that is missing or is not what it should be. The package and the hub are not looked at."""
    for one in benchmarks:
        if is_generated(one):
            if one.path is not None:
                next(GENERATION[one.name].questions(one), None)
        elif one.file is not None or one.path is not None:
            load(one, 1, one.shots or 0)
