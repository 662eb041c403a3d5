"""The base model of a run without pretraining: the weights of `start_from`, as the checkpoint of step 0.

Tuning, evaluation, export, copies and serving read the base model of a run from its checkpoints, whatever made it. Weights in a format of
others stay where they are, and the checkpoint names their files and hashes (`lmworks.weights.reference`). Those of another run's
checkpoint, which that run may delete, are saved in this one, without optimizer state; so are layers of multi-token prediction, which begin
with random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmworks.checkpoint import listing
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.communicator import Communicator, world_communicator
from lmworks.checkpoint.listing import REFERENCE
from lmworks.checkpoint.run_bundle import run_files_of
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.fingerprint import as_tree, fingerprint
from lmworks.train.data.frozen_tokenizer import META, digest
from lmworks.train.pretrain import START_FROM, build_model, identity
from lmworks.watch.ledger import LEDGER, Ledger, NoLedger

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
