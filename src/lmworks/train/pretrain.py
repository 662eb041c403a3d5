"""Pretraining: the course through the phases of a recipe, and what it needs around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.files import sha256_file
from lmworks.metrics.log import MetricLog
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.optim.optimizer import Optimizer, build_optimizer
from lmworks.optim.schedules import Schedules
from lmworks.precision import dtype_for
from lmworks.progress import console
from lmworks.recipe.fingerprint import as_tree, fingerprint
from lmworks.recipe.recipe import Recipe
from lmworks.shards.batch import Batch, Batches
from lmworks.shards.manifest import Manifest, check_vocabulary, verify
from lmworks.shards.report import warnings
from lmworks.shards.validation import Validation
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.course import Stage
from lmworks.train.mixture import LEDGER, Follower, read_changes
from lmworks.parallel.rematerialize import checkpoint_activations
from lmworks.train.sampling import Sampler
from lmworks.train.trainer import Trainer
from lmworks.train.validation import validate
from lmworks.watch.finite import BadSteps
from lmworks.watch.ledger import Ledger

_QUICKLY_READ = 1 << 32  # bytes that are hashed in a few seconds
_LEARNING = {
    "preset", "rope", "max_length", "dropout", "attention_dropout", "init_std", "z_loss", "balance", "capacity_factor", "temperature",
    "temperature_steps",
}  # fmt: skip


class Pretraining:
    """The phases as a `Course`."""

    def __init__(self, recipe: Recipe, batches: Batches, ledger: Ledger | None = None) -> None:
        self.batches = batches
        self._follower = Follower(ledger, batches) if ledger else None
        self.timeline = batches.order.timeline
        self.steps, self.tokens = self.timeline.steps, sum(phase.tokens for phase in self.timeline.phases)
        self.stages = stages(recipe, batches)
        self._schedules = Schedules(recipe.train.phases, [phase.steps for phase in self.timeline.phases], self.timeline.tokens_before)

    def batch(self, step: int) -> Batch:
        if self._follower:
            self._follower.follow(step)
        return self.batches.batch(step)

    def rate(self, step: int) -> float:
        return self._schedules.factor(step)

    def stage(self, step: int) -> Stage:
        return self.stages[self.timeline.phase_of(step)]

    def steady_since(self, step: int) -> int:
        return max(self._schedules.warm(step), self.batches.order.mixture_since(step))

    def tokens_before(self, step: int) -> int:
        return self.timeline.tokens_before(step)


def stages(recipe: Recipe, batches: Batches) -> list[Stage]:
    """The phases with what they inherit: positions and balancing rate stay until a phase changes them."""
    rope = recipe.model.rope
    rate = recipe.model.moe.balance.rate if recipe.model.moe else 0.0
    found = []
    for index, phase in enumerate(recipe.train.phases):
        rope = phase.rope.apply(rope) if phase.rope else rope
        rate = rate if phase.balance_rate is None else phase.balance_rate
        found.append(Stage(index, phase.name, batches.order.timeline.first_step(index), int(phase.sequence_length), rope, rate))
    return found


def device_for(recipe: Recipe) -> torch.device:
    """The first GPU if there is one, else the CPU with the recipe's threads."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(recipe.threads or 1)
    return torch.device("cpu")


def build_model(recipe: Recipe) -> Transformer:
    """The model at its start, on its device, with the recipe's precision; weights depend on the seed alone."""
    device = device_for(recipe)
    model = initialize(Transformer(recipe.model), recipe.seed).to(device)
    model.compute_dtype = dtype_for(recipe.train.precision, device)
    model.head_chunk = int(recipe.train.head_chunk)
    checkpoint_activations(model, recipe.train.activation_checkpointing)
    return model


def identity(recipe: Recipe) -> dict[str, object]:
    """What a checkpoint must share with the model that it is loaded into: all that decides what the weights compute.

    Positions may change between phases; how they are learnt (dropout, balancing, losses) may be changed by an allowed resume.
    """
    model = as_tree(recipe.model)
    moe = model["moe"] and {key: value for key, value in model["moe"].items() if key not in _LEARNING}
    return {"model": {key: value for key, value in model.items() if key not in _LEARNING} | {"moe": moe}}


def _size(manifest: Manifest) -> int:
    return sum(size for shard in manifest.shards() for size in shard.size.values())


def held_out(batches: Batches, recipe: Recipe, sequence_length: int, rows: int) -> dict[str, Validation]:
    """The validation batches of each domain, as far as `train.validate_bytes_per_domain` goes."""
    limit = recipe.train.validate_bytes_per_domain
    return {domain: batches.validation(domain, sequence_length, rows, limit) for domain in batches.manifest.domains()}


def pretrain(recipe: Recipe, run_dir: Path, flops_per_token: Callable[[int], float], resume_command: str, other_data: bool = False) -> None:
    """Train from the newest good checkpoint of `run_dir`, or from the start, to the end of the last phase.

    A run that began on other token files is refused, since what it has read and what it will read would no longer add up;
    `other_data` allows it.

    Reads `tokenizer/` and `shards/`; writes `checkpoints/`, `metrics.jsonl`, `samples.jsonl` and lines into `ledger.jsonl`.
    Token files of a few gigabytes are compared with their hashes before the first step; larger ones and those behind a cache block by block
    as they are read.
    Changes of the mixture that the ledger asks for are taken up.
    Raises `Interrupted` when asked to stop, and `UserError`.
    """
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    batches = Batches(recipe, run_dir / "shards", read_changes(run_dir).taken)
    for line in warnings(batches.order, recipe.shards.warn_epochs):
        console.print(f"[yellow]{line}[/yellow]")
    assert recipe.model.vocab_size
    check_vocabulary(batches.manifest, recipe.model.vocab_size, sha256_file(run_dir / "tokenizer" / "tokenizer.json"))
    model = build_model(recipe)
    optimizer: Optimizer = build_optimizer(model, recipe.optimizer)
    lengths = [phase.sequence_length for phase in batches.order.timeline.phases]
    length, tokens = lengths[0], sum(phase.tokens for phase in batches.order.timeline.phases)
    rows = max(1, (recipe.train.micro_batch or 1) * max(lengths) // length)
    data = batches.manifest.digests()
    with (
        Ledger(run_dir / LEDGER) as ledger,
        Checkpoints(
            run_dir / "checkpoints", recipe.checkpoints, identity(recipe), report=ledger.write, total_tokens=tokens
        ) as checkpoints,
    ):
        course = Pretraining(recipe, batches, ledger)
        bad_steps = BadSteps(run_dir / "bad_batches", recipe.stability.max_bad_steps, recipe.stability.save_bad_batches, ledger.write)
        trainer = Trainer(
            recipe, model, optimizer, course, checkpoints, ledger, bad_steps,
            validate=lambda: validate(model, pieces),
            sampler=Sampler(run_dir / "samples.jsonl", tokenizer), flops_per_token=flops_per_token, resume_command=resume_command,
            meta={"recipe": fingerprint(recipe), "order": batches.order.fingerprint(), "shards": data},
        )  # fmt: skip
        first = trainer.resume()
        before = trainer.began_with.get("shards", data)
        if before != data:
            if not other_data and any(data.get(name) != digest for name, digest in before.items()):  # sources that were added are no matter
                raise UserError(
                    f"the token files in {run_dir / 'shards'} are not those that this run began with; put the old text and tokenizer back, "
                    "choose another run_dir, or go on with --allow shards"
                )
            ledger.write("data_changed", step=first, shards=data)
        if not recipe.shards.cache and _size(batches.manifest) <= _QUICKLY_READ:
            verify(run_dir / "shards", batches.manifest)
        pieces = held_out(batches, recipe, length, rows)  # opened only now: files that are cut short are the hashes' to name
        with MetricLog(run_dir, recipe.metrics, resume_step=first + 1) as metrics:
            trainer.run(metrics)
