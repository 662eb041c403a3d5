"""Checkpoints whose weights are stored in FP8, MXFP4 or integers, with scales: read as the values that they stand for. Other
quantizations are refused.

MXFP4 is in `lmworks.weights.mxfp4`, AWQ, GPTQ and AutoRound in `lmworks.weights.int32`. `quant_method: fp8` has one scale for each block
of 128 x 128 weights (DeepSeek-V3, Qwen3-FP8), in `NAME_scale_inv`. `compressed-tensors` has one for all weights, for each row, or for each
group of columns, in `NAME_scale`: of FP8, of int8, or of integers of 4 or 8 bits that are packed into int32 along a row, the lowest bits
first (`NAME_packed`, with `NAME_shape`). The integers may have zero points (`NAME_zero_point`, packed along the rows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.io.files import explain_damage, read_json
from lmworks.weights.int32 import Int32, layout
from lmworks.weights.mxfp4 import BLOCKS, Mxfp4

_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
_PACKED, _SHAPE, _ZERO = "_packed", "_shape", "_zero_point"
_UNUSED = (".input_scale", ".input_zero_point", ".activation_scale")  # of activations, which are not quantized here
_FORMS = {("8", "float"), ("8", "int"), ("4", "int")}
_LAYOUTS = (None, "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
_Open = Callable[[Any], Any]  # an open file of safetensors -> the same with the values that its tensors stand for
_Reader = Callable[[Path, Any, Mapping[str, Any]], _Open]  # the folder, its quantization_config, and the file of each tensor
_LOADED = {  # how transformers has the dequantized model, by method
    "bitsandbytes": "M.from_pretrained(a).dequantize()",
    "compressed-tensors": "M.from_pretrained(a, quantization_config=t.CompressedTensorsConfig(dequantize=True))",
}


def instead(method: object) -> str:
    """The end of a refusal: what to do with a model in a quantization that lmworks does not read."""
    loaded = _LOADED.get(str(method))
    if loaded is None:
        return "take the model that it was made from"
    return (
        'take the model that it was made from, or write it again: python -c \'import sys, transformers as t; a, b = sys.argv[1:]; '
        f"M = t.AutoModelForCausalLM; s = {loaded}.state_dict(); c = t.AutoConfig.from_pretrained(a); del c.quantization_config; "
        "p = M.from_config(c); p.load_state_dict({k: s[k] for k in p.state_dict()}); p.save_pretrained(b); "
        "t.AutoTokenizer.from_pretrained(a).save_pretrained(b)' OLD NEW"
    )


_APART = {"quant_config.json": "awq", "quantize_config.json": "gptq"}  # files of early releases of AutoAWQ and AutoGPTQ -> their method


def stated(directory: Path, config: Mapping[str, Any]) -> Any:
    """The quantization_config of a model. Early releases of AutoAWQ and AutoGPTQ wrote it into a file of its own."""
    if given := config.get("quantization_config"):
        return given
    for name, method in _APART.items():
        if (apart := directory / name).is_file():
            with explain_damage(apart):
                return {"quant_method": method} | read_json(apart)
    return None


def dequantized(directory: Path, config: Mapping[str, Any], handles: dict[Path, Any]) -> dict[Path, Any]:
    """Open files of safetensors, of which those that are quantized are read as what they stand for. Raises `UserError` for other
    quantizations."""
    given = stated(directory, config)
    where = {name: handle for handle in handles.values() for name in handle.keys()}  # noqa: SIM118
    if not given:
        scaled = (name for name in where if any(name.removesuffix(end) in where for end in _SCALES if name.endswith(end)))
        if (scale := next(scaled, None)) is not None:
            raise UserError(
                f"{directory} has quantized weights ({scale} is a scale), but its config.json has no quantization_config, which says how; "
                "put the config.json there that belongs to these weights"
            )
        return handles
    method = given.get("quant_method") if isinstance(given, dict) else None
    _, reader = READERS.get(str(method), ("", _unknown))
    opened = reader(directory, given, where)
    return {file: opened(handle) for file, handle in handles.items()}


def _unknown(directory: Path, given: Any, where: Mapping[str, Any]) -> _Open:
    method = given.get("quant_method") if isinstance(given, dict) else None
    raise UserError(
        f"{directory} is quantized with {str(method)[:40]} (quantization_config), which lmworks does not read: {instead(method)}"
    )


def _fp8(directory: Path, given: Any, where: Mapping[str, Any]) -> _Open:
    blocks = _pair(directory, given.get("weight_block_size"))
    return lambda handle: _Dequantized(directory, handle, where, {8}, blocks)


def _mxfp4(directory: Path, given: Any, where: Mapping[str, Any]) -> _Open:
    if not any(name.endswith(BLOCKS) for name in where):
        return _unknown(directory, given, where)
    return lambda handle: Mxfp4(directory, handle, where)


def _compressed_tensors(directory: Path, given: Any, where: Mapping[str, Any]) -> _Open:
    bits, blocks = _forms(directory, given)
    return lambda handle: _Dequantized(directory, handle, where, bits, blocks)


def _int32(directory: Path, given: Any, where: Mapping[str, Any]) -> _Open:
    stated = layout(directory, given)
    return lambda handle: Int32(directory, handle, where, stated)


READERS: dict[str, tuple[str, _Reader]] = {
    "fp8": ("FP8", _fp8),
    "mxfp4": ("MXFP4", _mxfp4),
    "compressed-tensors": ("compressed-tensors", _compressed_tensors),
    "awq": ("AWQ", _int32),
    "gptq": ("GPTQ", _int32),
    "auto-round": ("AutoRound", _int32),
}
"""What is read, by `quant_method`: its name, and what opens its files."""


def _forms(directory: Path, given: Any) -> tuple[set[int], set[tuple[int, int]]]:
    """Bits of weights, and rows and columns of blocks that have a scale, where compressed-tensors states them: those of each group of
    layers."""
    groups = given.get("config_groups")
    kinds = [one.get("weights") or {} for one in groups.values()] if isinstance(groups, dict) else []
    stated = {(str(one.get("num_bits")), str(one.get("type"))) for one in kinds if isinstance(one, dict)}
    blocks = set[tuple[int, int]]().union(*(_pair(directory, one.get("block_structure")) for one in kinds if isinstance(one, dict)))
    others = [f"{key} {str(value)[:40]}" for key, value in given.items() if key in ("kv_cache_scheme", "transform_config") and value]
    others += [f"actorder {one['actorder']}" for one in kinds if isinstance(one, dict) and one.get("actorder") == "group"][:1]
    layouts = [given.get("format"), *(one.get("format") for one in (groups.values() if kinds else ()))]
    others += [f"format {str(one)[:40]}" for one in layouts if one not in _LAYOUTS][:1]
    if not others and stated and stated <= _FORMS:
        return {int(bits) for bits, _ in stated}, blocks
    said = ", ".join([*(sorted(f"{bits} bits of {kind}" for bits, kind in stated) or ["no groups"]), *others])
    raise UserError(
        f"{directory} is quantized with compressed-tensors ({said}); lmworks reads FP8, and integers of 4 or 8 "
        f"bits: {instead('compressed-tensors')}"
    )


def _pair(directory: Path, given: Any) -> set[tuple[int, int]]:
    """Rows and columns of a block, if the config states them."""
    if given is None:
        return set()
    if not isinstance(given, list) or len(given) != 2 or not all(type(one) is int and one > 0 for one in given):
        raise UserError(f"{directory}: quantization_config has blocks of {str(given)[:40]}, which are not two numbers")
    return {(given[0], given[1])}


class _Dequantized:
    """An open file. `where` has the file of each tensor, since a scale may lie in another one than its weights."""

    def __init__(self, directory: Path, handle: Any, where: Mapping[str, Any], bits: set[int], blocks: set[tuple[int, int]]) -> None:
        self._directory, self._handle, self._where, self._bits, self._stated_blocks = directory, handle, where, bits, blocks

    def keys(self) -> list[str]:
        names = [name for name in self._handle.keys() if not name.endswith(_UNUSED) and not self._is_part(name)]  # noqa: SIM118
        return [name.removesuffix(_PACKED) for name in names]

    def _is_part(self, name: str) -> bool:
        """Whether a tensor belongs to the weights of another one, as its scale does."""
        ends = (end for end in (*_SCALES, _SHAPE, _ZERO) if name.endswith(end))
        return any((stem := name.removesuffix(end)) in self._where or stem + _PACKED in self._where for end in ends)

    def get_slice(self, name: str) -> Any:
        stored = name + _PACKED if name + _PACKED in self._where else name
        plain = self._where[stored].get_slice(stored)
        end = next((end for end in _SCALES if name + end in self._where), None)
        if end is None:
            if stored != name or plain.get_dtype() in (*_FP8, "I8"):
                raise UserError(
                    f"{self._directory} has no scale of tensor {stored} ({name}{_SCALES[1]} or {_SCALES[0]}); download the files again"
                )
            return plain
        bits, shape = self._packed(name, plain) if stored != name else (None, tuple(plain.get_shape()))
        if bits is None and plain.get_dtype() not in (*_FP8, "I8"):
            raise UserError(f"tensor {name} has a scale and holds {plain.get_dtype()}, not FP8 or int8; lmworks does not read it")
        scale = self._tensor(name, end).float()
        block = self._blocks(name + end, scale, name, shape)
        zero = self._tensor(name, _ZERO) if name + _ZERO in self._where else None
        if zero is not None and bits is not None and zero.dtype == torch.int32 and zero.dim() == 2:
            zero = _unpacked(zero.t(), bits, shape[0]).t()
        if zero is not None and zero.numel() != scale.numel():
            raise UserError(f"{self._directory}: tensor {name}{_ZERO} does not fit {name}{end}, {tuple(scale.shape)}")
        return _Slice(plain, shape, bits, scale, zero, block)

    def _tensor(self, name: str, end: str) -> Tensor:
        if name + end not in self._where:
            raise UserError(f"{self._directory} has no tensor {name}{end}, which belongs to {name}{_PACKED}; download the files again")
        found: Tensor = self._where[name + end].get_tensor(name + end)
        return found

    def _packed(self, name: str, plain: Any) -> tuple[int, tuple[int, ...]]:
        """Bits of a number in a packed matrix, and its rows and columns. Each group of layers may have other bits."""
        shape, packed = tuple(self._tensor(name, _SHAPE).tolist()), tuple(plain.get_shape())
        if len(shape) == 2 and plain.get_dtype() == "I32":
            for bits in sorted(self._bits):
                if packed == (shape[0], -(-shape[1] * bits // 32)):
                    return bits, shape
        stated = " or ".join(map(str, sorted(self._bits)))
        raise UserError(
            f"{self._directory}: tensor {name}{_PACKED} has shape {packed}, which does not hold {shape} integers of {stated} bits"
        )

    def _blocks(self, of: str, scale: Tensor, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the weights that share a scale."""
        rows, columns = shape[0], shape[1] if len(shape) > 1 else 1
        for block in self._stated_blocks:
            if len(shape) == 2 and tuple(scale.shape) == (-(-rows // block[0]), -(-columns // block[1])):
                return block
        if scale.numel() == 1:
            return rows, columns
        if scale.numel() == rows:
            return 1, columns
        if len(shape) == scale.dim() == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
            return 1, columns // scale.shape[1]
        raise UserError(f"{self._directory}: tensor {of} has shape {tuple(scale.shape)}, which does not fit {name}, {shape}")

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.get_slice(name)[:]
        return found


def _unpacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Signed integers (rows, columns) of words (rows, W) of int32."""
    numbers = words[..., None] >> torch.arange(0, 32, bits) & (1 << bits) - 1
    return numbers.flatten(1)[:, :columns] - (1 << bits - 1)


@dataclass(frozen=True)
class _Slice:
    """A quantized tensor of `shape`: (stored - zero) * scale, in fp32.

    `plain` holds `bits` for each weight, packed; None if they are not packed. The weights of a block of rows and columns share a scale and
    a zero point.
    """

    plain: Any
    shape: tuple[int, ...]
    bits: int | None
    scale: Tensor
    zero: Tensor | None
    block: tuple[int, int]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, key: Any) -> Tensor:
        keys = [*(key if isinstance(key, tuple) else (key,)), *[slice(None)] * len(self.shape)][: len(self.shape)]
        stored = self.plain[tuple(keys)] if self.bits is None else _unpacked(self.plain[keys[0],], self.bits, self.shape[1])[:, keys[1]]
        rows, *columns = (torch.arange(size)[one] for size, one in zip(self.shape, keys, strict=True))

        def of_each(numbers: Tensor) -> Tensor:
            """Of each weight the number of its block."""
            by_row = numbers.reshape(-(-self.shape[0] // self.block[0]), -1)[rows // self.block[0]]
            if len(columns) != 1:
                return by_row.reshape(-1, *[1] * len(columns))
            return by_row[:, columns[0] // self.block[1]]

        values = stored.float() if self.zero is None else stored.float() - of_each(self.zero.float())
        return values * of_each(self.scale)
