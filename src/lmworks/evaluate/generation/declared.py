"""How a generation set is declared, and opened with the options of a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lmworks.corpus.contamination import Question
from lmworks.errors import UserError
from lmworks.evaluate.generation.interface import GenerationSet
from lmworks.evaluate.items import Row
from lmworks.evaluate.sources.data import Data, rows, where
from lmworks.recipe.schema.evaluate import Benchmark

GENERATED_ONLY = ("samples", "temperature", "lengths")
_OPTIONS = ("path", "hub", "form", *GENERATED_ONLY)


def given(benchmark: Benchmark, options: Iterable[str]) -> list[str]:
    """Those options that do not have their default value."""
    fields = Benchmark.model_fields
    return [option for option in options if getattr(benchmark, option) != fields[option].get_default(call_default_factory=True)]


@dataclass(frozen=True)
class Declared:
    """A set that a recipe may name. A reply has at most `reply_tokens` tokens. `options` are the keys of `evaluate.benchmarks` that the set
    takes, besides name, items and shots."""

    name: str
    about: str
    make: Callable[[Benchmark], GenerationSet]
    reply_tokens: int
    options: frozenset[str] = frozenset()

    def open(self, benchmark: Benchmark) -> GenerationSet:
        """The set with these options. Raises `UserError` that names a key which the set does not have, without reading any data."""
        key = f"evaluate.benchmarks.{self.name}"
        if odd := [option for option in given(benchmark, _OPTIONS) if option not in self.options]:
            takes = ", ".join(["items", "shots", *sorted(self.options)])
            raise UserError(f"{key}.{odd[0]}: this set does not have this option, only {takes}; leave it out")
        opened = self.make(benchmark)
        if benchmark.shots is not None and benchmark.shots > opened.most_shots:
            most = f"{opened.most_shots} worked examples at most" if opened.most_shots else "no worked examples"
            raise UserError(f"{key}.shots: this set has {most}; leave it out")
        return opened

    def questions(self, benchmark: Benchmark) -> Iterator[Question]:
        """What no training text may contain. Raises `Unavailable`."""
        yield from self.open(benchmark).questions()


def read_rows(name: str, data: Data, columns: tuple[str, ...], path: str | None, hub: bool) -> Iterator[tuple[str, Row]]:
    """The rows of a set with its columns, all of them text. In the package they stand below `doc`."""
    found = False
    for number, row in rows(data, path, hub):
        row = row.get("doc", row) if path is None and not hub else row
        if odd := [column for column in columns if not isinstance(row.get(column), str)]:
            raise UserError(
                f"evaluate.benchmarks.{name}: row {number} of {where(path, hub)} has no text in the column {odd[0]!r}; give the rows of "
                f"{data.repository}, which have the columns {', '.join(columns)}"
            )
        found = True
        yield number, row
    if not found:
        raise UserError(f"evaluate.benchmarks.{name}: {where(path, hub)} has no rows; give a file with the rows of the set")
