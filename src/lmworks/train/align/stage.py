"""What the stages that train on answers share: they start from the weights of the stage before, and train an objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.communicator import Communicator, new_communicator
from lmworks.checkpoint.run_bundle import run_files_of
from lmworks.metrics.log import MetricLog, NoMetrics
from lmworks.model_stages import ModelStage, of_stage
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.loading.weights import rope_of
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import EarlyStopping
from lmworks.recipe.tree.fingerprint import as_tree, fingerprint
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.train.adapters import load_weights
from lmworks.train.curriculum import Curriculum
from lmworks.train.data.frozen_tokenizer import META, digest, require_same
from lmworks.train.load import final_checkpoint, stages_of
from lmworks.train.objective import Objective
from lmworks.train.observe.sampling import ChatSampler
from lmworks.train.pretrain import build_model, identity, with_optimizer
from lmworks.train.trainer import StageFiles, Trainer
from lmworks.watch.bad_steps import BadSteps
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import LEDGER, Ledger, NoLedger


@dataclass
class Start:
    """A model with the weights that a stage starts from, the checkpoint that they come from, and the ranks' communicator."""

    model: ParallelModel
    checkpoint: Path
    communicator: Communicator


@dataclass
class Plan:
    """What a stage trains: its steps, its objective, and a validation that returns metrics."""

    curriculum: Curriculum
    objective: Objective
    validate: Callable[[], dict[str, float]]
    early_stopping: EarlyStopping | None = None


def start(recipe: Recipe, run_dir: Path, name: str, ranks: Ranks | None) -> Start:
    """Build the model, in evaluation mode, and load the final weights of the stage before `name`, with their positions."""
    model = build_model(recipe, ranks or alone())
    model.eval()
    communicator = new_communicator()
    before = _before(recipe, name).model
    found: list[Path] = []
    communicator.run_on_all(lambda: found.append(final_checkpoint(run_dir, before)) if communicator.is_first else None)
    path = communicator.broadcast(found[0] if found else Path())
    meta = load_weights(path, model, identity(recipe), communicator, bool(recipe.optimizer.ema_decay))
    require_same(run_dir, meta.get(META))
    model.set_rope(rope_of(recipe, meta))
    return Start(model, path, communicator)


def _before(recipe: Recipe, name: str) -> ModelStage:
    stages = stages_of(recipe)
    return stages[stages.index(of_stage(name)) - 1]


def run_stage(
    recipe: Recipe, run_dir: Path, name: str, begun: Start, make_plan: Callable[[ParallelModel], Plan], tokenizer: Tokenizer, *,
    flops_per_token: Callable[[int], float], resume_command: str, heartbeat: Heartbeat | None,
) -> None:  # fmt: skip
    """Train the stage `name` from its newest good checkpoint, or from its start, to its end. `make_plan` gets the model as it is trained,
    still with the weights of the start. Raises `Interrupted` when asked to stop, and `UserError`."""
    stage, ranks = of_stage(name), begun.model.ranks
    folder = stage.place(run_dir)
    model, optimizer = with_optimizer(recipe, begun.model)
    plan = make_plan(model)
    with (
        Ledger(run_dir / LEDGER) if ranks.is_first else NoLedger() as ledger,
        Checkpoints(
            folder / "checkpoints", recipe.checkpoints.of(stage.checkpoints), identity(recipe), report=ledger.write,
            recipe=as_tree(recipe), total_tokens=plan.curriculum.tokens, run_files=lambda: run_files_of(run_dir, folder / "checkpoints"),
        ) as checkpoints,
    ):
        stability = recipe.stability
        keep = stability.save_bad_batches if ranks.is_first else 0
        bad_steps = BadSteps(folder / "bad_batches", stability.max_bad_steps, keep, ledger.write)
        sampler = ChatSampler(folder / "samples.jsonl" if ranks.is_first else None, tokenizer, recipe.evaluate.questions)
        trainer = Trainer(
            recipe, model, optimizer, plan.curriculum, StageFiles(checkpoints, ledger, bad_steps, sampler),
            validate=plan.validate, flops_per_token=flops_per_token, resume_command=resume_command,
            heartbeat=heartbeat or Heartbeat(None), early_stopping=plan.early_stopping, objective=plan.objective, stage=name,
            meta={"recipe": fingerprint(recipe), "base": begun.checkpoint.name, META: digest(run_dir)},
        )  # fmt: skip
        first = trainer.resume()
        with MetricLog(folder, recipe.metrics, resume_step=first + 1) if ranks.is_first else NoMetrics() as metrics:
            trainer.run(metrics)
