"""Stacked experts in MXFP4, as gpt-oss is published: read as the values that they stand for.

Each 32 numbers along the inputs share a scale, a power of two in one byte (E8M0, biased by 127), and have four bits each (E2M1), two in a
byte, the lower first (OCP Microscaling Formats, version 1.0). `NAME_blocks` (E, out, in / 32, 16) and `NAME_scales` (E, out, in / 32) are
read as `NAME` (E, in, out), the order of the class. All values are exact in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.errors import UserError

BLOCKS, _SCALES = "_blocks", "_scales"
_SIZE, _BIAS, _NAN = 32, 127, 255
_VALUES = torch.tensor([sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])


class Mxfp4:
    """An open file. `where` has the file of each tensor, since scales may lie in another one than their blocks."""

    def __init__(self, directory: Path, handle: Any, where: Mapping[str, Any]) -> None:
        self._directory, self._handle, self._where = directory, handle, where

    def keys(self) -> list[str]:
        return [name.removesuffix(BLOCKS) for name in self._handle.keys() if not name.endswith(_SCALES)]  # noqa: SIM118

    def get_slice(self, name: str) -> Any:
        if name in self._where:
            return self._where[name].get_slice(name)
        blocks = self._where[name + BLOCKS].get_slice(name + BLOCKS)
        if name + _SCALES not in self._where:
            raise UserError(f"{self._directory} has no tensor {name + _SCALES}, the scales of {name + BLOCKS}; download the files again")
        scales = self._where[name + _SCALES].get_slice(name + _SCALES)
        shape, of_scales = tuple(blocks.get_shape()), tuple(scales.get_shape())
        if len(shape) != 4 or shape[3] != _SIZE // 2 or of_scales != shape[:3]:
            raise UserError(
                f"{self._directory}: tensors {name}{BLOCKS} and {_SCALES} have shapes {shape} and {of_scales}, which are not those of "
                f"MXFP4: (experts, outputs, inputs / {_SIZE}, {_SIZE // 2}), and the same without the last"
            )
        for stored, suffix in ((blocks, BLOCKS), (scales, _SCALES)):
            if stored.get_dtype() != "U8":
                raise UserError(f"{self._directory}: tensor {name}{suffix} holds {stored.get_dtype()}, and MXFP4 is bytes (U8)")
        return _Slice(f"{self._directory}: tensor {name}{_SCALES}", blocks, scales)

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.get_slice(name)[:]
        return found


@dataclass(frozen=True)
class _Slice:
    """A stack of matrices (E, in, out) in blocks (E, out, in / 32, 16)."""

    name: str
    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        experts, outputs, groups, _ = self.blocks.get_shape()
        return [experts, _SIZE * groups, outputs]

    def __getitem__(self, key: Any) -> Tensor:
        keys = [*(key if isinstance(key, tuple) else (key,)), *[slice(None)] * 3]
        experts, (begin, end, _), outputs = keys[0], keys[1].indices(self.get_shape()[1]), keys[2]
        groups = slice(begin // _SIZE, -(-end // _SIZE))
        values = dequantize(self.blocks[experts, outputs, groups], self.scales[experts, outputs, groups], self.name)
        first = groups.start * _SIZE
        return values[..., begin - first : end - first].transpose(1, 2)


def dequantize(blocks: Tensor, scales: Tensor, name: str) -> Tensor:
    """The values (..., 32 G) in fp32 of blocks (..., G, 16) and scales (..., G). Raises `UserError` for a scale that is no number."""
    if bool((scales == _NAN).any()):
        raise UserError(f"{name} has a scale that is not a number (255); the file is damaged")
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(_VALUES[pairs.int()], scales.int()[..., None] - _BIAS).flatten(-2)
