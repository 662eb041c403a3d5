"""The weights of a trained checkpoint, and checkpoints of low-rank adapters: they hold the adapters only, and name the base model by the
hash of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import Communicator
from lmworks.checkpoint.save_plan import local_slice
from lmworks.checkpoint.state import SINGLE_PROCESS, refuse_damaged
from lmworks.checkpoint.tensor_files import Reader
from lmworks.errors import UserError
from lmworks.io.run_layout import of_checkpoint
from lmworks.recipe.former import translated
from lmworks.recipe.schema.model import Lora, Model, matrix_of_adapter
from lmworks.weights import reference

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
    return Lora.model_validate(translated(about["options"], Lora)), base


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


def load_trained(
    path: Path, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor] | None, model: Model,
    identity: dict[str, Any] | None = None, communicator: Communicator = SINGLE_PROCESS, verified: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Fill `state`, of which each rank may hold slices, with the weights of a checkpoint, adapters merged; returns its meta.

    `parameters` are the tensors of `state` that have an average, if the averages are to be loaded; None without averages. With `verified`
    the caller has compared the checkpoint's files with its manifest. Collective over the ranks of `communicator`. Raises `UserError`.
    """
    if (low_rank := adapters_of(path)) is not None:
        options, base = low_rank
        if not verified:
            refuse_damaged(path, communicator)
        load_trained(base, state, parameters, model, identity, communicator)
        add_adapters(state, path, options)
        return dict(listing.read_meta(path)["meta"])
    meta = reference.load_model(path, {"model": state}, model, identity, verified=verified, communicator=communicator)
    if parameters is not None:
        reference.load_model(path, {"average": parameters}, model, identity, verified=True, communicator=communicator)
    return meta
