"""Supervised fine-tuning: conversations, with loss on the assistant's tokens only."""

from __future__ import annotations

from pathlib import Path

from lmworks.errors import UserError
from lmworks.io.run_layout import of_stage
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.validation import TuningBatches
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.curriculum import TuningCurriculum
from lmworks.train.data.chat import build_chat_data, chat_shards
from lmworks.train.stage import StageSetup, TrainingContext, run_stage, weights_before
from lmworks.train.trainer import Trainer
from lmworks.train.validation import validate_conversations

REPLAY = "replay"  # under this key a checkpoint's meta has the hashes of the token files that `tune.replay` reads


def tune(context: TrainingContext) -> None:
    """Fine-tune the base model of a run; the selection biases of the experts stay as pretraining left them.

    Reads `tokenizer/`, `corpus/` (what it holds out is not tuned on) and the newest good checkpoint; writes `tune/`. Raises `Interrupted`
    when asked to stop, and `UserError`.
    """
    recipe, run_dir, stage = context.recipe, context.run_dir, of_stage("tune")
    options = recipe.tune
    assert options is not None
    data = run_dir / "tune" / "data"
    tokenizer = load_tokenizer(run_dir / "tokenizer")

    def make_data() -> None:
        if not (data / "manifest.json").exists():
            build_chat_data(recipe, tokenizer, data, run_dir / "corpus", *context.protect("tune"))

    context.ranks.first(make_data)
    curriculum, held_out = TuningCurriculum(recipe, data), held_out_conversations(recipe, data)
    replayed = {REPLAY: curriculum.replay.digests} if curriculum.replay else {}

    def prepare(trainer: Trainer) -> None:
        if trainer.saved and trainer.resumed_meta.get(REPLAY, {}) != replayed.get(REPLAY, {}):
            raise UserError(
                f"the token files in {run_dir / 'shards'} are not those that tuning has replayed so far; put the old text back, or delete "
                f"{data.parent} to tune again"
            )

    def setup(model: ParallelModel) -> StageSetup:
        return StageSetup(
            curriculum, lambda step: validate_conversations(model, held_out) if held_out is not None else {},
            early_stopping=options.early_stopping, use_best=options.final_weights == "best", meta=replayed, prepare=prepare,
        )  # fmt: skip

    run_stage(context, stage, weights_before(context, stage, options.lora), setup, tokenizer)


def held_out_conversations(recipe: Recipe, data: Path) -> TuningBatches | None:
    """Four batches of held-out conversations; None if none were held out."""
    assert recipe.tune is not None
    prefixes, weights = chat_shards(data, "validation")
    length, batch = int(recipe.tune.sequence_length), int(recipe.tune.global_batch_tokens)
    return TuningBatches(prefixes, length, batch, 4 * batch, recipe.seed, weights) if prefixes else None
