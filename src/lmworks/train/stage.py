"""What the stages after pretraining share: they start from the weights of the stage before, and train by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lmworks.checkpoint.communicator import Communicator, world_communicator
from lmworks.checkpoint.listing import content_of
from lmworks.files import sha256_file
from lmworks.metrics.system import reset_memory_peak
from lmworks.model_stages import of_stage
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.loading.weights import model_of
from lmworks.recipe.schema.lora import Lora
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import EarlyStopping
from lmworks.recipe.tree.fingerprint import fingerprint
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.adapters import adapter_identity, adapter_meta, load_weights
from lmworks.train.curriculum import Curriculum
from lmworks.train.data.frozen_tokenizer import META, digest, require_same
from lmworks.train.load import final_checkpoint, stages_of
from lmworks.train.objective import Objective
from lmworks.train.observe.forgetting import ForgettingMonitor
from lmworks.train.observe.sampling import ChatSampler
from lmworks.train.observe.step_metrics import FlopsPerToken
from lmworks.train.pretrain import build_model, identity, with_optimizer
from lmworks.train.stage_files import open_stage
from lmworks.train.trainer import Trainer
from lmworks.watch.heartbeat import Heartbeat

LoadAdapter = Callable[[Path, Mapping[str, Tensor], Model, Lora, str], None]


@dataclass
class Start:
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
class Plan:
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


def start(
    recipe: Recipe, run_dir: Path, name: str, ranks: Ranks, lora: Lora | None = None, load_adapter: LoadAdapter | None = None
) -> Start:
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
    return Start(model, path, lora, communicator)


def run_stage(
    recipe: Recipe, run_dir: Path, name: str, begun: Start, make_plan: Callable[[ParallelModel], Plan], tokenizer: Tokenizer, *,
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
