"""Checkpoints whose weights are stored in FP8 or MXFP4, with scales: read as the values that they stand for. Other quantizations are
refused.

MXFP4 is in `lmworks.weights.mxfp4`. The two forms of FP8 in published models: `quant_method: fp8`, with one scale for each block of
128 x 128 weights (DeepSeek-V3, Qwen3-FP8) in `NAME_scale_inv`; and `compressed-tensors`, with one scale for each row, or one for all, in
`NAME_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.weights.mxfp4 import BLOCKS, Mxfp4

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale_inv", "_scale")
_UNUSED = (".input_scale", ".activation_scale")  # of activations, which are not quantized here
_INSTEAD = "take the original model, or write it again with dequantize() and save_pretrained(DIRECTORY) of transformers"


def dequantized(directory: Path, config: Mapping[str, Any], handles: dict[Path, Any]) -> dict[Path, Any]:
    """Open files of safetensors, of which those in FP8 or MXFP4 are read as what they stand for. Raises `UserError` for other
    quantizations."""
    given = config.get("quantization_config")
    if not given:
        return handles
    where = {name: handle for handle in handles.values() for name in handle.keys()}  # noqa: SIM118
    if isinstance(given, dict) and given.get("quant_method") == "mxfp4" and any(name.endswith(BLOCKS) for name in where):
        return {file: Mxfp4(directory, handle, where) for file, handle in handles.items()}
    block = _block(directory, given)
    return {file: _Dequantized(directory, handle, where, block) for file, handle in handles.items()}


def _block(directory: Path, given: Any) -> tuple[int, int] | None:
    """Rows and columns of the blocks that have a scale; None for rows, or for one scale for all."""
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "fp8":
        return _pair(directory, given.get("weight_block_size"))
    if method == "compressed-tensors":
        groups = given.get("config_groups")
        kinds = [one.get("weights") or {} for one in groups.values()] if isinstance(groups, dict) else []
        if kinds and all(isinstance(one, dict) and (one.get("num_bits"), one.get("type")) == (8, "float") for one in kinds):
            found = {_pair(directory, one.get("block_structure")) for one in kinds}
            if len(found) == 1 and given.get("kv_cache_scheme") is None:
                return found.pop()
        stated = {f"{one.get('num_bits')} bits of {one.get('type')}" for one in kinds if isinstance(one, dict)}
        bits = ", ".join(sorted(stated)) or "no groups"
        raise UserError(f"{directory} is quantized with compressed-tensors ({bits}); lmworks reads FP8 weights only: {_INSTEAD}")
    raise UserError(f"{directory} is quantized with {str(method)[:40]} (quantization_config), which lmworks does not read: {_INSTEAD}")


def _pair(directory: Path, given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2 or not all(type(one) is int and one > 0 for one in given):
        raise UserError(f"{directory}: quantization_config has blocks of {str(given)[:40]}, which are not two numbers")
    return given[0], given[1]


class _Dequantized:
    """An open file. `where` has the file of each tensor, since a scale may lie in another one than its weights."""

    def __init__(self, directory: Path, handle: Any, where: Mapping[str, Any], block: tuple[int, int] | None) -> None:
        self._directory, self._handle, self._where, self._block = directory, handle, where, block

    def keys(self) -> list[str]:
        return [name for name in self._handle.keys() if not name.endswith(_UNUSED) and not self._is_scale(name)]  # noqa: SIM118

    def _is_scale(self, name: str) -> bool:
        return any(name.endswith(end) and name.removesuffix(end) in self._where for end in _SCALES)

    def get_slice(self, name: str) -> Any:
        plain = self._handle.get_slice(name)
        found = [scale for end in _SCALES if (scale := f"{name}{end}") in self._where]
        if not found:
            return plain
        shape, scale = plain.get_shape(), self._where[found[0]].get_tensor(found[0]).float()
        wanted = [-(-size // by) for size, by in zip(shape, self._block, strict=True)] if self._block and len(shape) == 2 else None
        if list(scale.shape) != wanted and scale.numel() not in (1, shape[0]):
            fit = f"{tuple(scale.shape)}, which does not fit {name}, {tuple(shape)}"
            raise UserError(f"{self._directory}: tensor {found[0]} has shape {fit}")
        return _Slice(plain, scale, self._block if list(scale.shape) == wanted else None)

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.get_slice(name)[:]
        return found


@dataclass(frozen=True)
class _Slice:
    """A tensor in FP8 with its scale: one for each block, for each row, or for all."""

    plain: Any
    scale: Tensor
    block: tuple[int, int] | None

    def get_shape(self) -> list[int]:
        return list(self.plain.get_shape())

    def __getitem__(self, key: Any) -> Tensor:
        keys, shape = key if isinstance(key, tuple) else (key,), self.get_shape()
        stored = self.plain[key]
        if stored.dtype not in _FP8:
            raise UserError(f"a tensor with a scale holds {str(stored.dtype).removeprefix('torch.')}, not FP8; lmworks does not read it")
        rows, *columns = (torch.arange(size)[one] for size, one in zip(shape, (*keys, *[slice(None)] * len(shape)), strict=False))
        if self.block is not None:
            return stored.float() * self.scale[rows // self.block[0]][:, columns[0] // self.block[1]]
        scale = self.scale.reshape(-1) if self.scale.numel() == 1 else self.scale.reshape(-1)[rows]
        return stored.float() * scale.reshape(-1, *[1] * len(columns))
