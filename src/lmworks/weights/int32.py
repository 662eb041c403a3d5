"""Matrices in the layouts of AWQ and GPTQ, read as the values that they stand for: (number - zero point) * scale.

Both store the transpose, (in, out): `MODULE.qweight` in place of `MODULE.weight`, with `qzeros` (groups, out), packed along the columns,
and `scales` (groups, out). A group is some consecutive inputs, or with `g_idx` (in,) those that it assigns. AWQ ("gemm") packs `qweight`
along the columns, the eight numbers of a word in the order 0, 2, 4, 6, 1, 3, 5, 7; GPTQ along the rows, the lowest bits first. GPTQ's
first format stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.errors import UserError

WEIGHT = ".qweight"
_PARTS = (".qzeros", ".scales", ".g_idx")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word each of eight numbers is


@dataclass(frozen=True)
class Layout:
    """`bits` of a number; `group` inputs share a scale, all of them if it is None; `awq` chooses between the two layouts; `offset` is added
    to stored zero points."""

    bits: int
    group: int | None
    awq: bool
    offset: int


def layout(directory: Path, given: Mapping[str, Any]) -> Layout:
    """The layout that a quantization_config of the method awq or gptq states. Raises `UserError` for others."""
    bits, group = given.get("bits", given.get("w_bit")), given.get("group_size", given.get("q_group_size"))
    awq = given.get("quant_method") == "awq"
    form = str(given.get("version", "gemm")).lower() if awq else str(given.get("checkpoint_format", "gptq")).lower()
    known = bits == 4 and form == "gemm" if awq else bits in (2, 4, 8) and form in ("gptq", "gptq_v2")
    if not known or type(group) is not int or (group < 1 and group != -1):
        raise UserError(
            f"{directory} is quantized with {'awq' if awq else 'gptq'} ({str(bits)[:40]} bits, format {form[:40]}, groups of "
            f"{str(group)[:40]}); lmworks reads AWQ of 4 bits (gemm) and GPTQ of 2, 4 or 8 bits (gptq, gptq_v2): take a model in one of "
            "these, or the one that it was made from"
        )
    return Layout(bits, None if group == -1 else group, awq, int(form == "gptq"))


class Int32:
    """An open file. `where` has the file of each tensor, since scales may lie in another one than their weights."""

    def __init__(self, directory: Path, handle: Any, where: Mapping[str, Any], form: Layout) -> None:
        self._directory, self._handle, self._where, self._form = directory, handle, where, form

    def keys(self) -> list[str]:
        names = [name for name in self._handle.keys() if not self._is_part(name)]  # noqa: SIM118
        return [f"{name.removesuffix(WEIGHT)}.weight" if name.endswith(WEIGHT) else name for name in names]

    def _is_part(self, name: str) -> bool:
        return any(name.removesuffix(end) + WEIGHT in self._where for end in _PARTS if name.endswith(end))

    def get_slice(self, name: str) -> Any:
        if name in self._where:
            return self._where[name].get_slice(name)
        module, form = name.removesuffix(".weight"), self._form
        for end in (".qzeros", ".scales"):
            if module + end not in self._where:
                raise UserError(f"{self._directory} has no tensor {module}{end}, a part of {module}{WEIGHT}; download the files again")
        parts = {end: self._where[module + end].get_slice(module + end) for end in (WEIGHT, *_PARTS) if module + end in self._where}
        shapes = {end: tuple(part.get_shape()) for end, part in parts.items()}
        each, (rows, _), (groups, outputs) = 32 // form.bits, *((*shapes[end], 0, 0)[:2] for end in (WEIGHT, ".scales"))
        inputs = rows if form.awq else rows * each
        expected: dict[str, tuple[int, ...]] = {WEIGHT: (inputs, outputs // each) if form.awq else (inputs // each, outputs)}
        expected[".qzeros"] = (groups, outputs // each)
        expected[".g_idx"] = (inputs,)
        expected[".scales"] = (-(-inputs // (form.group or max(inputs, 1))), outputs)
        wrong = [f"{end} holds {parts[end].get_dtype()} and not I32" for end in (WEIGHT, ".qzeros") if parts[end].get_dtype() != "I32"]
        wrong += [f"{end} has shape {shapes[end]} and not {expected[end]}" for end in shapes if shapes[end] != expected[end]]
        if wrong:
            raise UserError(f"{self._directory}: tensor {module}{wrong[0]}; its quantization_config is that of another model")
        if ".g_idx" in parts and not bool(((group := parts[".g_idx"][:]) >= 0).logical_and(group < groups).all()):
            raise UserError(f"{self._directory}: tensor {module}.g_idx names groups that there are not; download the files again")
        return _Slice(parts, form, (outputs, inputs))

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.get_slice(name)[:]
        return found


@dataclass(frozen=True)
class _Slice:
    """A matrix of `shape` (out, in), in fp32. It is unpacked whole whatever is taken of it."""

    parts: Mapping[str, Any]
    form: Layout
    shape: tuple[int, int]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, key: Any) -> Tensor:
        form, inputs = self.form, self.shape[1]
        stored, zeros, scales = (self.parts[end][:] for end in (WEIGHT, ".qzeros", ".scales"))
        numbers = self._columns(stored) if form.awq else self._columns(stored.t()).t()
        zeros = self._columns(zeros) + form.offset & (1 << form.bits) - 1
        group = self.parts[".g_idx"][:].long() if ".g_idx" in self.parts else torch.arange(inputs) // (form.group or inputs)
        return ((numbers - zeros[group]).float() * scales.float()[group]).t()[key]

    def _columns(self, words: Tensor) -> Tensor:
        """Numbers (rows, columns) of words that hold some of a row each."""
        places = torch.tensor(_AWQ_ORDER) if self.form.awq else torch.arange(32 // self.form.bits)
        return (words[..., None] >> places.int() * self.form.bits & (1 << self.form.bits) - 1).flatten(1)
