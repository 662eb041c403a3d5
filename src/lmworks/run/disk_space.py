"""Whether the file system of a run has room for what the run will write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lmworks import machine
from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.model_stages import of_stage
from lmworks.plan.amounts import size
from lmworks.plan.costs import disk
from lmworks.plan.stage_data import StageData
from lmworks.plan.stage_phases import stages_as_phases
from lmworks.recipe.derivation.parameters import count_parameters
from lmworks.recipe.schema.recipe import Recipe

_BYTES = {"fp32": 4, "bf16": 2}  # of a weight in an export
_HEADROOM = 1.05  # metrics, samples, pages, and what the file system itself needs


def written(recipe: Recipe, run_dir: Path, data: Mapping[str, StageData], most: bool) -> dict[str, float]:
    """Bytes that each stage still writes: at least (one checkpoint of each stage that trains, and the exports), or with `most` all
    checkpoints that are kept at a time and the token files. A stage that has a checkpoint already is left out."""
    return {name: amount for name, amount in _written(recipe, run_dir, data, most) if amount}


def _written(recipe: Recipe, run_dir: Path, data: Mapping[str, StageData], most: bool) -> Iterator[tuple[str, float]]:
    alone = recipe.model_copy(update={"start_from": recipe.start_from or "", "train": recipe.train.model_copy(update={"phases": []})})
    stages = {"pretrain": disk(recipe)} if recipe.trains_base else {}
    for name in recipe.later_stages:
        others = {other: None for other in recipe.later_stages if other != name}
        stages[name] = disk(stages_as_phases(alone.model_copy(update=others), data))
    for name, held in stages.items():
        if not listing.begun(run_dir / of_stage(name).checkpoints):
            kept = held.checkpoints_kept + 1 if most else 1  # one more while the newest is written
            yield name, held.checkpoint * kept + (held.data if most and name == "pretrain" else 0)
    formats = recipe.export.huggingface + (recipe.export.gguf is True or (most and recipe.export.gguf == "auto"))
    weights = count_parameters(recipe.model) * _BYTES[recipe.export.dtype]
    yield "export", 0.0 if (run_dir / "export").is_dir() else weights * formats


def shortage(recipe: Recipe, run_dir: Path, data: Mapping[str, StageData], most: bool) -> str | None:
    """What the run needs, where less is free; None if it fits."""
    place = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    free, parts = machine.free_disk(place), written(recipe, run_dir, data, most)
    needed = sum(parts.values()) * _HEADROOM
    if needed <= free:
        return None
    named = ", ".join(f"{name} {size(amount)}" for name, amount in parts.items())
    return (
        f"{run_dir} needs {size(needed)} of disk space {'at most' if most else 'at least'} ({named}), and {size(free)} are free: free "
        "some, choose another run_dir, or train low-rank adapters (lora), whose checkpoints are small"
    )


def require_disk(recipe: Recipe, run_dir: Path, data: Mapping[str, StageData]) -> None:
    """Raise `UserError` if not even the least that the run writes has room."""
    if said := shortage(recipe, run_dir, data, most=False):
        raise UserError(said)
