"""The stages of a run: what each needs, what it makes, and the function that runs it.

The recipe keys that a stage reads are declared beside the keys (`lmworks.recipe.changes`); `lmworks.run.run_dir` decides when a
stage is repeated. If the folder of a stage is deleted, it is made again with the same contents.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from lmworks.errors import UserError
from lmworks.io.run_layout import BASE, INPUTS, MODEL_STAGES
from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer.named import FILES, TEMPLATES

if TYPE_CHECKING:
    from lmworks.corpus.contamination import Decontaminator
    from lmworks.evaluate.protection import Protection
    from lmworks.parallel.mesh import Ranks
    from lmworks.train.stage import TrainingContext
    from lmworks.watch.heartbeat import Heartbeat

STAMP = "stage.json"  # in each stage's folder


@dataclass(frozen=True)
class StageContext:
    """Arguments of a stage: the resolved recipe, the run directory, the command that resumes the run, whether a started run may continue
    with other token files, the folder of the recipe file, and the ranks if this process is one of several."""

    recipe: Recipe
    run_dir: Path
    resume_command: str
    allow_other_data: bool = False
    folder: Path = Path()
    ranks: Ranks | None = None
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True)
class Stage:
    """One stage. Only the stage writes into `folder`. `needs` lists the files of earlier stages that it reads, relative to the run
    directory; `makes` has patterns of its output files. A name that ends in / is a folder of checkpoints and means the newest one.

    resumes: continues in a folder that the same recipe has partly filled; other stages begin with an empty folder.
    keeps: continues in any folder. Corpus and shards compare the inputs of each part, a tokenizer that weights were trained with is kept,
        pretraining refuses changed recipes, so that no checkpoint is deleted without the user's knowledge, and an export replaces the one
        before it when it is verified.
    all_ranks: runs on all ranks; other stages run on the first rank while the others wait.

    What a stage would refuse is looked for before the first one runs: `lmworks.run.refusals`.
    """

    name: str
    folder: str
    needs: tuple[str, ...]
    makes: tuple[str, ...]
    work: Callable[[StageContext], RenderableType | None]
    resumes: bool = False
    keeps: bool = False
    all_ranks: bool = False


def _protected_items(recipe: Recipe) -> Protection:
    """The evaluation items of this recipe, which no training text may contain."""
    from lmworks.evaluate.protection import protection
    from lmworks.ui.terminal import console

    protected = protection(recipe)
    for name, reason in protected.unread.items():
        text = f"the training text cannot be decontaminated against {name}, so its scores will be marked as not clean: {reason}"
        console.print(text, style="yellow")
    return protected


def _record_search(protected: Protection, recipe: Recipe, folder: Path) -> None:
    """Record for which evaluation items the text of a stage's folder was searched. If the stage has trained before, its earlier steps may
    have read text that was searched for fewer items."""
    import numpy as np

    from lmworks.checkpoint import listing
    from lmworks.evaluate.protection import item_hashes, save_searched, searched_items

    options = recipe.corpus.decontaminate
    items = item_hashes(protected.questions if options and options.action != "report" else ())
    has_trained = listing.has_checkpoints(folder / "checkpoints")
    save_searched(folder, np.intersect1d(items, searched_items([folder])) if has_trained else items)


def search_records(run_dir: Path, recipe: Recipe, *stages: str) -> list[Path]:
    """Folders of stages that have such a record; the shards have one only if they contain imported text."""
    folders = {stage.name: run_dir / stage.folder for stage in STAGES}
    return [folders[name] for name in stages if name != "shards" or recipe.shards.imported]


def _corpus(context: StageContext) -> RenderableType | None:
    from lmworks.corpus import prepare, table

    protected = _protected_items(context.recipe)
    report = prepare(context.recipe, context.run_dir / "corpus", protected.questions, context.folder, protected.unread)
    _record_search(protected, context.recipe, context.run_dir / "corpus")
    return table(report)


def _tokenizer(context: StageContext) -> RenderableType | None:
    from lmworks.tokenizer.evaluate import table
    from lmworks.tokenizer.train import train
    from lmworks.weights.frozen_tokenizer import weights_of

    trained = weights_of(context.run_dir)
    report = train(context.recipe, context.run_dir / "corpus", context.run_dir / "tokenizer", trained=trained)
    if context.recipe.has_text:
        return table(report["evaluation"])
    stops = f"; answers end at {' or '.join(report['stop_tokens'])}" if "stop_tokens" in report else ""
    return f"{report['vocab_size']:,} entries, from {report['origin']}{stops}"


def _shards(context: StageContext) -> RenderableType | None:
    from lmworks.shards.build import build_shards

    recipe, run_dir, decontaminator, searched = context.recipe, context.run_dir, None, ""
    if recipe.shards.imported and recipe.corpus.decontaminate:
        protected = _protected_items(recipe)
        decontaminator = protected.decontaminator(recipe.corpus.decontaminate.ngram_words, run_dir / "corpus")
        searched = protected.digest(run_dir / "corpus")
    manifest = build_shards(recipe, run_dir / "corpus", run_dir / "tokenizer", run_dir / "shards", decontaminator, searched)
    if decontaminator is not None:
        _record_search(protected, recipe, run_dir / "shards")
    return f"{sum(manifest.train_tokens().values()):,} training tokens from {len(manifest.sources)} sources"


def training_context(context: StageContext) -> TrainingContext:
    """What a stage of training is given, with what the rooms above it supply."""
    from lmworks.evaluate.in_loop import make_evaluation
    from lmworks.export.peft import read_adapter
    from lmworks.parallel.mesh import alone
    from lmworks.plan.counts import flops_per_token
    from lmworks.run.start_weights import load_start_weights
    from lmworks.train.stage import TrainingContext
    from lmworks.watch.heartbeat import Heartbeat

    recipe, run_dir = context.recipe, context.run_dir
    return TrainingContext(
        recipe, run_dir, context.resume_command, context.ranks or alone(), context.heartbeat or Heartbeat(None), context.allow_other_data,
        lambda model, length, frozen: flops_per_token(model, length, frozen=frozen).total,
        lambda name: _protect(recipe, run_dir / name), load_start_weights, read_adapter, make_evaluation,
    )  # fmt: skip


def _train(context: StageContext, name: str, stage: Callable[[TrainingContext], None]) -> None:
    from lmworks.run.out_of_memory import explain_out_of_memory

    training = training_context(context)
    with explain_out_of_memory(training, name):
        stage(training)


def record_pretraining_text(context: StageContext) -> None:
    """Record for which evaluation items the text of pretraining was searched."""
    from lmworks.evaluate.protection import save_searched, searched_items

    if context.ranks is None or context.ranks.is_first:
        folder = context.run_dir / "checkpoints"
        before = [folder] if any(folder.glob("step-*")) else []  # earlier training text may have been searched for fewer items
        save_searched(folder, searched_items([*search_records(context.run_dir, context.recipe, "corpus", "shards"), *before]))


def _pretrain(context: StageContext) -> None:
    from lmworks.train.pretrain import pretrain
    from lmworks.train.stage import save_start

    record_pretraining_text(context)
    _train(context, "pretrain", pretrain if context.recipe.trains_base else save_start)


def _tune(context: StageContext) -> None:
    from lmworks.train.tune import tune

    _train(context, "tune", tune)


def _dpo(context: StageContext) -> None:
    from lmworks.train.dpo import dpo

    _train(context, "dpo", dpo)


def _grpo(context: StageContext) -> None:
    from lmworks.train.grpo import grpo

    _train(context, "grpo", grpo)


def _protect(recipe: Recipe, folder: Path) -> tuple[set[str], Decontaminator | None]:
    """The evaluation's questions and what finds them in texts; records that the texts of a stage are searched for them."""
    protected = _protected_items(recipe)
    _record_search(protected, recipe, folder)
    options = recipe.corpus.decontaminate
    return {one.text.strip() for one in protected.questions}, protected.decontaminator(options.ngram_words) if options else None


def _evaluate(context: StageContext) -> RenderableType | None:
    from lmworks.evaluate.evaluate import evaluate, start_is_missing
    from lmworks.evaluate.records import START
    from lmworks.evaluate.tables import printable
    from lmworks.run.start_weights import load_start_model
    from lmworks.tokenizer import load as load_tokenizer
    from lmworks.weights.chat import base_is_chat, start_is_chat
    from lmworks.weights.run_models import load_model, stages_of

    tokenizer = load_tokenizer(context.run_dir / "tokenizer")
    results: dict[str, Any] = {}
    trained = stages_of(context.recipe)
    for number, stage in enumerate(trained):
        model = load_model(context.run_dir, stage.model)
        searched = search_records(context.run_dir, context.recipe, *(one.stage for one in trained[: number + 1]))
        folder, chats = context.run_dir / "evaluate", context.run_dir / "tune" / "data"
        chat = stage is not BASE or base_is_chat(context.run_dir, context.recipe)
        results = evaluate(context.recipe, model, tokenizer, context.run_dir / "corpus", folder, stage.model, searched, chats, chat)
        if stage is BASE and context.recipe.start_from is not None and context.recipe.trains_base:
            try:
                model = load_start_model(context.recipe)
            except UserError as error:  # they may have been moved since
                results = start_is_missing(folder, str(error))
            else:
                chat = start_is_chat(context.run_dir)
                results = evaluate(context.recipe, model, tokenizer, context.run_dir / "corpus", folder, START, searched, chats, chat)
    return printable(results)


def _export(context: StageContext) -> RenderableType | None:
    from lmworks.export.export import export

    return export(context.recipe, context.run_dir, context.run_dir / "export")


_CORPUS, _TOKENIZER = "corpus/manifest.json", ("tokenizer/tokenizer.json", "tokenizer/chat_template.jinja")
_WEIGHTS = (*_TOKENIZER, *INPUTS)

STAGES = (
    Stage(
        "corpus", "corpus", (), ("train/**/*.parquet", "validation/**/*.parquet", "manifest.json", "report.json"),
        _corpus, keeps=True,
    ),
    Stage(
        "tokenizer", "tokenizer", (_CORPUS,), (*FILES, f"{TEMPLATES}/*.jinja", "report.json"),
        _tokenizer, keeps=True,
    ),
    Stage(
        "shards", "shards", (_CORPUS, _TOKENIZER[0]), ("train/*", "validation/*", "token_bytes.npy", "manifest.json"), _shards, keeps=True,
    ),
    Stage(
        "pretrain", "checkpoints", (_TOKENIZER[0], "shards/manifest.json"), ("./",), _pretrain, keeps=True, all_ranks=True,
    ),
    Stage("tune", "tune", (_CORPUS, *_TOKENIZER, BASE.input), ("checkpoints/",), _tune, resumes=True, all_ranks=True),
    Stage("dpo", "dpo", (*_TOKENIZER, *(one.input for one in MODEL_STAGES[:2])), ("checkpoints/",), _dpo, resumes=True, all_ranks=True),
    Stage(
        "grpo", "grpo", (*_TOKENIZER, *(one.input for one in MODEL_STAGES[:3])), ("checkpoints/",), _grpo, resumes=True,
        all_ranks=True,
    ),
    Stage("evaluate", "evaluate", (_CORPUS, *_WEIGHTS), ("results.json",), _evaluate),
    Stage(
        "export", "export", ("corpus/report.json", "shards/manifest.json", *_WEIGHTS, "evaluate/results.json"), ("**/*",), _export,
        keeps=True,
    ),
)  # fmt: skip


def stages_for(recipe: Recipe, last: str | None = None) -> list[Stage]:
    """The stages of this recipe, up to and including `last`. Raises `UserError` if it has no such stage."""
    optional = [one.stage for one in MODEL_STAGES[1:] if getattr(recipe, one.stage) is None]
    if not recipe.has_text:
        optional += ["corpus", "shards"]
    chosen = [stage for stage in STAGES if stage.name not in optional]
    names = [stage.name for stage in chosen]
    if last is not None and last not in names:
        raise UserError(f"the recipe has no section {last}; add one to have this stage")
    return chosen if last is None else chosen[: names.index(last) + 1]


def checked_stages(recipe: Recipe, last: str | None = None) -> list[Stage]:
    """The stages of which a run up to `last` looks for refusals: once it trains, all of the recipe, since what it trains would be of no use
    to a later stage that cannot begin."""
    stages = stages_for(recipe, last)
    return stages_for(recipe) if any(stage.name == "pretrain" for stage in stages) else stages


def clear(folder: Path) -> None:
    """Delete what an older recipe or a killed run has left in a stage's folder. The stamp is kept; it marks the folder as ours."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != STAMP:
            path.unlink()
