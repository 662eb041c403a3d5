"""Pretraining: the phases of a recipe over its token files, from random weights or from those of `start_from`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lmworks.errors import UserError
from lmworks.io.run_layout import BASE
from lmworks.metrics.system import reset_memory_peak
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Duration
from lmworks.shards.batches import Batches
from lmworks.shards.manifest import Manifest, check_vocabulary, verify
from lmworks.shards.order import epoch_warnings
from lmworks.shards.validation import Validation
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.curriculum import PretrainingCurriculum
from lmworks.train.data.mixture import read_changes
from lmworks.train.observe.long_context import LongContextEvaluator
from lmworks.train.stage import StageSetup, TrainingContext, open_trainer, random_or_start_weights
from lmworks.train.trainer import Trainer
from lmworks.train.validation import validate
from lmworks.ui.terminal import console
from lmworks.watch.batch_growth import read_growths
from lmworks.weights.frozen_tokenizer import META, digest, require_same

_QUICKLY_READ = 1 << 32  # bytes that are hashed in a few seconds


def pretrain(context: TrainingContext) -> None:
    """Train from the newest good checkpoint of the run, or from the start, to the end of the last phase.

    Reads `tokenizer/` and `shards/`; writes `checkpoints/`, `metrics.jsonl`, `samples.jsonl` and lines into `ledger.jsonl`. A run that
    began with other token files is refused, since what it has read and what it will read would no longer add up, unless
    `context.allow_other_data` is set; added sources are allowed. Token files of a few gigabytes are compared with their hashes before the
    first step; larger ones and those behind a cache block by block as they are read. Changes of the mixture that the ledger requests are
    applied.

    Raises `Interrupted` when asked to stop, and `UserError`.
    """
    with open_pretraining(context) as trainer:
        context.run(trainer)


@contextmanager
def open_pretraining(context: TrainingContext) -> Iterator[Trainer]:
    """The trainer of `pretrain`, resumed from the newest good checkpoint, with its files."""
    recipe, run_dir, ranks = context.recipe, context.run_dir, context.ranks
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    batches = Batches(recipe, run_dir / "shards", read_changes(run_dir).order, growths=read_growths(run_dir))
    for line in epoch_warnings(batches.order, recipe.shards.warn_epochs):
        console.print(line, style="yellow")
    assert recipe.model.vocab_size
    tokenizer_sha256, hashes = digest(run_dir), batches.manifest.digests()
    check_vocabulary(batches.manifest, recipe.model.vocab_size, tokenizer_sha256)
    reset_memory_peak()

    def setup(model: ParallelModel) -> StageSetup:
        lengths = [phase.sequence_length for phase in batches.order.timeline.phases]
        rows = max(1, (recipe.train.micro_batch_sequences or 1) * max(lengths) // lengths[0])
        curriculum, long_context = PretrainingCurriculum(recipe, batches), LongContextEvaluator(batches, recipe, tokenizer)
        text: dict[str, Validation] = {}
        in_loop = None
        if context.make_evaluation is not None and isinstance(recipe.evaluate.every, Duration):
            in_loop = context.make_evaluation(recipe, tokenizer, lengths[0], rows, ranks)

        def prepare(trainer: Trainer) -> None:
            require_same(run_dir, trainer.resumed_meta.get(META))
            _require_same_data(context, trainer, hashes)
            if not recipe.shards.cache and _size(batches.manifest) <= _QUICKLY_READ:
                ranks.first(lambda: verify(run_dir / "shards", batches.manifest))
            text.update(held_out(batches, recipe, lengths[0], rows))  # opened only now: truncated files are reported by hash

        return StageSetup(
            curriculum, lambda step: validate(model, text) | long_context.evaluate(model, curriculum.phase(max(step, 1) - 1)),
            early_stopping=recipe.train.early_stopping, evaluate=None if in_loop is None else lambda: in_loop(model), batches=batches,
            meta={"order": batches.order.fingerprint(), "shards": hashes}, prepare=prepare,
        )  # fmt: skip

    with open_trainer(context, BASE, random_or_start_weights(context), setup, tokenizer) as trainer:
        yield trainer


def held_out(batches: Batches, recipe: Recipe, sequence_length: int, rows: int) -> dict[str, Validation]:
    """The validation batches of each domain, up to `train.validation_bytes_per_domain`."""
    limit = recipe.train.validation_bytes_per_domain
    return {domain: batches.validation(domain, sequence_length, rows, limit) for domain in batches.manifest.domains()}


def _require_same_data(context: TrainingContext, trainer: Trainer, hashes: dict[str, str]) -> None:
    """Raise `UserError` if the run has trained on other token files, unless that is allowed. A change is recorded in the ledger."""
    before = trainer.resumed_meta.get("shards", hashes)
    if before == hashes:
        return
    if not context.allow_other_data and any(hashes.get(name) != digest for name, digest in before.items()):
        raise UserError(
            f"the token files in {context.run_dir / 'shards'} are not those that this run began with; put the old text back, "
            "choose another run_dir, or continue with --allow shards"
        )
    trainer.files.ledger.write("data_changed", step=trainer.saved, shards=hashes)


def _size(manifest: Manifest) -> int:
    return sum(size for shard in manifest.shards() for size in shard.size.values())
