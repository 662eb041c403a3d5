"""Conversion of a training state to named tensors and plain values, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lmworks import machine
from lmworks.checkpoint.communicator import Communicator
from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.checkpoint.tensor_files import Table
from lmworks.errors import UserError

State = dict[Any, Any]
_ALIGNED = 64  # bytes: a line of the processor's cache, and more than any type of number needs


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
    """A copy of the state in CPU memory, which later saves reuse: one piece of memory of the size of the state.

    If the state comes from a GPU, the piece is page-locked as a whole, so that it is filled at the speed of the bus; torch's own allocator
    would round each tensor up to a power of two. Where the ranks of this machine would together lock more than half of its memory, or the
    system refuses, nothing is locked: saves copy more slowly, and everything else on the machine keeps room.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._locked = 0  # bytes

    @torch.no_grad()
    def copy(self, slices: Sequence[TensorSlice]) -> list[TensorSlice]:
        """The slices, copied to CPU memory. The slices that the previous call returned are overwritten."""
        begins = [0, *accumulate(one.bytes + -one.bytes % _ALIGNED for one in slices)]
        if self._memory.numel() != begins[-1]:
            self.close()
            self._memory = torch.empty(begins[-1], dtype=torch.uint8)
            if any(one.values().is_cuda for one in slices):
                self._lock()
        copied, devices = [], set()
        for one, begin in zip(slices, begins, strict=False):
            values = one.values()
            kept = self._memory[begin : begin + one.bytes].view(one.dtype).view(values.shape)
            kept.copy_(values, non_blocking=values.is_cuda)
            copied.append(replace(one, values=partial(_given, kept)))
            devices |= {values.device} if values.is_cuda else set()
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        return copied

    def _lock(self) -> None:
        size = self._memory.numel()
        if size * machine.ranks_here()[1] > machine.memory() / 2:
            return
        if int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0)) == 0:
            self._locked = size
        else:
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")  # takes the error, which the next kernel would report otherwise

    def close(self) -> None:
        """Free the memory."""
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._locked = torch.empty(0, dtype=torch.uint8), 0


def _given(values: Tensor) -> Tensor:
    return values
