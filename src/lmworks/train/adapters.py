"""Checkpoints of low-rank adapters: they hold the adapters only, and name the base model by the hash of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import Communicator
from lmworks.checkpoint.save_plan import local_slice
from lmworks.checkpoint.tensor_files import Reader
from lmworks.errors import UserError
from lmworks.io.run_layout import of_checkpoint
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.model import Lora, is_adapter, matrix_of_adapter
from lmworks.weights.reference import load_model

KEY = "lora"  # in a checkpoint's meta
_FREE = {"dropout", "init_from"}  # may change when a run resumes


def adapter_identity(lora: Lora | None, base: Path) -> dict[str, object]:
    """What a checkpoint of adapters must share with the model that it is loaded into, beside the model's own identity."""
    return {} if lora is None else {KEY: lora.model_dump(mode="json", exclude=_FREE) | {"base": listing.content_of(base)}}


def adapter_meta(lora: Lora | None, base: Path, run_dir: Path) -> dict[str, object]:
    """What the meta of a checkpoint of adapters says: their options, and the checkpoint of the base model, by its path in the run and by
    the hash of its tensors."""
    if lora is None:
        return {}
    return {KEY: {"options": lora.model_dump(mode="json"), "base": base.relative_to(run_dir).as_posix(), "hash": listing.content_of(base)}}


def adapters_of(path: Path) -> tuple[Lora, Path] | None:
    """The options of the adapters of a checkpoint, and the checkpoint of the base model; None if it holds whole weights.

    Raises `UserError` if the base model is not there or is another one.
    """
    about = listing.read_meta(path)["meta"].get(KEY)
    if about is None:
        return None
    base = _base(path, str(about["base"]))
    if not base.is_dir():
        raise UserError(f"{path} holds adapters of the base model {base}, which does not exist; copy it there")
    if listing.content_of(base) != about["hash"]:
        raise UserError(f"{path} holds adapters of another base model than {base}: its tensors have the hash {about['hash']}")
    if (reason := manifest.problem(base)) is not None:
        raise UserError(f"{base}, the base model of the adapters in {path}, is damaged ({reason}); restore it from a copy")
    return Lora.model_validate(about["options"]), base


def _base(path: Path, relative: str) -> Path:
    """The base checkpoint, by its path in the run that `path` belongs to."""
    return of_checkpoint(path)[1] / relative


@torch.no_grad()
def add_adapters(state: Mapping[str, Tensor], path: Path, options: Lora) -> None:
    """Add scale B A of a checkpoint of adapters to the weights of their base in `state`, of which this rank may hold slices."""
    prefix, reader = "model/", Reader(path)

    def read(name: str) -> Tensor:
        shape = reader.table[name].shape
        return reader.read_slice(name, (0,) * len(shape), shape)

    for name in sorted(name for name in reader.table if name.startswith(prefix) and name.endswith("lora.A")):
        matrix = matrix_of_adapter(name.removeprefix(prefix))
        if (part := local_slice(matrix, state[matrix])) is not None:
            delta = read(f"{name[:-1]}B") @ read(name) * options.scale
            box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            part.values().add_(delta[box].to(part.values().device))


def load_weights(
    path: Path, model: ParallelModel, identity: dict[str, Any], communicator: Communicator, averaged: bool
) -> dict[str, Any]:  # fmt: skip
    """Load the weights of a checkpoint into a model on any layout, averaged if the base has averages, adapters merged; returns its meta.

    The model may have adapters of its own, which stay as they are. Collective over the ranks of `communicator`.
    """
    if (low_rank := adapters_of(path)) is not None:
        options, base = low_rank
        load_weights(base, model, identity, communicator, averaged)
        add_adapters(model.base_state_dict(), path, options)
        return dict(listing.read_meta(path)["meta"])
    meta = load_model(path, {"model": model.base_state_dict()}, model.config, identity, verified=True, communicator=communicator)
    if averaged:
        average = {name: parameter.detach() for name, parameter in model.named_parameters() if not is_adapter(name)}
        load_model(path, {"average": average}, model.config, identity, verified=True, communicator=communicator)
    return meta
