"""From a training state to named tensors and plain values, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmworks.errors import UserError

State = dict[Any, Any]


def leaves(state: State, prefix: str = "") -> Iterator[tuple[str, State, Any]]:
    """(path, the dict that holds it, its key) of everything in nested dicts that is not a dict; path parts are joined with `/`."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", state, key


def split(state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by path, and by path the other values (numbers, text, lists of them), which go into JSON."""
    tensors, values = {}, {}
    for path, holder, key in leaves(state):
        value = holder[key]
        if isinstance(value, Tensor):
            tensors[path] = value
        else:
            values[path] = value
    return tensors, values


def put_values(state: State, values: dict[str, Any]) -> None:
    """Replace the plain values of `state` by the saved ones; a tuple stays a tuple."""
    for path, holder, key in list(leaves(state)):
        if not isinstance(holder[key], Tensor):
            holder[key] = tuple(values[path]) if isinstance(holder[key], tuple) else values[path]


def refuse_other_identity(where: str, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raise `UserError` naming the first keys in which two identities differ."""
    keys = [*here, *(key for key in there if key not in here)]
    _refuse(where, [f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in keys if there.get(key) != here.get(key)])


def refuse_other_tensors(where: str, state: State, table: dict[str, Any], values: dict[str, Any]) -> None:
    """Raise `UserError` naming the first tensors whose names, shapes or types differ from those of the checkpoint at `where`.

    Only the top-level parts that `state` has are compared, so that a reader of the weights need not know the optimizer.
    """
    tensors, plain = split(state)
    parts = {str(key) for key in state}
    here = {name: _kind(tensor.shape, str(tensor.dtype)) for name, tensor in tensors.items()} | dict.fromkeys(plain, "a value")
    there = {name: _kind(record["shape"], record["dtype"]) for name, record in table.items()} | dict.fromkeys(values, "a value")
    there = {name: kind for name, kind in there.items() if name.split("/")[0] in parts}
    names = [*here, *(name for name in there if name not in here)]
    differ = [name for name in names if here.get(name) != there.get(name)]
    _refuse(where, [f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here" for name in differ])


def _refuse(where: str, differences: list[str]) -> None:
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        what = f"{where} is a checkpoint of another model: {'; '.join(differences[:3])}{more}"
        raise UserError(f"{what}; use the recipe that it was trained with, or another run_dir")


def _kind(shape: Any, dtype: str) -> str:
    return f"{tuple(shape)} {dtype.removeprefix('torch.')}"


class Staging:
    """A copy of the state that training may not touch, in memory that is reused by the next save (pinned beside a GPU)."""

    def __init__(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        gpu = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu)
        )

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, copied to CPU memory when this returns. What the call before returned is overwritten."""
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict), "asynchronous staging is off"
        return staged

    def close(self) -> None:
        """Free the memory."""
        self._stager.close()
