"""Conversion of a training state to named tensors and plain values, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint.communicator import Communicator
from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.checkpoint.tensor_files import Table
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
    """Replace the plain values of `state` by the saved ones. Tuples stay tuples."""
    for path, holder, key in list(leaves(state)):
        if not isinstance(holder[key], Tensor):
            holder[key] = tuple(values[path]) if isinstance(holder[key], tuple) else values[path]


def refuse_other_identity(where: str, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Raise `UserError` naming the first keys in which two identities differ."""
    keys = [*here, *(key for key in there if key not in here)]
    differ = [f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in keys if there.get(key) != here.get(key)]
    _refuse(where, differ, len(differ))


def refuse_other_tensors(where: str, state: State, table: Table, values: dict[str, Any], communicator: Communicator) -> None:
    """Raise `UserError` naming the first tensors whose names, shapes or types differ from those of the checkpoint at `where`.

    Only the top-level parts that `state` has are compared, so that a reader of the weights need not know the optimizer. Together
    the ranks must hold every tensor; a single rank may hold some of them.
    """
    tensors, plain = split(state)
    here = {name: _kind(tensor.shape, str(tensor.dtype)) for name, tensor in tensors.items()} | dict.fromkeys(plain, "a value")
    there = {name: _kind(record.shape, str(record.dtype)) for name, record in table.items()} | dict.fromkeys(values, "a value")
    roots = {str(key) for key in state}
    held = torch.tensor([[name in here for name in there], [name.split("/")[0] in roots for name in there]], dtype=torch.uint8)
    held, asked = communicator.all_reduce_max(held).tolist()
    absent = [name for name, is_held, is_asked in zip(there, held, asked, strict=True) if is_asked and not is_held]
    differ = [name for name in here if here[name] != there.get(name)]
    found = [f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here" for name in (*differ, *absent)]
    _refuse(where, next((one for one in communicator.all_gather(found[:4]) if one), []), len(found))


def _refuse(where: str, differences: list[str], count: int) -> None:
    if differences:
        more = f" (and {count - 3} more)" if count > 3 else ""
        what = f"{where} is a checkpoint of another model: {'; '.join(differences[:3])}{more}"
        raise UserError(f"{what}; use the recipe that it was trained with, or another run_dir")


def _kind(shape: Any, dtype: str) -> str:
    return f"{tuple(shape)} {dtype.removeprefix('torch.')}"


class Staging:
    """A copy of the state in CPU memory, which later saves reuse (pinned if it comes from a GPU)."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, slices: Sequence[TensorSlice]) -> list[TensorSlice]:
        """The slices, copied to CPU memory. The slices that the previous call returned are overwritten."""
        before, self._kept = self._kept, {}
        for one in slices:
            values, kept = one.values(), before.get(one.name)
            if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
                kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._kept[one.name] = kept.copy_(values, non_blocking=values.is_cuda)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return [replace(one, values=partial(self._kept.__getitem__, one.name)) for one in slices]

    def close(self) -> None:
        """Free the memory."""
        self._kept = {}
