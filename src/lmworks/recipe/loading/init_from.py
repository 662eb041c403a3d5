"""Weights to start from: reads the model and the tokenizer of a Hugging Face folder or of a checkpoint of another run.

`train.init_from` gives the recipe its shape and its tokenizer. The weights are read when training begins (`lmworks.run.init_weights`).
"""

from __future__ import annotations

import json
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
from lmworks.recipe.tree.effects import not_architecture
from lmworks.recipe.tree.paths import Keys, flatten, get, leaves, merge, put

_FREE = (*not_architecture(Model), "mtp")  # keys that may differ from those of the model of the weights
_STEP = re.compile(r"step-\d{8,}\Z")


@dataclass(frozen=True)
class Start:
    """The path of the weights (a checkpoint, or a Hugging Face folder), their model, and their tokenizer.json."""

    kind: Literal["huggingface", "checkpoint"]
    path: Path
    model: Model
    tokenizer: Path
    averaged: bool = False


def find(text: str) -> Start:
    """Resolve `train.init_from`: a Hugging Face folder, a checkpoint, or a run, of which the newest checkpoint is used."""
    path = Path(text).expanduser()
    if (path / "config.json").is_file():
        model = from_config(_mapping(path / "config.json"))
        return Start("huggingface", path, model, _tokenizer(path))
    if (path / "resolved.json").is_file():
        steps = [step for step in sorted((path / "checkpoints").glob("step-*")) if _STEP.match(step.name)]
        if not steps:
            raise UserError(f"train.init_from: the run {path} has no checkpoint yet")
        path = steps[-1]
    if not (path / "meta.json").is_file():
        raise UserError(f"train.init_from: {path} is no Hugging Face folder (config.json), checkpoint (meta.json) or run (resolved.json)")
    document = _mapping(path / "meta.json")
    recipe = _recipe_of(path, document)
    rope, meta = recipe.model.rope, document.get("meta")
    reached = meta.get("phase") if isinstance(meta, dict) else None
    names = [phase.name for phase in recipe.train.phases]
    for phase in recipe.train.phases[: names.index(reached) + 1 if reached in names else len(names)]:
        rope = phase.rope.apply(rope) if phase.rope else rope
    run_dirs = [folder for folder in path.absolute().parents[:3] if (folder / "tokenizer").is_dir()]
    tokenizer = _tokenizer(run_dirs[0] / "tokenizer" if run_dirs else path)
    return Start("checkpoint", path, recipe.model.model_copy(update={"rope": rope}), tokenizer, bool(recipe.optimizer.ema_decay))


def _mapping(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"train.init_from: {path} is not a JSON object")
    return found


def _recipe_of(path: Path, document: dict[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(document.get("recipe"))
    except ValidationError:
        raise UserError(f"train.init_from: {path} has no valid recipe; export that run and start from the export") from None


def _tokenizer(folder: Path) -> Path:
    found = folder / "tokenizer.json"
    if not found.is_file():
        raise UserError(f"train.init_from: {folder} has no tokenizer.json, which the weights need; put it there")
    return found


def take_model_from_weights(tree: dict[str, Any]) -> dict[Keys, str]:
    """Fill `model` and `tokenizer` of an unfinished tree from its `train.init_from`, in place; returns the reasons, by key.

    Raises `UserError` if the recipe contradicts the weights.
    """
    text = get(tree, ("train", "init_from"))
    if not isinstance(text, str):
        return {}
    start, why = find(text), f"of the weights in {text}"
    if tree.get("size") is not None:
        raise UserError("size cannot be combined with train.init_from, whose weights have a size; remove size")
    model, tokenizer = tree.get("model") or {}, tree.get("tokenizer") or {}
    if not isinstance(model, dict) or not isinstance(tokenizer, dict):
        return {}  # the type check that follows reports it
    own = json.loads(start.model.model_dump_json(exclude={"preset"}))
    given = {key: value for key, value in model.items() if value is not None or key == "mtp"}
    reasons = {("model", *keys): why for keys, _ in leaves(own) if get(given, keys) is None and not ("mtp" in given and keys[0] == "mtp")}
    tree["model"] = merge(given, own)
    _refuse_other_shape(start.model, tree["model"], text)
    path = tokenizer.get("path")
    if path is not None and Path(str(path)).expanduser().absolute() not in (start.tokenizer.absolute(), start.tokenizer.parent.absolute()):
        raise UserError(f"tokenizer.path is {path}, but train.init_from uses the tokenizer of its weights; remove tokenizer.path")
    put(tree, ("tokenizer", "path"), str(start.tokenizer))
    reasons["tokenizer", "path"] = why
    if tokenizer.get("vocab_size") is None:
        put(tree, ("tokenizer", "vocab_size"), start.model.vocab_size)
        reasons["tokenizer", "vocab_size"] = f"rows of the embedding {why}"
    elif isinstance(tokenizer["vocab_size"], int) and tokenizer["vocab_size"] > (start.model.vocab_size or 0) and "vocab_size" not in given:
        put(tree, ("model", "vocab_size"), tokenizer["vocab_size"])
        reasons["model", "vocab_size"] = "tokenizer.vocab_size, which is larger than the embedding of the weights; rows are added"
    return reasons


def _refuse_other_shape(own: Model, requested: dict[str, Any], text: str) -> None:
    try:
        here, there = (flatten(json.loads(model.model_dump_json())) for model in (Model.model_validate(requested), own))
    except ValidationError:
        return  # reported with its location when the whole recipe is checked
    for key in {**there, **here}:
        if here.get(key) == there.get(key) or any(key == free or key.startswith(f"{free}.") for free in _FREE):
            continue
        if key == "vocab_size" and here[key] > there[key]:
            continue
        raise UserError(
            f"model.{key} is {_said(here.get(key))} in the recipe and {_said(there.get(key))} in {text}, the weights of which are "
            f"used (train.init_from); remove model.{key}"
        )


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
