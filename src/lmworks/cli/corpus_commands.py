"""`lmworks corpus prepare | classifier`: prepare a corpus, with its dry runs; train and evaluate quality classifiers.

`task` is the command that runs one task of the preparation on another machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lmworks.cli import evidence_commands
from lmworks.cli.options import AllowOption, JsonOption, RecipeArgument, SetOption, SizeOption, console, print_json, spread
from lmworks.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table


RunStages = Callable[..., None]


def register_prepare(noun: typer.Typer, run_stages: RunStages) -> None:
    """Add the commands to `lmworks corpus`; `run_stages` brings a run up to date, up to a stage."""

    def prepare(
        recipe: RecipeArgument,
        overrides: SetOption,
        allow: AllowOption,
        size: SizeOption = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the parts, tasks and scripts, and run nothing.")] = False,
        dedup_dry_run: Annotated[
            bool, typer.Option("--dedup-dry-run", help="Print what deduplication would drop, with examples; write nothing.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="With --dedup-dry-run: print JSON.")] = False,
    ) -> None:
        """Prepare the corpus of a recipe: read, clean, filter, deduplicate and decontaminate its sources."""
        if as_json and not dedup_dry_run:
            raise UserError("--json needs --dedup-dry-run; the results of a finished corpus are in its report.json")
        if dedup_dry_run:
            _duplicates(recipe, overrides, size, as_json)
        elif dry_run:
            _preview(recipe, overrides, size)
        else:
            run_stages(recipe, overrides, size, allow, "corpus")

    noun.command()(prepare)
    noun.command(hidden=True)(task)


def _preview(recipe: str, overrides: list[str], size: str | None) -> None:
    from lmworks.corpus.pipeline import preview
    from lmworks.recipe.load import load_recipe

    resolved = load_recipe(recipe, overrides, size, corpus_only=True)
    assert resolved.recipe.run_dir
    for one in preview(resolved.recipe, Path(resolved.recipe.run_dir) / "corpus", resolved.path.parent):
        console().print(one, soft_wrap=True)


def _duplicates(recipe: str, overrides: list[str], size: str | None, as_json: bool) -> None:
    from lmworks.cli.tables import duplicate_tables
    from lmworks.corpus.pipeline import find_duplicates
    from lmworks.recipe.load import load_recipe

    resolved = load_recipe(recipe, overrides, size, corpus_only=True)
    found = find_duplicates(resolved.recipe, resolved.path.parent)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    for one in duplicate_tables(found):
        console().print(one)


def task(
    corpus: Annotated[Path, typer.Argument(metavar="CORPUS", help="Corpus directory of a run with a running job.")],
    name: Annotated[str, typer.Argument(metavar="PASS", help="A pass of the job, such as read.")],
    number: Annotated[int, typer.Argument(metavar="NUMBER", min=0, help="Number of the task.")],
    of: Annotated[int, typer.Option("--of", min=1, help="Run tasks NUMBER, NUMBER + N, NUMBER + 2N and so on.")] = 1_000_000_000,
) -> None:
    """Run some tasks of a corpus job; its executor runs this command on other machines."""
    from lmworks.corpus.engine.slurm_executor import run_tasks

    run_tasks(corpus, name, number, of)


_FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The classifier, such as quality.safetensors.")]


@dataclass
class _Texts:
    """Options that select positive and negative examples, shared by `train` and `evaluate`."""

    labels: Annotated[
        str | None, typer.Option("--labels", metavar="PATH", help="Labeled examples: rows (jsonl, parquet) with a text and a label.")
    ] = None
    good: Annotated[
        str | None, typer.Option("--good", metavar="SOURCE|PATH", help="Positive examples: a reference set of the kind to keep.")
    ] = None
    bad: Annotated[
        str | None, typer.Option("--bad", metavar="SOURCE|PATH", help="Negative examples: texts like those to be filtered.")
    ] = None
    recipe: Annotated[str | None, typer.Option("--recipe", metavar="RECIPE", help="The recipe that defines the named sources.")] = None
    label_key: Annotated[str, typer.Option("--label-key", help="The column with the label or score.")] = "label"
    minimum: Annotated[float | None, typer.Option("--minimum", help="Documents with at least this score are positive examples.")] = None
    text_key: Annotated[str, typer.Option("--text-key", help="The column with the text, in files.")] = "text"
    most: Annotated[int, typer.Option("--most", min=100, help="Maximum number of documents drawn per class.")] = 20_000
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draw.")] = 0

    def read(self) -> tuple[list[str], list[str]]:
        """The positive and the negative examples."""
        from lmworks.corpus.transform.quality_training import labeled, sample
        from lmworks.recipe.load import load_recipe

        if self.labels and not (self.good or self.bad):
            return labeled(self.labels, self.label_key, self.minimum, 2 * self.most, self.seed, self.text_key)
        if self.labels or not (self.good and self.bad):
            raise UserError("give either --labels PATH, or both --good and --bad with a path or (with --recipe) the name of a source")
        found = load_recipe(self.recipe, corpus_only=True).recipe if self.recipe else None
        good, bad = (sample(one, self.most, self.seed, found, self.text_key) for one in (self.good, self.bad))
        return good, bad


def register(noun: typer.Typer) -> None:
    """Add the commands to `lmworks corpus`."""
    classifier = typer.Typer(no_args_is_help=True, help="Quality classifiers, with which the step `quality` scores documents.")
    for command in (train, show, evaluate):
        classifier.command()(spread(command))
    noun.add_typer(classifier, name="classifier")
    evidence_commands.register(noun)


def train(
    file: _FileArgument,
    texts: _Texts,
    method: Annotated[
        Literal["logistic", "contrastive"], typer.Option(help="Logistic regression, or the log-odds of one n-gram model per class.")
    ] = "logistic",
    ngram: Annotated[int, typer.Option(min=1, max=5, help="Largest n-gram, in words.")] = 2,
    bits: Annotated[int, typer.Option(min=10, max=26, help="Number of hashed weights, as a power of two.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Train a classifier on labeled texts, or on positive and negative examples; calibrate it, and evaluate it on held-out documents."""
    from lmworks.corpus.transform.quality_training import train as learn
    from lmworks.io.destinations import require_file

    require_file(file, "FILE")
    made = learn(*texts.read(), method=method, ngram=ngram, bits=bits)
    made.save(file)
    _print(made.report, made.fingerprint, as_json)
    if not as_json:
        console().print(f"wrote {file}; use it with corpus.steps: [{{step: quality, model: {file}, threshold: ...}}]")


def show(file: _FileArgument, as_json: JsonOption = False) -> None:
    """Show the results of a classifier on the documents that were held out from its training."""
    from lmworks.corpus.transform.quality import Classifier

    found = Classifier.load(file)
    _print(found.report, found.fingerprint, as_json)


def evaluate(
    file: _FileArgument,
    texts: _Texts,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a classifier on other texts."""
    import numpy as np

    from lmworks.corpus.transform.quality import Classifier, measure
    from lmworks.corpus.transform.quality_training import score_texts

    found = Classifier.load(file)
    yes, no = texts.read()
    if not yes or not no:
        raise UserError(f"there are {len(yes)} good and {len(no)} bad texts; evaluation needs both")
    figures = measure(score_texts(found, [*yes, *no]), np.repeat([True, False], [len(yes), len(no)]))
    _print({**found.report, "held_out": figures}, found.fingerprint, as_json)


def _print(report: dict[str, Any], fingerprint: str, as_json: bool) -> None:
    if as_json:
        print_json({"fingerprint": fingerprint, **report})
        return
    held = report["held_out"]
    low, high = held["auc_interval"]
    out = console()
    out.print(f"{report['method']}, n-grams up to {report['ngram']}, 2^{report['bits']} weights, fingerprint {fingerprint[:12]}")
    out.print(f"measured on {held['documents']:,} documents, {held['good']:,} of them good (the precision is for that share)")
    calibration = f"calibration error {held['calibration_error']:.3f}, Brier {held['brier']:.4f}"
    out.print(f"AUC {held['auc']:.4f} ({low:.4f} to {high:.4f}), {calibration}")
    out.print(_table(held))


def _table(held: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(box=None)
    for name in ("threshold", "kept", "precision", "95%", "recall", "95%", "bad kept"):
        table.add_column(name, justify="right")
    for row in held["thresholds"]:
        table.add_row(
            f"{row['threshold']:g}",
            f"{row['kept']:.1%}",
            *(text for name in ("precision", "recall") for text in (_share(row[name]), _span(row[f"{name}_interval"]))),
            _share(row["bad_kept"]),
        )
    return table


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _span(interval: list[float] | None) -> str:
    return "" if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}"
