"""A run directory in Python: its metrics as a table, its events, the batch of any step with its documents, and its models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.io.files import read_json
from lmworks.io.run_layout import BASE, MODEL_STAGES
from lmworks.run.run_dir import require_run, seconds_by_stage

if TYPE_CHECKING:
    import numpy as np

    from lmworks.api.models import Model
    from lmworks.recipe.schema.recipe import Recipe as RecipeTree
    from lmworks.shards.batch import Batch
    from lmworks.shards.batches import Batches
    from lmworks.shards.lineage import SequenceDocuments
    from lmworks.shards.order import MixtureOverride
    from lmworks.tokenizer.tokenizer import Tokenizer

_SHOWN = 10  # rows of a table in a notebook, half of them from its end


class Table(dict[str, list[float | None]]):
    """A table as a dictionary: the name of each column with its values, one per row; None where a row has no value.

    The type is the same whether pandas is installed or not, and plotting libraries take its columns as they are. `to_pandas` and
    `pandas.DataFrame(table)` make a DataFrame of it.
    """

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], first: Sequence[str] = ()) -> Table:
        """A table with a row per record; the columns `first` come first, the others in the order of their names."""
        names = {name for record in records for name, value in record.items() if isinstance(value, int | float)}
        columns = [*(name for name in first if name in names), *sorted(names - set(first))]
        return cls({name: [record.get(name) for record in records] for name in columns})

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(next(iter(self.values()), []))

    def dropna(self, *names: str) -> Table:
        """The rows that have values in all of these columns, with these columns only, as needed for a figure. Raises `UserError` for no
        column of the table."""
        for name in names:
            if name not in self:
                raise UserError(f"there is no column {name!r}; there are: {', '.join(self)}")
        kept = [row for row in zip(*(self[name] for name in names), strict=True) if None not in row]
        return Table({name: [row[column] for row in kept] for column, name in enumerate(names)})

    def to_pandas(self) -> Any:
        """A pandas.DataFrame. Raises `UserError` if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise UserError("a DataFrame needs a package that is not installed: pip install pandas") from None
        return pandas.DataFrame(self)

    def _repr_html_(self) -> str:
        last = max(self.rows - _SHOWN // 2, min(self.rows, _SHOWN // 2))
        shown = [*range(min(self.rows, _SHOWN // 2)), *range(last, self.rows)]
        head = "".join(f"<th>{escape(name)}</th>" for name in self)
        body = "".join("<tr>" + "".join(f"<td>{_cell(column[row])}</td>" for column in self.values()) + "</tr>" for row in shown)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{self.rows:,} rows, {len(self)} columns</p>"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class StepBatch:
    """The batch of a step of pretraining: B sequences of T tokens.

    tokens: (B, T) int32. labels: (B, T) int32, the next token; -100 where there is no loss. documents: for each sequence its source, its
    epoch, and the documents that its tokens come from, each with the file and row that it was read from. left_out: whether a rollback has
    skipped this step.
    """

    step: int
    phase: str
    tokens: np.ndarray
    labels: np.ndarray
    documents: list[SequenceDocuments]
    left_out: bool
    batch: Batch = field(repr=False)
    _tokenizer: Tokenizer = field(repr=False)

    def text(self, sequence: int, tokens: int | None = None) -> str:
        """The text of a sequence of the batch, or of its first `tokens`; special tokens included."""
        return self._tokenizer.decode(self.tokens[sequence, :tokens].tolist())

    def to_json(self) -> list[dict[str, Any]]:
        """The JSON that `lmworks data batch --json` prints."""
        return [asdict(row) | {"tokens": tokens.tolist()} for row, tokens in zip(self.documents, self.tokens, strict=True)]


class Run:
    """A run directory, finished, active or interrupted. What it reads is what the run has written so far."""

    def __init__(self, run_dir: str | PathLike[str]) -> None:
        self.path = Path(run_dir).expanduser()
        self._recipe = require_run(self.path)

    def __repr__(self) -> str:
        return f"<lmworks.Run {self.path}: {', '.join(self.stages) or 'no stage'} done>"

    @property
    def config(self) -> RecipeTree:
        """The recipe that the run was made with, as a typed tree."""
        return self._recipe

    @property
    def stages(self) -> list[str]:
        """The stages that have ended, in order."""
        return [name for name, seconds in seconds_by_stage(self.path).items() if seconds is not None]

    def metrics(self, stage: str = BASE.stage, names: Iterable[str] | None = None) -> Table:
        """What a stage that trains has logged, a row per logged step: `metrics()["train/loss"]`.

        stage: pretrain, tune, dpo or grpo. names: only these columns, besides `step`. Raises `UserError` for another stage, or a metric
        that the stage has not logged.
        """
        from lmworks.metrics.log import read

        found = next((one for one in MODEL_STAGES if one.stage == stage), None)
        if found is None:
            raise UserError(f"{stage!r} has no metrics; take one of {', '.join(one.stage for one in MODEL_STAGES)}")
        steps: dict[int, dict[str, Any]] = {}
        for line in read(found.place(self.path)):  # a loop of one's own logs a validation after the step
            steps.setdefault(line["step"], {}).update(line)
        table = Table.of([*steps.values()], ("step", "time"))
        if names is None:
            return table
        wanted = ["step", *(name for name in names if name != "step")]
        if missing := [name for name in wanted if name not in table]:
            raise UserError(f"{self.path} has logged no {missing[0]} in {stage}; it has logged: {', '.join(table) or 'nothing'}")
        return Table({name: table[name] for name in wanted})

    def events(self) -> list[dict[str, Any]]:
        """The lines of the ledger: starts, phases, checkpoints, bad steps, changed keys."""
        from lmworks.watch.ledger import LEDGER, read_ledger

        return read_ledger(self.path / LEDGER)

    def results(self) -> dict[str, Any]:
        """The evaluation of the run, as in evaluate/results.json. Raises `UserError` if it was not evaluated yet."""
        path = self.path / "evaluate" / "results.json"
        if not path.is_file():
            raise UserError(f"{self.path} has no evaluation; make it with: lmworks evaluate RECIPE")
        found: dict[str, Any] = read_json(path)
        return found

    def batches(self, *more: MixtureOverride) -> Batches:
        """All batches of pretraining by their steps, with the requested mixture changes, and `more`."""
        from lmworks.shards.batches import Batches
        from lmworks.train.data.mixture import read_changes
        from lmworks.watch.batch_growth import read_growths

        return Batches(self._recipe, self.path / "shards", [*read_changes(self.path).all, *more], growths=read_growths(self.path))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run."""
        from lmworks.tokenizer import load

        return load(self.path / "tokenizer")

    def batch(self, step: int) -> StepBatch:
        """The batch of a step of pretraining, from 0, past or future: a function of the step (docs/data-order.md). Raises `UserError` if
        the run has no such step, or no token files."""
        from lmworks.watch.ledger import Skips, rollbacks

        batches = self.batches()
        found = batches.batch(step)
        return StepBatch(
            step, self._recipe.train.phases[found.phase].name, found.tokens, found.labels, batches.documents(step),
            step in Skips(rollbacks(self.events(), BASE.stage)), found, self.tokenizer,
        )  # fmt: skip

    def model(self, which: str | int | None = None, device: str | None = None) -> Model:
        """A model of the run: "base", "tuned", "dpo", "grpo", or the checkpoint of a step of pretraining; by default that of the last
        stage. See `load_model`."""
        from lmworks.api.models import load_model

        return load_model(self.path if which is None else f"{self.path}@{which}", device)


def open_run(run_dir: str | PathLike[str]) -> Run:
    """Open a run directory, finished or not. Raises `UserError` if it is none."""
    return Run(run_dir)
