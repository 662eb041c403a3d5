"""Classes that store the experts of a layer in one tensor (`Family.stacked`): read and written as if each expert had tensors of its own.

Such a tensor has, along its last dimension, in turn one output of each of its parts, and its matrices are transposed: (E, in, 2 out) of
gate and up, and (E, 2 out) of their biases. With `Family.stacked_rows` it is (E, 2 out, in), the rows of a part together. Of an expert
only what is asked for is read, and the next ones are not in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.recipe.families.family import Family
from lmworks.recipe.schema.model import Model
from lmworks.weights.names import huggingface_name, is_exported, packed_together


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{e\}", r"(?P<e>\d+|\{e\})") + r"\Z")


@lru_cache(maxsize=64)
def _stacks(family: Family) -> list[tuple[re.Pattern[str], str, tuple[str, ...]]]:
    return [(_pattern(stored), stored, parts) for stored, parts in family.stacked.items()]


@lru_cache(maxsize=64)
def _parts(family: Family) -> list[tuple[re.Pattern[str], str, int, int]]:
    return [
        (_pattern(part), stored, number, len(parts)) for stored, parts in family.stacked.items() for number, part in enumerate(parts)
    ]  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a tensor of an expert is stored: in which tensor, as which of its parts, and which expert it is ("{e}" for all); `rows` as
    `Family.stacked_rows`."""

    stored: str
    part: int
    parts: int
    expert: str
    rows: bool


def place_of(name: str, family: Family) -> Place | None:
    """The place of a tensor of an expert, by its name in the table of the family; None for a tensor of its own."""
    for pattern, stored, part, parts in _parts(family):
        if match := pattern.match(name):
            return Place(stored.replace("{i}", match["i"]), part, parts, match["e"], family.stacked_rows)
    return None


def split_stacks(handles: dict[Path, Any], family: Family) -> dict[Path, Any]:
    """Open files in which the stacked tensors of the family are those of single experts."""
    return {file: _Split(handle, family) for file, handle in handles.items()} if family.stacked else handles


class _Split:
    """An open file."""

    def __init__(self, handle: Any, family: Family) -> None:
        self._handle, self._family = handle, family

    def keys(self) -> list[str]:
        return [name for stored in self._handle.keys() for name in self._names(stored)]  # noqa: SIM118

    def _names(self, stored: str) -> Iterable[str]:
        found = next(((match["i"], parts) for pattern, _, parts in _stacks(self._family) if (match := pattern.match(stored))), None)
        if found is None:
            return [stored]
        layer, parts = found
        shape = self._handle.get_slice(stored).get_shape()
        experts = shape[0] if len(shape) > 1 else 0
        return [part.replace("{i}", layer).replace("{e}", str(expert)) for part in parts for expert in range(experts)]

    def get_slice(self, name: str) -> Any:
        place = place_of(name, self._family)
        return self._handle.get_slice(name) if place is None else _Slice(self._handle.get_slice(place.stored), place)

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.get_slice(name)[:]
        return found


@dataclass(frozen=True)
class _Slice:
    """The matrix (out, in) or the bias (out,) of one expert."""

    stored: Any
    place: Place

    def get_shape(self) -> list[int]:
        if self.place.rows:
            _, outputs, *inputs = self.stored.get_shape()
        else:
            _, *inputs, outputs = self.stored.get_shape()
        return [outputs // self.place.parts, *inputs]

    def __getitem__(self, key: Any) -> Tensor:
        rows, *inputs = key if isinstance(key, tuple) else (key,)
        begin, end, step = rows.indices(self.get_shape()[0])
        assert step == 1
        inputs = inputs or [slice(None)] * (len(self.get_shape()) - 1)
        expert, parts = int(self.place.expert), self.place.parts
        if self.place.rows:
            before = self.place.part * self.get_shape()[0]
            rows_of_part: Tensor = self.stored[(slice(expert, expert + 1), slice(before + begin, before + max(begin, end)), *inputs)][0]
            return rows_of_part
        read = self.stored[(slice(expert, expert + 1), *inputs, slice(parts * begin, parts * max(begin, end)))][0]
        own: Tensor = read[..., self.place.part :: parts]
        return own.t()


def stack(tensors: Mapping[str, Tensor], family: Family) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the names of the family's table, under those that it stores them by: all experts of a layer together. All parts of a
    stored tensor must be there (`stored_together`)."""
    waiting: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors.items():
        if (place := place_of(name, family)) is None:
            yield name, tensor
            continue
        waiting.setdefault(place.stored, {})[int(place.expert), place.part] = tensor
    for stored, found in waiting.items():
        experts, parts = (1 + max(numbers) for numbers in zip(*found, strict=True))
        if family.stacked_rows:
            yield stored, torch.stack([torch.cat([found[expert, part] for part in range(parts)]) for expert in range(experts)])
            continue
        whole = torch.stack([torch.stack([found[expert, part] for part in range(parts)], dim=1) for expert in range(experts)])
        yield stored, whole.flatten(1, 2).transpose(1, -1).contiguous()


def stored_together(names: Iterable[str], model: Model, family: Family) -> Iterator[tuple[str, ...]]:
    """Our names in order, those of parts of one tensor in a file together."""

    def stored(together: tuple[str, ...]) -> Sequence[str] | str:
        name = together[0]
        place = place_of(huggingface_name(name, model, family), family) if family.stacked and is_exported(name, family) else None
        return together if place is None else place.stored

    for _, groups in groupby(packed_together(names, model), stored):
        yield tuple(name for group in groups for name in group)
