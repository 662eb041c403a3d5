"""Finds trained weights on disk: their model, their format, and their tokenizer. The weights themselves are read elsewhere."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.files import read_json
from lmworks.recipe.loading.huggingface import from_config
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe

_STEP = re.compile(r"step-\d{8,}\Z")


@dataclass(frozen=True)
class Weights:
    """Where weights lie (`path` is a checkpoint, or a Hugging Face folder), their model, and their tokenizer.json.

    A checkpoint also has the recipe that it was trained with, and the phase that it had reached (None for a tuned one).
    """

    kind: Literal["huggingface", "checkpoint"]
    path: Path
    model: Model
    tokenizer: Path
    recipe: Recipe | None = None
    phase: str | None = None

    @property
    def averaged(self) -> bool:
        """Whether an average of the weights is stored, which is then used."""
        return bool(self.recipe and self.recipe.optimizer.ema_decay)


def find_weights(path: Path, needs_tokenizer: bool = True) -> Weights:
    """The weights in a Hugging Face folder, a checkpoint, or a run, which stands for its newest checkpoint of pretraining.

    Raises `UserError` if it is none of these, or if there is no tokenizer; without `needs_tokenizer` it may be missing, for a plan.
    """
    if (path / "config.json").is_file():
        return Weights("huggingface", path, from_config(_mapping(path / "config.json")), _tokenizer(path, needs_tokenizer))
    if (path / "resolved.json").is_file():
        steps = [step for step in sorted((path / "checkpoints").glob("step-*")) if _STEP.match(step.name)]
        if not steps:
            raise UserError(f"the run {path} has no checkpoint yet")
        path = steps[-1]
    if not (path / "meta.json").is_file():
        raise UserError(f"{path} is no Hugging Face folder (config.json), checkpoint (meta.json) or run (resolved.json)")
    document = _mapping(path / "meta.json")
    recipe = _recipe_of(path, document)
    rope, meta = recipe.model.rope, document.get("meta")
    reached = meta.get("phase") if isinstance(meta, dict) else None
    names = [phase.name for phase in recipe.train.phases]
    for phase in recipe.train.phases[: names.index(reached) + 1 if reached in names else len(names)]:
        rope = phase.rope.apply(rope) if phase.rope else rope
    run_dirs = [folder for folder in path.absolute().parents[:3] if (folder / "tokenizer").is_dir()]
    tokenizer = _tokenizer(run_dirs[0] / "tokenizer" if run_dirs else path)
    model = recipe.model.model_copy(update={"rope": rope})
    return Weights("checkpoint", path, model, tokenizer, recipe, reached if reached in names else None)


def _mapping(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object")
    return found


def _recipe_of(path: Path, document: dict[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(document.get("recipe"))
    except ValidationError:
        raise UserError(f"{path} does not say how it was trained; export that run and use the export") from None


def _tokenizer(folder: Path, needed: bool = True) -> Path:
    found = folder / "tokenizer.json"
    if needed and not found.is_file():
        raise UserError(f"{folder} has no tokenizer.json, which the weights need; put it there")
    return found
