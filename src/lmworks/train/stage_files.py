"""What a stage of training writes: checkpoints, metrics, samples, bad batches, and lines in the run's ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.run_bundle import run_files_of
from lmworks.model_stages import ModelStage
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.fingerprint import as_tree
from lmworks.train.observe.sampling import Sampler
from lmworks.watch.bad_steps import BadSteps
from lmworks.watch.ledger import LEDGER, Ledger, NoLedger


@dataclass
class StageFiles:
    """The files of a stage. `folder` gets its metrics."""

    folder: Path
    checkpoints: Checkpoints
    ledger: Ledger
    bad_steps: BadSteps
    sampler: Sampler


@contextmanager
def open_stage(
    recipe: Recipe, run_dir: Path, stage: ModelStage, ranks: Ranks, identity: dict[str, Any], total_tokens: int,
    make_sampler: Callable[[Path | None], Sampler], use_best: bool = False,
) -> Iterator[StageFiles]:  # fmt: skip
    """Open the files of a stage; ranks other than the first write checkpoints only. `identity` is that of the checkpoints, `make_sampler`
    gets the file of the samples, and with `use_best` the best checkpoint is kept, since the stage ends with it."""
    folder, saved = stage.place(run_dir), run_dir / stage.checkpoints
    options, stability = recipe.checkpoints.of(stage.checkpoints), recipe.stability
    if use_best:
        options = options.model_copy(update={"keep_best": True})
    with (
        Ledger(run_dir / LEDGER, patient=True) if ranks.is_first else NoLedger() as ledger,
        Checkpoints(
            saved, options, identity, report=partial(ledger.write, stage=stage.stage), recipe=as_tree(recipe), total_tokens=total_tokens,
            run_files=lambda: run_files_of(run_dir, saved),
        ) as checkpoints,
    ):  # fmt: skip
        keep = stability.save_bad_batches if ranks.is_first else 0
        bad_steps = BadSteps(folder / "bad_batches", stability.max_bad_steps, keep, ledger.write)
        yield StageFiles(folder, checkpoints, ledger, bad_steps, make_sampler(folder / "samples.jsonl" if ranks.is_first else None))
