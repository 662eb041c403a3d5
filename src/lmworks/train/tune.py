"""Supervised fine-tuning: the same trainer on conversations, with loss on the assistant's tokens only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.read.tuning_batches import TuningBatches
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.curriculum import TuningCurriculum
from lmworks.train.data.chat import build_chat_data, chat_shards
from lmworks.train.data.decontamination import Protect
from lmworks.train.observe.step_metrics import FlopsPerToken
from lmworks.train.observe.validation import validate_conversations
from lmworks.train.stage import LoadAdapter, Plan, run_stage, start
from lmworks.watch.heartbeat import Heartbeat

REPLAY = "replay"  # under this key a checkpoint's meta has the hashes of the token files that `tune.replay` reads


def tune(
    recipe: Recipe, run_dir: Path, flops_per_token: FlopsPerToken, resume_command: str,
    protect: Protect = lambda: ((), None), ranks: Ranks | None = None, heartbeat: Heartbeat | None = None,
    load_adapter: LoadAdapter | None = None,
) -> None:  # fmt: skip
    """Fine-tune the base model of `run_dir`; the selection biases of the experts stay as pretraining left them.

    Reads `tokenizer/`, `corpus/` (what it holds out is not tuned on) and the newest good checkpoint; writes `tune/`. `protect` is called
    where the conversations are to be made, for what `build_chat_data` keeps out of them. `load_adapter` fills the adapters from the folder
    that `tune.lora.init_from` names. Raises `Interrupted` when asked to stop, and `UserError`.
    """
    options = recipe.tune
    assert options is not None
    data = run_dir / "tune" / "data"
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    ranks = ranks or alone()
    if ranks.is_first and not (data / "manifest.json").exists():
        build_chat_data(recipe, tokenizer, data, run_dir / "corpus", *protect())
    ranks.barrier()
    curriculum = TuningCurriculum(recipe, data)
    held_out = _held_out(recipe, data)
    replayed = {REPLAY: curriculum.replay.digests} if curriculum.replay else {}

    def check_resumed(meta: dict[str, Any]) -> None:
        if meta.get(REPLAY, {}) != replayed.get(REPLAY, {}):
            raise UserError(
                f"the token files in {run_dir / 'shards'} are not those that tuning has replayed so far; put the old text back, or delete "
                f"{data.parent} to tune again"
            )

    def make_plan(model: ParallelModel) -> Plan:
        return Plan(
            curriculum, lambda: validate_conversations(model, held_out) if held_out is not None else {},
            early_stopping=options.early_stopping, use_best=options.keep == "best", meta=replayed, check_resumed=check_resumed,
        )  # fmt: skip

    begun = start(recipe, run_dir, "tune", ranks, options.lora, load_adapter)
    run_stage(
        recipe, run_dir, "tune", begun, make_plan, tokenizer,
        flops_per_token=flops_per_token, resume_command=resume_command, heartbeat=heartbeat,
    )  # fmt: skip


def _held_out(recipe: Recipe, data: Path) -> TuningBatches | None:
    """Four batches of held-out conversations; None if none were held out."""
    assert recipe.tune is not None
    prefixes, weights = chat_shards(data, "validation")
    length, batch = int(recipe.tune.sequence_length), int(recipe.tune.global_batch_size)
    return TuningBatches(prefixes, length, batch, 4 * batch, recipe.seed, weights) if prefixes else None
