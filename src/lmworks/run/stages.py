"""The stages of a run: what each needs and makes, and the function that does it.

Which stages read a key is declared beside the key (`lmworks.recipe.tree.effects`); when a stage is done again, `lmworks.run.stale`
decides. Delete a stage's folder and it is made again, equal.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from lmworks.corpus.contamination import Decontaminator
    from lmworks.evaluate.protection import Protection
    from lmworks.parallel.mesh import Ranks
    from lmworks.watch.heartbeat import Heartbeat

STAMP = "stage.json"  # in each stage's folder


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
    """`folder` is made by the stage alone. `needs` are the files of earlier stages whose contents it reads, below the run directory, and
    `makes` patterns of the files in its folder that others read; a name that ends in / is a folder of checkpoints, and means the newest.

    A stage that `resumes` goes on in a folder that the same recipe has half filled. One that `keeps` goes on in any folder: corpus and
    shards compare what each part was made from, a tokenizer that weights were trained with stays, and before pretraining changed recipes
    are refused, so that no checkpoint is cleared behind the user's back.
    What is done by `all_ranks` is so where there are several; the others wait for the first to do the rest.
    `check` raises `UserError` for what the stage could not do, so that it is said before anything is trained.
    """

    name: str
    folder: str
    needs: tuple[str, ...]
    makes: tuple[str, ...]
    work: Callable[[Context], RenderableType | None]
    resumes: bool = False
    keeps: bool = False
    check: Callable[[Recipe], None] | None = None
    all_ranks: bool = False


def _asked(recipe: Recipe) -> Protection:
    """What an evaluation of this recipe will ask: the one answer to what may not be in any text that is trained on."""
    from lmworks.evaluate.protection import protection
    from lmworks.progress import console

    asked = protection(recipe)
    for name, reason in asked.unread.items():
        text = f"{name} cannot be kept out of the training text, so that scores on it will be marked as not clean: {reason}"
        console.print(text, style="yellow")
    return asked


def _searched(asked: Protection, recipe: Recipe, folder: Path) -> None:
    """Write down that the text of a stage's folder was searched for what is asked."""
    from lmworks.corpus.contamination import record

    gate = recipe.corpus.decontaminate
    record.save(folder, record.hashes(asked.questions if gate and gate.action != "report" else ()))


def _searched_of(context: Context, *stages: str) -> list[Path]:
    """The folders of stages with such a record; that of the shards counts where they have imported text."""
    folders = {stage.name: context.run_dir / stage.folder for stage in STAGES}
    return [folders[name] for name in stages if name != "shards" or context.recipe.shards.imported]


def _corpus(context: Context) -> RenderableType | None:
    from lmworks.corpus import prepare, table

    asked = _asked(context.recipe)
    report = prepare(context.recipe, context.run_dir / "corpus", asked.questions, context.folder, asked.unread)
    _searched(asked, context.recipe, context.run_dir / "corpus")
    return table(report)


def _tokenizer(context: Context) -> RenderableType | None:
    from lmworks.tokenizer.evaluate import table
    from lmworks.tokenizer.train import train
    from lmworks.train.data.frozen_tokenizer import weights_of

    trained = weights_of(context.run_dir)
    return table(train(context.recipe, context.run_dir / "corpus", context.run_dir / "tokenizer", trained=trained)["evaluation"])


def _shards(context: Context) -> RenderableType | None:
    from lmworks.shards.build.build_shards import build_shards

    recipe, run_dir, gate, searched = context.recipe, context.run_dir, None, ""
    if recipe.shards.imported and recipe.corpus.decontaminate:
        asked = _asked(recipe)
        gate = asked.gate(recipe.corpus.decontaminate.ngram, run_dir / "corpus")
        searched = asked.digest(run_dir / "corpus")
    manifest = build_shards(recipe, run_dir / "corpus", run_dir / "tokenizer", run_dir / "shards", gate, searched)
    if gate is not None:
        _searched(asked, recipe, run_dir / "shards")
    return f"{sum(manifest.train_tokens().values()):,} tokens to train on, from {len(manifest.sources)} sources"


def _flops_per_token(recipe: Recipe) -> Callable[[int], float]:
    """Training operations per token by sequence length, for the share of the peak that a step reaches."""
    from lmworks.plan.flops import flops_per_token

    return lambda length: flops_per_token(recipe.model, length).total


def _pretrain(context: Context) -> RenderableType | None:
    from lmworks.corpus.contamination import record
    from lmworks.run.start import load_start
    from lmworks.train.pretrain import pretrain

    if context.ranks is None or context.ranks.is_first:
        folder = context.run_dir / "checkpoints"
        before = [folder] if any(folder.glob("step-*")) else []  # what was trained on then may have been searched for less
        record.save(folder, record.of_all([*_searched_of(context, "corpus", "shards"), *before]))
    pretrain(
        context.recipe, context.run_dir, _flops_per_token(context.recipe), context.resume_command, context.other_data,
        context.ranks, context.heartbeat, load_start,
    )  # fmt: skip
    return None


def _tune(context: Context) -> RenderableType | None:
    from lmworks.train.tune import tune

    recipe = context.recipe

    def protect() -> tuple[set[str], Decontaminator | None]:
        asked = _asked(recipe)
        _searched(asked, recipe, context.run_dir / "tune")
        gate = recipe.corpus.decontaminate
        return {one.text.strip() for one in asked.questions}, asked.gate(gate.ngram) if gate else None

    tune(recipe, context.run_dir, _flops_per_token(recipe), context.resume_command, protect, context.ranks, context.heartbeat)
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
        searched = _searched_of(context, "pretrain", *(("tune",) if name == "tuned" else ()))
        results = evaluate(context.recipe, model, tokenizer, context.run_dir / "corpus", context.run_dir / "evaluate", name, searched)
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


_CORPUS, _TOKENIZER = "corpus/manifest.json", ("tokenizer/tokenizer.json", "tokenizer/chat_template.jinja")
_BASE, _TUNED = "checkpoints/", "tune/checkpoints/"
_WEIGHTS = (*_TOKENIZER, _BASE, _TUNED)

STAGES = (
    Stage(
        "corpus", "corpus", (), ("train/**/*.parquet", "validation/**/*.parquet", "manifest.json", "report.json"),
        _corpus, keeps=True,
    ),
    Stage(
        "tokenizer", "tokenizer", (_CORPUS,), ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "report.json"),
        _tokenizer, keeps=True,
    ),
    Stage(
        "shards", "shards", (_CORPUS, _TOKENIZER[0]), ("train/*", "validation/*", "token_bytes.npy", "manifest.json"), _shards, keeps=True,
    ),
    Stage("pretrain", "checkpoints", (_TOKENIZER[0], "shards/manifest.json"), ("./",), _pretrain, keeps=True, all_ranks=True),
    Stage("tune", "tune", (_CORPUS, *_TOKENIZER, _BASE), ("checkpoints/",), _tune, resumes=True, all_ranks=True),
    Stage("evaluate", "evaluate", (_CORPUS, *_WEIGHTS), ("results.json",), _evaluate, check=_check_evaluate),
    Stage(
        "export", "export", ("corpus/report.json", "shards/manifest.json", *_WEIGHTS, "evaluate/results.json"), ("**/*",), _export,
        check=_check_export,
    ),
)  # fmt: skip


def stages_for(recipe: Recipe, last: str | None = None) -> list[Stage]:
    """The stages that this recipe has, up to and with `last`; `UserError` if it has no such stage."""
    chosen = [stage for stage in STAGES if stage.name != "tune" or recipe.tune is not None]
    names = [stage.name for stage in chosen]
    if last is not None and last not in names:
        raise UserError(f"the recipe has no section {last}; add one to have this stage")
    return chosen if last is None else chosen[: names.index(last) + 1]


def clear(folder: Path) -> None:
    """Empty a stage's folder of what an older recipe, or a killed try, has left. What says that the folder is ours stays."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != STAMP:
            path.unlink()
