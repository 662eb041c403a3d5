"""The door to trained models: from a run, a checkpoint, a GGUF file or a Hugging Face folder, with their tokenizer."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.host.devices import dtype_for
from lmworks.inference.model import for_inference
from lmworks.io.files import read_json
from lmworks.io.run_layout import BASE, MODELS, final_checkpoint_of, of_checkpoint, of_model
from lmworks.model import Transformer
from lmworks.recipe.changes import canonical
from lmworks.recipe.hub import locate
from lmworks.recipe.load import load_resolved
from lmworks.recipe.phases import extended
from lmworks.recipe.schema.artifacts import RopeExtension
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import Weights, find_weights, holds_model
from lmworks.tokenizer import load as load_tokenizer
from lmworks.tokenizer.named import tokenizer_files
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.weights.chat import base_is_chat, is_chat
from lmworks.weights.reference import files_behind, hash_of
from lmworks.weights.run_models import final_model, folder, load_checkpoint, load_model

_UNSTATED = 2048  # tokens of context, for a model that states none
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class OpenModel:
    """A model with its tokenizer.

    `context` is the number of tokens that it was trained to look back on; `chat` says whether it was tuned on conversations; `name` is for
    people; `precision` is that of its activations, "fp32" or "bf16". `recipe` is the one that it was trained with, None in a format of
    others.
    """

    model: Transformer
    tokenizer: Tokenizer
    context: int
    chat: bool
    name: str
    precision: str = "fp32"
    recipe: Recipe | None = None


def open_model(
    where: str | Path, device: torch.device | str | None = None, as_stored: bool = False, rope: RopeExtension | None = None
) -> OpenModel:  # fmt: skip
    """Open a run, a checkpoint, a GGUF file, a Hugging Face folder of one of our families, or what `locate` finds by its name, on `device`
    (the first GPU, else the CPU).

    A run stands for its tuned model, or for its base model where it has no other. `RUN@base` and `RUN@tuned` name one of the two, and
    `RUN@STEP` the checkpoint of pretraining at that step. The activations have the precision that the model was trained in (fp32 for fp16),
    and so have the weights, which are cast once, before they come to the device; with `as_stored` they stay in fp32. `rope` extends the
    context beyond the trained one.

    Raises `UserError` if there is no model, if its positions cannot be extended, if it is damaged, or if the tokenizer beside it is that of
    another model.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    where = locate(where)
    path, chosen = _split(where)
    if holds_model(path):
        opened = _open_huggingface(find_weights(path), device)
    elif (path / "resolved.json").is_file():
        opened = _open_run(path, chosen, device)
    else:
        opened = _open_checkpoint(find_weights(path), device)
    if rope is not None:
        opened.model.configure(extended(opened.model.config, opened.context, rope))
        opened = replace(opened, context=int(opened.model.config.max_position_embeddings or 0))
    model = opened.model.to(device) if as_stored else for_inference(opened.model, device=device, consume=True, join=False)
    opened = replace(opened, model=model)
    rows = opened.model.config.vocab_size
    if rows and opened.tokenizer.vocab_size > rows:
        raise UserError(
            f"the tokenizer in {opened.tokenizer.directory} has {opened.tokenizer.vocab_size} entries, but the model in {where} has "
            f"{rows}; put the tokenizer there that the model was trained with"
        )
    return opened


def weights_hash(where: str | Path) -> str:
    """A hash of the weights that `open_model` opens: of the tensors of a checkpoint, for a run the newest one, or of the files of a model
    in a format of others and of its tokenizer and chat template, which are read once and kept by size and time. Empty where a checkpoint
    does not say what its tensors are.

    Raises `UserError` if there is no model.
    """
    path, chosen = _split(locate(where))
    if (path / "resolved.json").is_file() and not holds_model(path):
        if chosen is not None and chosen.isascii() and chosen.isdecimal():
            return listing.content_of(folder(path, BASE.model) / listing.name_of(int(chosen)))
        return listing.content(folder(path, chosen if chosen in MODELS else final_model(path)))
    weights = find_weights(path)
    if weights.kind == "checkpoint":
        return listing.content_of(weights.path)
    beside = {} if weights.origin else {name: (weights.path / name).resolve() for name in tokenizer_files(weights.path)}
    hashes = {name: hash_of(file) for name, file in (files_behind(weights) | beside).items()}
    return hashlib.sha256(canonical(hashes)).hexdigest()[:16]


def _split(where: str) -> tuple[Path, str | None]:
    """The directory, and what stands behind its @."""
    path = Path(where).expanduser()
    before, at, chosen = where.rpartition("@")
    if path.exists() or not at:
        if not path.exists():
            raise UserError(f"{where} does not exist; give a run directory, a checkpoint, a GGUF file, or a folder in Hugging Face format")
        return path, None
    path = Path(before).expanduser()
    if not (path / "resolved.json").is_file():
        raise UserError(f"{before} is not a run directory (it has no resolved.json), so @{chosen} chooses nothing in it")
    return path, chosen


def _open_run(run_dir: Path, chosen: str | None, device: torch.device) -> OpenModel:
    name = run_dir.resolve().name
    if chosen is not None and chosen.isascii() and chosen.isdecimal():
        path = folder(run_dir, "base") / listing.name_of(int(chosen))
        if not path.is_dir():
            there = ", ".join(str(listing.step_of(one)) for one in listing.directories(folder(run_dir, "base"))) or "none"
            raise UserError(f"{run_dir} has no checkpoint of step {int(chosen)}; the steps there are: {there}")
        return _open_checkpoint(find_weights(path), device)
    if chosen not in (None, *MODELS):
        raise UserError(f"{run_dir}@{chosen}: behind the @ stands {', '.join(MODELS)} or the step of a checkpoint")
    recipe = load_resolved(run_dir / "resolved.json")
    which = chosen or final_model(run_dir, recipe)
    if which != BASE.model and not listing.directories(folder(run_dir, which)):
        raise UserError(f"{run_dir} has no {which} model; use {run_dir}@base, or train it with: lmworks {of_model(which).stage} RECIPE")
    precision = _precision(recipe.train.precision, device)
    model = load_model(run_dir, which, dtype_for(precision, device), _HOST)
    context = context_length(recipe, model, _reached_phase(run_dir))
    chat = which != BASE.model or base_is_chat(run_dir, recipe)
    return OpenModel(model, load_tokenizer(run_dir / "tokenizer"), context, chat, f"{name}@{which}", precision, recipe)


def _reached_phase(run_dir: Path) -> str | None:
    """The phase in which pretraining ended; None where its checkpoints are gone, which later models do not need. Nothing is hashed here:
    `load_model` has verified what it loads, and has passed over damaged ones."""
    for newest in reversed(listing.directories(folder(run_dir, BASE.model))):
        with suppress(UserError, OSError):
            meta = listing.read_meta(newest)["meta"]
            final = final_checkpoint_of(newest, meta)
            phase = (listing.read_meta(final)["meta"] if final.is_dir() else meta).get("phase")
            return None if phase is None else str(phase)
    return None


def _open_checkpoint(weights: Weights, device: torch.device) -> OpenModel:
    recipe, path = weights.recipe, weights.path.resolve()
    assert recipe is not None
    stage, run_dir = of_checkpoint(path)
    precision = _precision(recipe.train.precision, device)
    model = load_checkpoint(weights, dtype_for(precision, device), _HOST)
    step = listing.read_meta(path)["step"]
    name = f"{run_dir.name}@{'' if stage is BASE else f'{stage.model}-'}{step}"
    context = context_length(recipe, model, weights.phase)
    return OpenModel(model, load_tokenizer(weights.tokenizer.parent), context, is_chat(weights), name, precision, recipe)


def _open_huggingface(weights: Weights, device: torch.device) -> OpenModel:
    from lmworks.weights.huggingface import read_model

    path = weights.path
    stored = str(read_json(path / "config.json").get("dtype") or read_json(path / "config.json").get("torch_dtype"))
    precision = _precision("auto" if stored == "bfloat16" else "fp32", device)
    model = read_model(path)
    model.compute_dtype = dtype_for(precision, device)
    tokenizer = load_tokenizer(path)
    context = int(model.config.max_position_embeddings or _UNSTATED)
    return OpenModel(model, tokenizer, context, is_chat(weights), weights.label, precision)


def _precision(asked: str, device: torch.device) -> str:
    """fp16 needs loss scaling in training and overflows without; measurements then use fp32."""
    return "bf16" if asked != "fp16" and dtype_for(asked, device) == torch.bfloat16 else "fp32"


def context_length(recipe: Recipe, model: Transformer, phase: str | None = None) -> int:
    """Tokens that the model was trained to look back on: the sequence length of the phase that it had reached, by default the last one, or
    what a base model from elsewhere states."""
    phases = {one.name: one for one in recipe.train.phases}
    if phases:
        return int(phases.get(phase or "", recipe.train.phases[-1]).sequence_length)
    stated = int(model.config.max_position_embeddings or _UNSTATED)
    if recipe.tune:  # it may reach much further than there is memory for
        return min(stated, max(_UNSTATED, int(recipe.tune.sequence_length)))
    return stated
