"""Finds trained weights on disk: their model, their format, and their tokenizer. The weights themselves are read elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.files import read_json
from lmworks.model_stages import final_checkpoint_of, step_in
from lmworks.recipe.derivation.phases import final, in_force
from lmworks.recipe.gguf.folder import as_folder, find_gguf
from lmworks.recipe.loading import hub
from lmworks.recipe.loading.huggingface import from_config
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tree.fingerprint import as_tree

ARCHITECTURE = "architecture"  # key in a checkpoint's meta: what phases may change in the model that its weights compute
_CHANGED = ("rope", "sliding_window", "layer_types", "no_rope_layer_interval")


@dataclass(frozen=True)
class Weights:
    """Where weights lie (`path` is a checkpoint, or a Hugging Face folder), their model, and their tokenizer.json.

    `origin` is what was named, where that is something else: a GGUF file, whose `path` is a folder in the cache. A checkpoint also has the
    recipe that it was trained with, and the phase that it had reached (None for a tuned one).
    """

    kind: Literal["huggingface", "checkpoint"]
    path: Path
    model: Model
    tokenizer: Path
    recipe: Recipe | None = None
    phase: str | None = None
    origin: Path | None = None

    @property
    def tokenizer_path(self) -> Path:
        """What a recipe names as `tokenizer.path`: the tokenizer.json, or the GGUF file that has the tokenizer."""
        return self.origin or self.tokenizer

    @property
    def name(self) -> Path:
        """What messages call the weights."""
        return self.origin or self.path

    @property
    def label(self) -> str:
        """A short name of a model in a format of others."""
        return self.origin.stem if self.origin else hub.name_of(self.path.resolve()) or self.path.resolve().name

    @property
    def averaged(self) -> bool:
        """Whether an average of the weights is stored, which is then used."""
        return bool(self.recipe and self.recipe.optimizer.ema_decay)


def holds_model(path: Path) -> bool:
    """Whether a path is a model in a format of others: a folder with config.json, a GGUF file, or a folder with one."""
    return (path / "config.json").is_file() or find_gguf(path) is not None


def find_weights(path: Path, needs_tokenizer: bool = True) -> Weights:
    """The weights in a Hugging Face folder, a GGUF file or a folder with one, a checkpoint, or a run, which stands for the final checkpoint
    of its pretraining.

    Raises `UserError` if it is none of these, or if there is no tokenizer; without `needs_tokenizer` it may be missing, for a plan.
    """
    try:
        is_model = (path / "config.json").is_file()
        gguf = find_gguf(path)
    except OSError as error:  # a folder that is closed to us, a name that no file system has
        raise UserError(f"{str(path)[:200]} cannot be opened: {error.strerror}") from None
    if gguf is not None:
        folder = as_folder(gguf)
        model = from_config(_mapping(folder / "config.json"))
        return Weights("huggingface", folder, model, folder / "tokenizer.json", origin=gguf)
    if is_model:
        return Weights("huggingface", path, _published(path / "config.json"), _tokenizer(path, needs_tokenizer))
    if (path / "resolved.json").is_file():
        steps = [step for step in sorted((path / "checkpoints").glob("step-*")) if step_in(step.name) is not None]
        if not steps:
            raise UserError(f"the run {path} has no checkpoint yet")
        best = final_checkpoint_of(steps[-1], _meta(_mapping(steps[-1] / "meta.json")))
        path = best if best.is_dir() else steps[-1]
    if not (path / "meta.json").is_file():
        raise UserError(f"{path} is no Hugging Face folder (config.json), GGUF file, checkpoint (meta.json) or run (resolved.json)")
    document = _mapping(path / "meta.json")
    recipe = _recipe_of(path, document)
    meta = _meta(document)
    reached, names = meta.get("phase"), [phase.name for phase in recipe.train.phases]
    run_dirs = [folder for folder in path.absolute().parents[:3] if (folder / "tokenizer").is_dir()]
    tokenizer = _tokenizer(run_dirs[0] / "tokenizer" if run_dirs else path)
    return Weights("checkpoint", path, model_of(recipe, meta), tokenizer, recipe, reached if reached in names else None)


def _published(path: Path) -> Model:
    try:
        return from_config(_mapping(path))
    except UserError as error:
        raise UserError(f"{path.parent}: {error}") from None


def recorded(model: Model) -> dict[str, Any]:
    """What a checkpoint's meta says of the model in force, under `ARCHITECTURE`."""
    tree = as_tree(model)
    return {key: tree[key] for key in _CHANGED}


def model_of(recipe: Recipe, meta: Mapping[str, Any]) -> Model:
    """The model of a checkpoint with this meta: positions and windows as they are recorded, or without a record those of the phase that
    it had reached, or of the last phase.

    Raises `UserError` if the record is damaged.
    """
    names, reached = [phase.name for phase in recipe.train.phases], meta.get("phase")
    model = in_force(recipe)[names.index(reached)] if reached in names else final(recipe)
    changed = meta.get(ARCHITECTURE, {"rope": meta["rope"]} if "rope" in meta else {})  # earlier checkpoints recorded the positions alone
    try:
        return Model.model_validate(as_tree(model) | {key: changed[key] for key in _CHANGED if key in changed})
    except (ValidationError, TypeError):
        raise UserError("the positions or windows in a checkpoint's meta.json are damaged; use another checkpoint") from None


def _meta(document: Mapping[str, Any]) -> dict[str, Any]:
    meta = document.get("meta")
    return meta if isinstance(meta, dict) else {}


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
