"""The stages of a run: what each reads, and the function that does it.

A stage's stamp is a hash of the recipe values it reads, of the stamps of the stages it builds on, and of what those have made. It is
written last, so a stage with the right stamp is whole and need not be done again; delete its folder and it is made again, equal.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from lmworks.errors import UserError
from lmworks.recipe.recipe import Recipe

if TYPE_CHECKING:
    from lmworks.parallel.mesh import Ranks
    from lmworks.watch.heartbeat import Heartbeat


@dataclass(frozen=True)
class Context:
    """What a stage is given: the resolved recipe, where everything lies, the command that goes on after an interruption, whether
    a started run may go on with other token files, the folder of the recipe, and the ranks, if this process is one of several."""

    recipe: Recipe
    run_dir: Path
    resume_command: str
    other_data: bool = False
    folder: Path = Path()
    ranks: Ranks | None = None
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True)
class Stage:
    """`folder` is made by the stage alone; `reads` are recipe paths (a node with all below it, or a pattern of leaves).

    With `files`, what lies at the sources' paths is read, too. A stage that `resumes` goes on in a folder that the same recipe has half
    filled. One that `keeps` goes on in any folder: corpus and shards compare what each part was made from, and before pretraining
    changed recipes are refused, so that no checkpoint is cleared behind the user's back.
    `makes` are patterns of the files in the folder that later stages read: their stamps hold what is in them, not only how it was made.
    What is done by `all_ranks` is so where there are several; the others wait for the first to do the rest.
    `check` raises `UserError` for what the stage could not do, so that it is said before anything is trained.
    """

    name: str
    folder: str
    reads: tuple[str, ...]
    needs: tuple[str, ...]
    work: Callable[[Context], RenderableType | None]
    resumes: bool = False
    keeps: bool = False
    makes: tuple[str, ...] = ()
    files: bool = False
    check: Callable[[Recipe], None] | None = None
    all_ranks: bool = False


def _corpus(context: Context) -> RenderableType | None:
    from lmworks.corpus import prepare, table
    from lmworks.corpus.items import Unavailable
    from lmworks.evaluate import benchmarks, tasks
    from lmworks.progress import console

    wanted = context.recipe.evaluate
    try:
        asked = list(benchmarks.questions(wanted.benchmarks))
    except Unavailable as reason:
        console.print(f"[yellow]not decontaminated against the benchmark sets, which will not be scored either: {reason}[/yellow]")
        asked = []
    asked += tasks.protected(wanted.tasks, wanted.task_items)
    return table(prepare(context.recipe, context.run_dir / "corpus", asked, context.folder))


def _tokenizer(context: Context) -> RenderableType | None:
    from lmworks.tokenizer.evaluate import table
    from lmworks.tokenizer.train import train

    return table(train(context.recipe, context.run_dir / "corpus", context.run_dir / "tokenizer")["evaluation"])


def _shards(context: Context) -> RenderableType | None:
    from lmworks.shards.build import build

    manifest = build(context.recipe, context.run_dir / "corpus", context.run_dir / "tokenizer", context.run_dir / "shards")
    return f"{sum(manifest.train_tokens().values()):,} tokens to train on, from {len(manifest.sources)} sources"


def _flops_per_token(recipe: Recipe) -> Callable[[int], float]:
    """Training operations per token by sequence length, for the share of the peak that a step reaches."""
    from lmworks.plan.flops import per_token

    return lambda length: per_token(recipe.model, length).total


def _pretrain(context: Context) -> RenderableType | None:
    from lmworks.train.pretrain import pretrain

    pretrain(
        context.recipe, context.run_dir, _flops_per_token(context.recipe), context.resume_command, context.other_data,
        context.ranks, context.heartbeat,
    )  # fmt: skip
    return None


def _tune(context: Context) -> RenderableType | None:
    from lmworks.evaluate.tasks import questions
    from lmworks.train.tune import tune

    asked = list(questions(context.recipe.evaluate.tasks, context.recipe.evaluate.task_items))
    tune(
        context.recipe, context.run_dir, _flops_per_token(context.recipe), context.resume_command, asked, context.ranks, context.heartbeat
    )
    return None


def _evaluate(context: Context) -> RenderableType | None:
    from lmworks.evaluate.report import evaluate
    from lmworks.evaluate.tables import printable
    from lmworks.tokenizer import load as load_tokenizer
    from lmworks.train.load import load_model

    tokenizer = load_tokenizer(context.run_dir / "tokenizer")
    results: dict[str, Any] = {}
    for name in ("base", "tuned") if context.recipe.tune else ("base",):
        model = load_model(context.run_dir, name)
        results = evaluate(context.recipe, model, tokenizer, context.run_dir / "corpus", context.run_dir / "evaluate", name)
    return printable(results)


def _export(context: Context) -> RenderableType | None:
    from lmworks.export.export import export

    return export(context.recipe, context.run_dir, context.run_dir / "export")


def _check_evaluate(recipe: Recipe) -> None:
    if recipe.evaluate.benchmarks or recipe.evaluate.tasks:
        from lmworks.evaluate.report import check

        check(recipe)


def _check_export(recipe: Recipe) -> None:
    from lmworks.export.export import check

    check(recipe)


# No more of the phases than it must: the budgets weigh its sample too, but a run whose budget is extended keeps its tokenizer.
_TOKENIZER = ("seed", "tokenizer", "model.max_length", "train.phases.*.mixture.*")
_TRAINING = ("seed", "threads", "model", "optimizer", "train")
_TUNING = ("seed", "tune", "optimizer", "train.precision", "train.micro_batch", "train.compile", "evaluate.tasks", "evaluate.task_items")

STAGES = (
    Stage("corpus", "corpus", ("seed", "corpus", "evaluate.benchmarks"), (), _corpus, keeps=True, makes=("manifest.json",), files=True),
    Stage("tokenizer", "tokenizer", _TOKENIZER, ("corpus",), _tokenizer, makes=("tokenizer.json", "chat_template.jinja")),
    Stage("shards", "shards", ("seed", "shards"), ("corpus", "tokenizer"), _shards, keeps=True, makes=("manifest.json",)),
    Stage("pretrain", "checkpoints", _TRAINING, ("shards",), _pretrain, keeps=True, all_ranks=True),
    Stage("tune", "tune", _TUNING, ("corpus", "pretrain"), _tune, resumes=True, all_ranks=True),
    Stage("evaluate", "evaluate", ("evaluate",), ("pretrain", "tune"), _evaluate, check=_check_evaluate),
    Stage("export", "export", ("export",), ("pretrain", "tune", "evaluate"), _export, check=_check_export),
)


def stages_for(recipe: Recipe, last: str | None = None) -> list[Stage]:
    """The stages that this recipe has, up to and with `last`; `UserError` if it has no such stage."""
    chosen = [stage for stage in STAGES if stage.name != "tune" or recipe.tune is not None]
    names = [stage.name for stage in chosen]
    if last is not None and last not in names:
        raise UserError(f"the recipe has no section {last}; add one to have this stage")
    return chosen if last is None else chosen[: names.index(last) + 1]


def clear(folder: Path) -> None:
    """Remove what an older recipe, or a killed try, has left."""
    if folder.is_dir():
        shutil.rmtree(folder)
