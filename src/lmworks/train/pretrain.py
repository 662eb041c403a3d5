"""Pretraining: the curriculum through the phases of a recipe, and what it needs around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lmworks.checkpoint import listing
from lmworks.checkpoint.communicator import Communicator, world_communicator
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE
from lmworks.metrics.system import reset_memory_peak
from lmworks.optim.optimizer import Updates, build_optimizer
from lmworks.parallel.mesh import Ranks, alone, own_device
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.parallel.process_group import is_launched
from lmworks.recipe.changes import as_tree, fingerprint, not_architecture
from lmworks.recipe.schema.model import Lora, Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Duration
from lmworks.shards.batches import Batches
from lmworks.shards.manifest import Manifest, check_vocabulary, verify
from lmworks.shards.order import epoch_warnings
from lmworks.shards.validation import Validation
from lmworks.tokenizer import load as load_tokenizer
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.curriculum import PretrainingCurriculum
from lmworks.train.data.frozen_tokenizer import META, digest, require_same
from lmworks.train.data.mixture import MixtureUpdates, read_changes
from lmworks.train.observe.long_context import LongContextEvaluator
from lmworks.train.observe.sampling import Sampler, prompts
from lmworks.train.observe.step_metrics import FlopsPerToken
from lmworks.train.saving import open_stage
from lmworks.train.trainer import Trainer
from lmworks.train.validation import validate
from lmworks.ui.terminal import console
from lmworks.watch.heartbeat import Heartbeat

START_FROM = "start_from"  # under this key a checkpoint's meta says which weights its run began with
_QUICKLY_READ = 1 << 32  # bytes that are hashed in a few seconds


def device_for(recipe: Recipe) -> torch.device:
    """This rank's, where it is a CPU with the recipe's threads unless other ranks share it."""
    device = own_device()
    if device.type == "cpu" and not is_launched():
        torch.set_num_threads(recipe.threads or 1)
    return device


def build_model(recipe: Recipe, ranks: Ranks | None = None, lora: Lora | None = None) -> ParallelModel:
    """The model at its start, this rank's parts of it, on its device; weights depend on the seed alone. With `lora` it is frozen and has
    adapters."""
    ranks = ranks or alone()
    device = device_for(recipe)
    if recipe.train.deepspeed is not None:
        device = torch.device("cpu")  # from where DeepSpeed fetches it
    return ParallelModel(build(recipe, ranks, device, lora), ranks)


def with_optimizer(recipe: Recipe, model: ParallelModel) -> tuple[ParallelModel, Updates]:
    """The model and what updates it: our optimizer, or DeepSpeed, which takes the model over."""
    if recipe.train.deepspeed is None:
        # Adapters are not averaged: they start from 0, and few of the base model's steps are left.
        options = recipe.optimizer.model_copy(update={"ema_decay": 0.0}) if model.has_adapters else recipe.optimizer
        return model, build_optimizer(model, options, recipe.model.num_hidden_layers, model.ranks.process_groups())
    from lmworks.parallel.zero_offload import ZeroModel

    taken = ZeroModel(model.parts[0], model.ranks, recipe)
    return taken, taken.optimizer()


def identity(recipe: Recipe) -> dict[str, object]:
    """What a checkpoint must share with the model that it is loaded into: all that decides what the weights compute.

    Positions may change between phases; how weights are trained (dropout, balancing, losses) may be changed by an allowed resume.
    """
    model, others = as_tree(recipe.model), {"rope", *not_architecture(Model)}
    moe = model["moe"] and {key: value for key, value in model["moe"].items() if f"moe.{key}" not in others}
    mtp = model["mtp"] and {"num_nextn_predict_layers": model["mtp"]["num_nextn_predict_layers"]}
    return {"model": {key: value for key, value in model.items() if key not in others} | {"moe": moe, "mtp": mtp}}


def _size(manifest: Manifest) -> int:
    return sum(size for shard in manifest.shards() for size in shard.size.values())


def held_out(batches: Batches, recipe: Recipe, sequence_length: int, rows: int) -> dict[str, Validation]:
    """The validation batches of each domain, as long_context as `train.validate_bytes_per_domain` goes."""
    limit = recipe.train.validate_bytes_per_domain
    return {domain: batches.validation(domain, sequence_length, rows, limit) for domain in batches.manifest.domains()}


def pretrain(
    recipe: Recipe, run_dir: Path, flops_per_token: FlopsPerToken, resume_command: str, other_data: bool = False,
    ranks: Ranks | None = None, heartbeat: Heartbeat | None = None,
    load_start: Callable[[Recipe, ParallelModel, Communicator], dict[str, Any]] | None = None,
    make_evaluation: Callable[[Recipe, Tokenizer, int, int, Ranks], Callable[[ParallelModel], dict[str, float]] | None] | None = None,
) -> None:  # fmt: skip
    """Train from the newest good checkpoint of `run_dir`, or from the start, to the end of the last phase.

    A run that began on other token files is refused, since what it has read and what it will read would no longer add up;
    `other_data` allows it.

    Reads `tokenizer/` and `shards/`; writes `checkpoints/`, `metrics.jsonl`, `samples.jsonl` and lines into `ledger.jsonl`.
    Token files of a few gigabytes are compared with their hashes before the first step; larger ones and those behind a cache block by block
    as they are read.
    Changes of the mixture that the ledger asks for are taken up. `load_start` fills the model with the weights that `start_from`
    names, where nothing has been saved yet, and says what they were. `make_evaluation` prepares what is evaluated every `evaluate.every`,
    in batches of so many rows of so many tokens.
    Raises `Interrupted` when asked to stop, and `UserError`.
    """
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    batches = Batches(recipe, run_dir / "shards", read_changes(run_dir).applied)
    for line in epoch_warnings(batches.order, recipe.shards.warn_epochs):
        console.print(line, style="yellow")
    assert recipe.model.vocab_size
    tokenizer_sha256 = digest(run_dir)
    check_vocabulary(batches.manifest, recipe.model.vocab_size, tokenizer_sha256)
    ranks = ranks or alone()
    reset_memory_peak()
    built, began_with = build_model(recipe, ranks), {}
    if recipe.start_from is not None:
        assert load_start is not None
        communicator = world_communicator()
        if not communicator.broadcast(communicator.is_first and listing.has_checkpoints(run_dir / "checkpoints")):
            began_with = {START_FROM: load_start(recipe, built, communicator)}
    model, optimizer = with_optimizer(recipe, built)
    lengths = [phase.sequence_length for phase in batches.order.timeline.phases]
    length, tokens = lengths[0], sum(phase.tokens for phase in batches.order.timeline.phases)
    rows = max(1, (recipe.train.micro_batch_size or 1) * max(lengths) // length)
    data = batches.manifest.digests()
    with open_stage(
        recipe, run_dir, BASE, ranks, identity(recipe), tokens,
        lambda path: Sampler(path, tokenizer, prompts(recipe, run_dir / "corpus")),
    ) as files:  # fmt: skip
        long_context = LongContextEvaluator(batches, recipe, tokenizer)
        curriculum = PretrainingCurriculum(recipe, batches)
        wanted = make_evaluation is not None and isinstance(recipe.evaluate.every, Duration)
        evaluation = make_evaluation(recipe, tokenizer, length, rows, ranks) if make_evaluation and wanted else None
        trainer = Trainer(
            recipe, model, optimizer, curriculum, files,
            validate=lambda: validate(model, pieces) | long_context.evaluate(model, curriculum.phase(max(trainer.step, 1) - 1)),
            flops_per_token=flops_per_token, resume_command=resume_command,
            heartbeat=heartbeat or Heartbeat(None), mixture=MixtureUpdates(files.ledger, batches, ranks),
            early_stopping=recipe.train.early_stopping, evaluate=None if evaluation is None else lambda: evaluation(model),
            meta={"recipe": fingerprint(recipe), "order": batches.order.fingerprint(), "shards": data, META: tokenizer_sha256} | began_with,
        )  # fmt: skip
        first = trainer.resume()
        if recipe.start_from is not None and not began_with:
            if START_FROM not in trainer.resumed_meta:
                raise UserError(
                    f"the checkpoints in {run_dir / 'checkpoints'} did not begin with the weights of start_from; take that folder "
                    "away to begin with them, or leave start_from out"
                )
            trainer.meta[START_FROM] = trainer.resumed_meta[START_FROM]
        require_same(run_dir, trainer.resumed_meta.get(META))
        before = trainer.resumed_meta.get("shards", data)
        if before != data:
            if not other_data and any(data.get(name) != digest for name, digest in before.items()):  # sources that were added are no matter
                raise UserError(
                    f"the token files in {run_dir / 'shards'} are not those that this run began with; put the old text back, "
                    "choose another run_dir, or continue with --allow shards"
                )
            files.ledger.write("data_changed", step=first, shards=data)
        if ranks.is_first and not recipe.shards.cache and _size(batches.manifest) <= _QUICKLY_READ:
            verify(run_dir / "shards", batches.manifest)
        pieces = held_out(batches, recipe, length, rows)  # opened only now: files that are cut short are the hashes' to name
        trainer.run()
