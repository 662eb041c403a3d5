"""The door into training: all stages, from pretraining to reinforcement learning, are run by `run_stage`.

A stage supplies the weights that it starts from (`random_or_start_weights`, `weights_before`) and a `StageSetup`: what it trains on, its
objective and its validation. `TrainingContext` is what it is given from outside. `stage_refusals` and `check_steps` find what training
would refuse from the recipe, and from the data of a stage where that was read, before anything is trained.

The base model of a run without pretraining is the weights of `start_from`, as the checkpoint of step 0 (`save_start`). Tuning, evaluation,
export, copies and serving read the base model of a run from its checkpoints, whatever made it. Weights in a format of others stay where
they are, and the checkpoint names their files and hashes (`lmworks.weights.reference`). Those of another run's checkpoint, which that run
may delete, are saved in this one, without optimizer state; so are layers of multi-token prediction, which begin with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lmworks.checkpoint import listing
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.communicator import Communicator, world_communicator
from lmworks.checkpoint.listing import REFERENCE, content_of
from lmworks.checkpoint.run_bundle import run_files_of
from lmworks.corpus.contamination import Decontaminator
from lmworks.errors import UserError, all_refusals, raise_first
from lmworks.io.files import sha256_file
from lmworks.io.run_layout import BASE, ModelStage
from lmworks.metrics.system import reset_memory_peak
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.changes import as_tree, fingerprint
from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.recipe.schema.model import Lora, Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import Tune
from lmworks.recipe.weights import model_of
from lmworks.shards.validation import check_batch
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.build import build_model, identity, load_weights, with_optimizer
from lmworks.train.curriculum import stage_schedules
from lmworks.train.data.mixture import replayed_rows
from lmworks.train.data.sets import require_sets
from lmworks.train.observe.forgetting import GENERAL, RISE, ForgettingMonitor
from lmworks.train.observe.memory_kinds import Held
from lmworks.train.observe.sampling import ChatSampler, Sampler, prompts, refusals
from lmworks.train.observe.step_metrics import FlopsPerToken
from lmworks.train.saving import open_stage
from lmworks.train.trainer import StageSetup, Trainer
from lmworks.train.validation import EarlyStopper
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import LEDGER, Ledger, NoLedger
from lmworks.weights.adapters import adapter_identity, adapter_meta
from lmworks.weights.frozen_tokenizer import META, digest, require_same
from lmworks.weights.run_models import final_checkpoint, stages_of

START_FROM = "start_from"  # under this key a checkpoint's meta says which weights its run began with

MEASURED = {
    "tune": ("validation/loss",),
    "dpo": ("validation/loss", "validation/reward_accuracy", "validation/reward_margin"),
    "grpo": ("validation/reward", "validation/wrong"),
}
"""What the validations of the stages after pretraining measure."""


def stage_refusals(recipe: Recipe, stage: str) -> Iterator[UserError]:
    """Why a stage after pretraining could not run, whatever its data hold."""
    section = getattr(recipe, stage)
    looks: list[Callable[[], object]] = [partial(require_sets, recipe, stage)]
    if isinstance(section, Tune):
        length, batch = int(section.sequence_length), int(section.global_batch_tokens)
        looks.append(partial(check_batch, None if section.epochs else int(section.planned_tokens), batch, length))
        if section.replay is not None:
            looks.append(partial(replayed_rows, section.replay, batch // length))
    if section.early_stopping is not None:
        held_out = section.validation_prompts if isinstance(section, Grpo) else section.validation_fraction
        measured = (*(MEASURED[stage] if held_out else ()), *((GENERAL, RISE) if section.forgetting else ()))
        looks.append(partial(EarlyStopper(section.early_stopping).observe, 0, dict.fromkeys(measured, 0.0)))
    return all_refusals(looks)


def check_steps(recipe: Recipe, stage: str, steps: int, tokens: int, held_out: int) -> None:
    """The same for a stage of which the data are known: `steps` that read `tokens`, and examples that are held out."""
    if isinstance(getattr(recipe, stage), Dpo):
        require_held_out(recipe, held_out)
    each = max(1, tokens // steps)
    stage_schedules(stage, recipe, getattr(recipe, stage), steps, lambda step: step * each)


def require_held_out(recipe: Recipe, held_out: int) -> None:
    """Raise `UserError` if preference optimization is to be stopped by held-out pairs, and there are none."""
    if recipe.dpo is not None and recipe.dpo.early_stopping is not None and not held_out:
        raise UserError("dpo.early_stopping needs held-out pairs; raise dpo.validation_fraction, or give more pairs")


LoadStart = Callable[[Recipe, ParallelModel, Communicator], dict[str, Any]]
LoadAdapter = Callable[[Path, Mapping[str, Tensor], Model, Lora, Path], None]
Evaluation = Callable[[ParallelModel], dict[str, float]]
MakeEvaluation = Callable[[Recipe, Tokenizer, int, int, Ranks], Evaluation | None]


@dataclass(frozen=True)
class TrainingContext:
    """What a stage is given: its recipe, the run directory, the command that resumes the run, whether a started run may continue with other
    token files, the ranks, and what the rooms above training supply, which training does not import.

    flops_per_token: FLOPs of a training step per token, of a model in sequences of a length, with or without frozen weights.
    protect: for a stage that makes its training data, the evaluation items that these may not contain, and what finds them in texts.
    load_start: fills the model with the weights of `start_from`; returns what they were.
    load_adapter: fills adapters of a checkpoint from the folder that `lora.init_from` names.
    make_evaluation: prepares what is evaluated every `evaluate.every`, in batches of so many rows of so many tokens.
    trainer: the class of the trainer, another one where the loop is the caller's.
    run: trains with the trainer of the stage; a profile measures here.
    held: what the stage holds, for a report when memory runs out.
    """

    recipe: Recipe
    run_dir: Path
    resume_command: str = "lmworks run RECIPE"
    ranks: Ranks = field(default_factory=alone)
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(None))
    allow_other_data: bool = False
    flops_per_token: FlopsPerToken = lambda model, length, frozen: 0.0
    protect: Callable[[str], tuple[Collection[str], Decontaminator | None]] = lambda stage: ((), None)
    load_start: LoadStart | None = None
    load_adapter: LoadAdapter | None = None
    make_evaluation: MakeEvaluation | None = None
    trainer: type[Trainer] = Trainer
    run: Callable[[Trainer], None] = lambda trainer: trainer.run()
    held: Held = field(default_factory=Held)


@dataclass
class BaseWeights:
    """A model with the weights that a stage starts from, the ranks' communicator, the checkpoint that they come from (None for pretraining)
    and the adapters' options. `meta` is what the checkpoints of the stage say of them."""

    model: ParallelModel
    communicator: Communicator
    checkpoint: Path | None = None
    lora: Lora | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def content(self) -> str:
        """Identifies the weights."""
        assert self.checkpoint is not None
        given = self.lora.init_from if self.lora is not None else None
        adapters = sorted(Path(given).glob("*.safetensors")) if given is not None else []
        return "/".join((content_of(self.checkpoint), *map(sha256_file, adapters)))


def random_or_start_weights(context: TrainingContext) -> BaseWeights:
    """Build the model with random weights, or with those of `start_from` if the run has no checkpoint yet."""
    recipe, communicator = context.recipe, world_communicator()
    model = context.held.model = build_model(recipe, context.ranks)
    if recipe.start_from is None:
        return BaseWeights(model, communicator)
    if context.ranks.first(lambda: listing.has_checkpoints(context.run_dir / "checkpoints")):
        return BaseWeights(model, communicator)
    assert context.load_start is not None
    return BaseWeights(model, communicator, meta={START_FROM: context.load_start(recipe, model, communicator)})


def weights_before(context: TrainingContext, stage: ModelStage, lora: Lora | None = None) -> BaseWeights:
    """Build the model, in evaluation mode, and load the final weights of the stage before `stage`, with their positions and windows, on all
    ranks; the first looks for the newest good ones. With `lora` the model is frozen and has adapters, loaded from `lora.init_from` if that
    is set."""
    recipe, run_dir = context.recipe, context.run_dir
    reset_memory_peak()
    model = context.held.model = build_model(recipe, context.ranks, lora)
    model.eval()
    communicator = world_communicator()
    before = stages_of(recipe, before=stage)[-1].model
    path = context.ranks.first(lambda: final_checkpoint(run_dir, before))
    meta = load_weights(path, model, identity(recipe), communicator, bool(recipe.optimizer.ema_decay))
    require_same(run_dir, meta.get(META))
    model.configure(model_of(recipe, meta))
    if lora is not None and lora.init_from is not None:
        assert context.load_adapter is not None
        context.load_adapter(Path(lora.init_from), model.state_dict(), recipe.model, lora, path)
    return BaseWeights(model, communicator, path, lora, adapter_meta(lora, path, run_dir))


MakeSetup = Callable[[ParallelModel], StageSetup]


def run_stage(context: TrainingContext, stage: ModelStage, base: BaseWeights, make_setup: MakeSetup, tokenizer: Tokenizer) -> None:
    """Train `stage` from its newest good checkpoint, or from `base`, to its end. `make_setup` gets the model as it is trained, still with
    the weights of the start. Raises `Interrupted` when asked to stop, and `UserError`."""
    with open_trainer(context, stage, base, make_setup, tokenizer) as trainer:
        context.run(trainer)


@contextmanager
def open_trainer(
    context: TrainingContext, stage: ModelStage, base: BaseWeights, make_setup: MakeSetup, tokenizer: Tokenizer
) -> Iterator[Trainer]:  # fmt: skip
    """The trainer of a stage with its files, resumed from the newest good checkpoint; see `run_stage`."""
    recipe, run_dir = context.recipe, context.run_dir
    raise_first(refusals(recipe, tokenizer))
    model, optimizer = with_optimizer(recipe, base.model)
    context.held.model, context.held.optimizer = model, optimizer
    setup = make_setup(model)
    meta = {"recipe": fingerprint(recipe)} | ({"base": base.checkpoint.name} if base.checkpoint is not None else {})
    setup.meta = meta | setup.meta | {META: digest(run_dir)} | base.meta
    own = identity(recipe) | (adapter_identity(base.lora, base.checkpoint) if base.checkpoint is not None else {})

    def sampler(path: Path | None) -> Sampler:
        if stage is BASE:
            return Sampler(path, tokenizer, prompts(recipe, run_dir / "corpus", tokenizer.encode))
        return ChatSampler(path, tokenizer, recipe.evaluate.questions)

    with open_stage(recipe, run_dir, stage, model.ranks, own, setup.curriculum.tokens, sampler, setup.use_best) as files:
        if stage is not BASE:
            monitor = ForgettingMonitor(recipe, run_dir, stage.stage, model, tokenizer, files.ledger.write)
            validate = setup.validate
            setup.validate = lambda step: validate(step) | monitor.measure()
        trainer = context.trainer(
            recipe, model, optimizer, setup, files, stage, context.flops_per_token, context.heartbeat, context.resume_command
        )  # fmt: skip
        context.held.trainer = trainer
        trainer.resume()
        context.held.first_step = trainer.step
        if stage is BASE and recipe.start_from is not None:
            _keep_start(trainer, run_dir)
        setup.prepare(trainer)
        yield trainer


def _keep_start(trainer: Trainer, run_dir: Path) -> None:
    """Keep in the meta of the checkpoints which weights the run began with. Raises `UserError` if a resumed run did not begin with any."""
    if START_FROM in trainer.setup.meta:
        return
    if START_FROM not in trainer.resumed_meta:
        raise UserError(
            f"the checkpoints in {run_dir / 'checkpoints'} did not begin with the weights of start_from; take that folder "
            "away to begin with them, or leave start_from out"
        )
    trainer.setup.meta[START_FROM] = trainer.resumed_meta[START_FROM]


def save_start(context: TrainingContext) -> None:
    """Save the weights of `start_from` as `checkpoints/step-00000000`, if there is no good checkpoint yet; called on all ranks.

    Raises `UserError` if the weights are damaged or do not fit the model, or if the disk is full.
    """
    recipe, run_dir, ranks = context.recipe, context.run_dir, context.ranks
    communicator, folder = world_communicator(), run_dir / "checkpoints"
    if ranks.first(lambda: listing.newest_good(folder)[0] is not None):
        return
    assert context.load_start is not None
    model = build_model(recipe, ranks)
    about = context.load_start(recipe, model, communicator)
    named = _named(recipe, about)
    state: dict[str, Any] = {} if named else {"model": model.state_dict()}
    if recipe.optimizer.ema_decay and not named:  # whoever reads the model of a run with an average reads the average
        state["average"] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    with (
        Ledger(run_dir / LEDGER) if ranks.is_first else NoLedger() as ledger,
        Checkpoints(
            folder, recipe.checkpoints.of("checkpoints"), identity(recipe), report=ledger.write, total_tokens=0,
            recipe=as_tree(recipe), run_files=lambda: run_files_of(run_dir, folder),
        ) as checkpoints,
    ):  # fmt: skip
        ledger.write(START_FROM, **about)
        meta = {"tokens": 0, "recipe": fingerprint(recipe), META: digest(run_dir), START_FROM: about}
        meta |= {REFERENCE: about} if named else {}
        checkpoints.save(0, model.without_duplicates(state), meta, permanent=True, wait=True)


def _named(recipe: Recipe, about: dict[str, Any]) -> bool:
    """Whether the checkpoint names the files of the weights and holds none itself."""
    return about["kind"] == "huggingface" and recipe.model.mtp is None
