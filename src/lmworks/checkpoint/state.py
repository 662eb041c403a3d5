"""Conversion of a training state to named tensors and plain values, and back.

Loading a checkpoint into a state, on any mesh layout.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import Communicator
from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.checkpoint.tensor_files import Table
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.files import explain_damage

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
    differ = listing.differences(here, there)
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


SINGLE_PROCESS = Communicator()


def load(
    path: Path, state: State, identity: dict[str, Any] | None = None, *, optional: Collection[str] = (),
    verified: bool = False, communicator: Communicator = SINGLE_PROCESS, local_files: Mapping[str, Path] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fill the tensors of `state` in place from the checkpoint at `path`, replace its plain values, and return the meta saved with it.

    Only the top-level parts that `state` has are read: `{"model": model.state_dict()}` leaves the optimizer alone. Those that are
    `optional` are taken out of `state` where the checkpoint has none of that name, as before they were switched on. The layout of
    DTensors may differ from that of the save. The ranks of `communicator` call it together and may hold different tensors. Each rank
    reads the slices that it holds; only rank 0 reads meta.json and the table of tensors. `verified` skips the hashing. `local_files`
    maps file names to copies that are read instead. Raises `UserError` if the checkpoint is damaged, or of another model (`identity`,
    where given, or names, shapes or types differ).
    """
    from lmworks.checkpoint import state as states
    from lmworks.checkpoint.tensor_files import TABLE, Reader, parse_table

    path = Path(path)
    if not verified:
        refuse_damaged(path, communicator)
    small, files = communicator.broadcast(communicator.run_on_all(lambda: _documents(path) if communicator.is_first else ({}, {})))
    try:
        document, table = listing.parse_meta(small[listing.META]), parse_table(small[TABLE], files)
    except ValueError as error:  # on all ranks alike: they have the same bytes
        raise _damaged(path, str(error)) from None
    if identity is not None:
        states.refuse_other_identity(str(path), identity, document["identity"])
    saved = {name.split("/")[0] for name in (*table, *document["values"])}
    for part in {*optional} - saved:
        state.pop(part, None)
    states.refuse_other_tensors(str(path), state, table, document["values"], communicator)
    parts = local_slices(state)
    communicator.run_on_all(lambda: Reader(path, table, local_files).fill(parts))
    with explain_damage(path / listing.META):
        states.put_values(state, document["values"])
    return dict(document["meta"])


def local_slices(state: State) -> list[Any]:
    """The slices of the tensors of a state that this rank holds, to be filled by `Reader.fill`."""
    from lmworks.checkpoint import state as states
    from lmworks.checkpoint.save_plan import local_slice

    tensors, _ = states.split(state)
    return [part for name, tensor in tensors.items() if (part := local_slice(name, tensor)) is not None]


def refuse_damaged(path: Path, communicator: Communicator = SINGLE_PROCESS) -> None:
    """Raise `UserError` if a file of the checkpoint does not match its hash."""
    reasons = communicator.all_gather(manifest.problem(path, share=(communicator.rank, communicator.size)))
    if (reason := next((one for one in reasons if one), None)) is not None:
        raise _damaged(path, reason)


def _documents(path: Path) -> tuple[dict[str, bytes], dict[str, manifest.Entry]]:
    """The metadata files of a checkpoint, and the files that its manifest names."""
    from lmworks.checkpoint.tensor_files import TABLE

    try:
        return {name: manifest.read_document(path / name) for name in (listing.META, TABLE)}, manifest.entries(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is damaged: {reason}; use another checkpoint (lmworks ckpt verify shows the good ones)")


def as_json(value: Any) -> Any:
    """The value as JSON returns it: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))
