"""What the stages after pretraining share: they load the weights of the stage before, and train by a `StageSetup`.

`stage_refusals` has what training would refuse, found from the recipe, and from the data of a stage where that was read, before anything is
trained.

The base model of a run without pretraining is the weights of `start_from`, as the checkpoint of step 0 (`save_start`). Tuning, evaluation,
export, copies and serving read the base model of a run from its checkpoints, whatever made it. Weights in a format of others stay where
they are, and the checkpoint names their files and hashes (`lmworks.weights.reference`). Those of another run's checkpoint, which that run
may delete, are saved in this one, without optimizer state; so are layers of multi-token prediction, which begin with random weights.

Supervised fine-tuning: the same trainer on conversations, with loss on the assistant's tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from lmworks.errors import UserError, all_refusals
from lmworks.io.files import sha256_file
from lmworks.io.run_layout import of_stage
from lmworks.metrics.system import reset_memory_peak
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.changes import as_tree, fingerprint
from lmworks.recipe.schema.align import Dpo
from lmworks.recipe.schema.model import Lora, Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import EarlyStopping
from lmworks.recipe.schema.tune import Tune
from lmworks.recipe.weights import model_of
from lmworks.shards.validation import TuningBatches, check_batch
from lmworks.tokenizer import load as load_tokenizer
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.adapters import adapter_identity, adapter_meta, load_weights
from lmworks.train.curriculum import Curriculum, TuningCurriculum, stage_schedules
from lmworks.train.data.chat import build_chat_data, chat_shards
from lmworks.train.data.decontamination import Protect
from lmworks.train.data.frozen_tokenizer import META, digest, require_same
from lmworks.train.data.mixture import replayed_rows
from lmworks.train.data.sets import require_sets
from lmworks.train.load import final_checkpoint, stages_of
from lmworks.train.observe.forgetting import GENERAL, RISE, ForgettingMonitor
from lmworks.train.observe.sampling import ChatSampler
from lmworks.train.observe.step_metrics import FlopsPerToken
from lmworks.train.pretrain import START_FROM, build_model, identity, with_optimizer
from lmworks.train.saving import open_stage
from lmworks.train.step import Objective
from lmworks.train.trainer import Trainer
from lmworks.train.validation import EarlyStopper, validate_conversations
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import LEDGER, Ledger, NoLedger

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
        length, batch = int(section.sequence_length), int(section.global_batch_size)
        looks.append(partial(check_batch, None if section.epochs else int(section.planned_tokens), batch, length))
        if section.replay is not None:
            looks.append(partial(replayed_rows, section.replay, batch // length))
    if section.early_stopping is not None:
        held_out = {"tune": "validation_fraction", "dpo": "held_out_fraction", "grpo": "held_out"}[stage]
        measured = (*(MEASURED[stage] if getattr(section, held_out) else ()), *((GENERAL, RISE) if section.forgetting else ()))
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
        raise UserError("dpo.early_stopping needs held-out pairs; raise dpo.held_out_fraction, or give more pairs")


LoadStart = Callable[[Recipe, ParallelModel, Communicator], dict[str, Any]]


def save_start(recipe: Recipe, run_dir: Path, load_start: LoadStart, ranks: Ranks | None = None) -> None:
    """Save what `load_start` reads as `checkpoints/step-00000000`, if there is no good checkpoint yet; called on all ranks.

    Raises `UserError` if the weights are damaged or do not fit the model, or if the disk is full.
    """
    ranks, communicator, folder = ranks or alone(), world_communicator(), run_dir / "checkpoints"
    if communicator.broadcast(communicator.is_first and listing.newest_good(folder)[0] is not None):
        return
    model = build_model(recipe, ranks)
    about = load_start(recipe, model, communicator)
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


LoadAdapter = Callable[[Path, Mapping[str, Tensor], Model, Lora, str], None]


@dataclass
class BaseWeights:
    """A model with the weights that a stage starts from, the checkpoint that they come from, its adapters' options, and the ranks'
    communicator."""

    model: ParallelModel
    checkpoint: Path
    lora: Lora | None
    communicator: Communicator

    def content(self) -> str:
        """Identifies the weights."""
        given = self.lora.init_from if self.lora is not None else None
        adapters = sorted(Path(given).glob("*.safetensors")) if given is not None else []
        return "/".join((content_of(self.checkpoint), *map(sha256_file, adapters)))


@dataclass
class StageSetup:
    """What a stage trains: its steps, a validation that returns metrics, its objective where that is not the loss of the next token, and
    whether it ends with the best weights instead of the last. `meta` is added to that of its checkpoints; `check_resumed` gets the meta of
    the checkpoint that it resumes from, and raises `UserError` if that does not fit."""

    curriculum: Curriculum
    validate: Callable[[], dict[str, float]]
    objective: Objective | None = None
    early_stopping: EarlyStopping | None = None
    use_best: bool = False
    meta: dict[str, Any] = field(default_factory=dict)
    check_resumed: Callable[[dict[str, Any]], None] = lambda meta: None


def load_base(
    recipe: Recipe, run_dir: Path, name: str, ranks: Ranks, lora: Lora | None = None, load_adapter: LoadAdapter | None = None
) -> BaseWeights:
    """Build the model, in evaluation mode, and load the final weights of the stage before `name`, with their positions and windows, on all
    ranks; the first looks for the newest good ones. With `lora` the model is frozen and has adapters, which `load_adapter` fills from the
    folder that `lora.init_from` names."""
    reset_memory_peak()
    model = build_model(recipe, ranks, lora)
    model.eval()
    communicator, found = world_communicator(), []
    before = stages_of(recipe, before=of_stage(name))[-1].model
    communicator.run_on_all(lambda: found.append(final_checkpoint(run_dir, before)) if communicator.is_first else None)
    path = communicator.broadcast(found[0] if found else Path())
    meta = load_weights(path, model, identity(recipe), communicator, bool(recipe.optimizer.ema_decay))
    require_same(run_dir, meta.get(META))
    model.configure(model_of(recipe, meta))
    if lora is not None and lora.init_from is not None:
        assert load_adapter is not None
        load_adapter(Path(lora.init_from), model.state_dict(), recipe.model, lora, content_of(path))
    return BaseWeights(model, path, lora, communicator)


def run_stage(
    recipe: Recipe, run_dir: Path, name: str, begun: BaseWeights, make_plan: Callable[[ParallelModel], StageSetup], tokenizer: Tokenizer, *,
    flops_per_token: FlopsPerToken, resume_command: str, heartbeat: Heartbeat | None,
) -> None:  # fmt: skip
    """Train the stage `name` from its newest good checkpoint, or from its start, to its end. `make_plan` gets the model as it is trained,
    still with the weights of the start. Raises `Interrupted` when asked to stop, and `UserError`."""
    base, lora = begun.checkpoint, begun.lora
    model, optimizer = with_optimizer(recipe, begun.model)
    plan = make_plan(model)
    with open_stage(
        recipe, run_dir, of_stage(name), model.ranks, identity(recipe) | adapter_identity(lora, base), plan.curriculum.tokens,
        lambda path: ChatSampler(path, tokenizer, recipe.evaluate.questions), plan.use_best,
    ) as files:  # fmt: skip
        monitor = ForgettingMonitor(recipe, run_dir, name, model, tokenizer, files.ledger.write)
        trainer = Trainer(
            recipe, model, optimizer, plan.curriculum, files, lambda: plan.validate() | monitor.measure(), flops_per_token,
            heartbeat or Heartbeat(None),
            early_stopping=plan.early_stopping, use_best=plan.use_best, objective=plan.objective, stage=name, resume_command=resume_command,
            meta={"recipe": fingerprint(recipe), "base": base.name, META: digest(run_dir)} | plan.meta | adapter_meta(lora, base, run_dir),
        )  # fmt: skip
        if trainer.resume():
            plan.check_resumed(trainer.resumed_meta)
        trainer.run()


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

    def make_plan(model: ParallelModel) -> StageSetup:
        return StageSetup(
            curriculum, lambda: validate_conversations(model, held_out) if held_out is not None else {},
            early_stopping=options.early_stopping, use_best=options.keep == "best", meta=replayed, check_resumed=check_resumed,
        )  # fmt: skip

    begun = load_base(recipe, run_dir, "tune", ranks, options.lora, load_adapter)
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
