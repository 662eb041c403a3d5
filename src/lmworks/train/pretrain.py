"""Pretraining: the course through the phases of a recipe, and what it needs around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.metrics.log import MetricLog, NoMetrics
from lmworks.optim.optimizer import Updates, build_optimizer
from lmworks.optim.schedules import Schedules
from lmworks.parallel.mesh import Ranks, alone, own_device
from lmworks.parallel.model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.parallel.start import launched
from lmworks.progress import console
from lmworks.recipe.fingerprint import as_tree, fingerprint
from lmworks.recipe.recipe import Recipe
from lmworks.shards.batch import Batch, Batches
from lmworks.shards.manifest import Manifest, check_vocabulary, verify
from lmworks.shards.report import warnings
from lmworks.shards.validation import Validation
from lmworks.tokenizer import load as load_tokenizer
from lmworks.train.course import Stage
from lmworks.train.far import Far
from lmworks.train.mixture import LEDGER, Follower, read_changes
from lmworks.train.prompts import prompts
from lmworks.train.sampling import Sampler
from lmworks.train.tokenizer import META, digest, require_same
from lmworks.train.trainer import Trainer
from lmworks.train.validation import validate
from lmworks.watch.finite import BadSteps
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import Ledger, NoLedger

_QUICKLY_READ = 1 << 32  # bytes that are hashed in a few seconds
_LEARNING = {
    "preset", "rope", "max_length", "dropout", "attention_dropout", "init_std", "z_loss", "balance", "capacity_factor", "temperature",
    "temperature_steps",
}  # fmt: skip


class Pretraining:
    """The phases as a `Course`."""

    def __init__(self, recipe: Recipe, batches: Batches) -> None:
        self.batches = batches
        self.timeline = batches.order.timeline
        self.steps, self.tokens = self.timeline.steps, sum(phase.tokens for phase in self.timeline.phases)
        self.stages = stages(recipe, batches)
        self._schedules = Schedules(recipe.train.phases, [phase.steps for phase in self.timeline.phases], self.timeline.tokens_before)

    def rows(self, step: int) -> int:
        return self.batches.order.sequences(step)[1]

    def batch(self, step: int, start: int, stop: int) -> Batch:
        return self.batches.batch(step, start, stop)

    def rate(self, step: int) -> float:
        return self._schedules.factor(step)

    def stage(self, step: int) -> Stage:
        return self.stages[self.timeline.phase_of(step)]

    def steady_since(self, step: int) -> int:
        return max(self._schedules.warm(step), self.batches.order.mixture_since(step))

    def tokens_before(self, step: int) -> int:
        return self.timeline.tokens_before(step)


def stages(recipe: Recipe, batches: Batches) -> list[Stage]:
    """The phases with what they inherit: positions, balancing rate and the weight of what lies ahead stay until a phase changes them."""
    rope = recipe.model.rope
    rate = recipe.model.moe.balance.rate if recipe.model.moe else 0.0
    weight = recipe.model.mtp.weight if recipe.model.mtp else None
    found = []
    for index, phase in enumerate(recipe.train.phases):
        weight = phase.mtp_weight or weight
        rope = phase.rope.apply(rope) if phase.rope else rope
        rate = rate if phase.balance_rate is None else phase.balance_rate
        first = batches.order.timeline.first_step(index)
        found.append(Stage(index, phase.name, first, int(phase.sequence_length), rope, rate, weight))
    return found


def device_for(recipe: Recipe) -> torch.device:
    """This rank's, where it is a CPU with the recipe's threads unless other ranks share it."""
    device = own_device()
    if device.type == "cpu" and not launched():
        torch.set_num_threads(recipe.threads or 1)
    return device


def build_model(recipe: Recipe, ranks: Ranks | None = None) -> ParallelModel:
    """The model at its start, this rank's parts of it, on its device; weights depend on the seed alone."""
    ranks = ranks or alone()
    device = device_for(recipe)
    if recipe.train.deepspeed is not None:
        device = torch.device("cpu")  # from where DeepSpeed fetches it
    return ParallelModel(build(recipe, ranks, device), ranks)


def with_optimizer(recipe: Recipe, model: ParallelModel) -> tuple[ParallelModel, Updates]:
    """The model and what updates it: our optimizer, or DeepSpeed, which takes the model over."""
    if recipe.train.deepspeed is None:
        return model, build_optimizer(model, recipe.optimizer, recipe.model.layers, model.ranks.groups())
    from lmworks.parallel.zero_offload import ZeroModel

    taken = ZeroModel(model.parts[0], model.ranks, recipe)
    return taken, taken.optimizer()


def identity(recipe: Recipe) -> dict[str, object]:
    """What a checkpoint must share with the model that it is loaded into: all that decides what the weights compute.

    Positions may change between phases; how they are learnt (dropout, balancing, losses) may be changed by an allowed resume.
    """
    model = as_tree(recipe.model)
    moe = model["moe"] and {key: value for key, value in model["moe"].items() if key not in _LEARNING}
    mtp = model["mtp"] and {"layers": model["mtp"]["layers"]}
    return {"model": {key: value for key, value in model.items() if key not in _LEARNING} | {"moe": moe, "mtp": mtp}}


def _size(manifest: Manifest) -> int:
    return sum(size for shard in manifest.shards() for size in shard.size.values())


def held_out(batches: Batches, recipe: Recipe, sequence_length: int, rows: int) -> dict[str, Validation]:
    """The validation batches of each domain, as far as `train.validate_bytes_per_domain` goes."""
    limit = recipe.train.validate_bytes_per_domain
    return {domain: batches.validation(domain, sequence_length, rows, limit) for domain in batches.manifest.domains()}


def pretrain(
    recipe: Recipe, run_dir: Path, flops_per_token: Callable[[int], float], resume_command: str, other_data: bool = False,
    ranks: Ranks | None = None, heartbeat: Heartbeat | None = None,
) -> None:  # fmt: skip
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
        console.print(line, style="yellow")
    assert recipe.model.vocab_size
    tokenizer_sha256 = digest(run_dir)
    check_vocabulary(batches.manifest, recipe.model.vocab_size, tokenizer_sha256)
    ranks = ranks or alone()
    first_rank = ranks.is_first
    model, optimizer = with_optimizer(recipe, build_model(recipe, ranks))
    lengths = [phase.sequence_length for phase in batches.order.timeline.phases]
    length, tokens = lengths[0], sum(phase.tokens for phase in batches.order.timeline.phases)
    rows = max(1, (recipe.train.micro_batch or 1) * max(lengths) // length)
    data = batches.manifest.digests()
    with (
        Ledger(run_dir / LEDGER) if first_rank else NoLedger() as ledger,
        Checkpoints(
            run_dir / "checkpoints", recipe.checkpoints, identity(recipe), report=ledger.write, total_tokens=tokens
        ) as checkpoints,
    ):
        far = Far(batches, recipe, tokenizer)
        course = Pretraining(recipe, batches)
        stability = recipe.stability
        keep = stability.save_bad_batches if first_rank else 0
        bad_steps = BadSteps(run_dir / "bad_batches", stability.max_bad_steps, keep, ledger.write)
        trainer = Trainer(
            recipe, model, optimizer, course, checkpoints, ledger, bad_steps,
            validate=lambda: validate(model, pieces) | far.measure(model, course.stage(max(trainer.step, 1) - 1)),
            sampler=Sampler(run_dir / "samples.jsonl" if first_rank else None, tokenizer, prompts(recipe, run_dir / "corpus")),
            flops_per_token=flops_per_token, resume_command=resume_command,
            heartbeat=heartbeat or Heartbeat(None), mixture=Follower(ledger, batches, ranks),
            meta={"recipe": fingerprint(recipe), "order": batches.order.fingerprint(), "shards": data, META: tokenizer_sha256},
        )  # fmt: skip
        first = trainer.resume()
        require_same(run_dir, trainer.began_with.get(META))
        before = trainer.began_with.get("shards", data)
        if before != data:
            if not other_data and any(data.get(name) != digest for name, digest in before.items()):  # sources that were added are no matter
                raise UserError(
                    f"the token files in {run_dir / 'shards'} are not those that this run began with; put the old text back, "
                    "choose another run_dir, or go on with --allow shards"
                )
            ledger.write("data_changed", step=first, shards=data)
        if first_rank and not recipe.shards.cache and _size(batches.manifest) <= _QUICKLY_READ:
            verify(run_dir / "shards", batches.manifest)
        pieces = held_out(batches, recipe, length, rows)  # opened only now: files that are cut short are the hashes' to name
        with MetricLog(run_dir, recipe.metrics, resume_step=first + 1) if first_rank else NoMetrics() as metrics:
            trainer.run(metrics)
