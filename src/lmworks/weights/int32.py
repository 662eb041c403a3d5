"""Matrices in the layouts of AWQ and GPTQ, read as the values that they stand for: (number - zero point) * scale.

Both store the transpose, (in, out): `MODULE.qweight` in place of `MODULE.weight`, with `qzeros` (groups, out), packed along the columns,
and `scales` (groups, out). A group is some consecutive inputs, or with `g_idx` (in,) those that it assigns. AWQ ("gemm") packs `qweight`
along the columns, the eight numbers of a word in the order 0, 2, 4, 6, 1, 3, 5, 7; GPTQ along the rows, the lowest bits first. GPTQ's
first format stores zero points minus one.

AutoRound writes either layout. Modules may have bits and groups of their own (`dynamic` of GPTQModel, `extra_config` of AutoRound). The
shapes of its tensors show which of the stated ones a module has, so the patterns that name modules are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmworks.errors import UserError

WEIGHT = ".qweight"
_PARTS = (".qzeros", ".scales", ".g_idx")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word each of eight numbers is
_FORMATS = {  # method and format -> whether the layout is AWQ's, and what is added to stored zero points
    ("awq", "gemm"): (True, 0), ("gptq", "gptq"): (False, 1), ("gptq", "gptq_v2"): (False, 0),
    **dict.fromkeys((("auto-round", "auto_round:auto_awq"), ("auto-round", "auto_round:awq")), (True, 0)),
    **dict.fromkeys((("auto-round", "auto_round:auto_gptq"), ("auto-round", "auto_round:gptq")), (False, 1)),
    **dict.fromkeys((("auto-round", "auto_round:gptqmodel"), ("auto-round", "auto_round")), (False, 0)),
}  # fmt: skip
_FORMAT_KEYS = {"awq": ("version", "gemm"), "gptq": ("checkpoint_format", "gptq"), "auto-round": ("packing_format", "auto_round:auto_gptq")}
_OVERRIDES = {"gptq": "dynamic", "auto-round": "extra_config"}  # where a method states what modules have of their own
_LAID_OUT = ("format", "checkpoint_format", "method", "quant_method", "pack_dtype", "packing_format", "data_type")
_PLAIN = 16  # bits of a module that is not quantized


@dataclass(frozen=True)
class Form:
    """`bits` of a number; `group` inputs share a scale, all of them if it is None."""

    bits: int
    group: int | None

    def __str__(self) -> str:
        return f"{self.bits} bits in groups of {self.group or 'all inputs'}"


@dataclass(frozen=True)
class Layout:
    """The stated `forms`, of which each matrix has one; `awq` chooses between the two layouts; `offset` is added to stored zero points."""

    forms: tuple[Form, ...]
    awq: bool
    offset: int


def layout(directory: Path, given: Mapping[str, Any]) -> Layout:
    """The layout that a quantization_config of the method awq, gptq or auto-round states. Raises `UserError` for others."""
    method = str(given.get("quant_method"))
    key, usual = _FORMAT_KEYS[method]
    form = str(given.get(key, usual)).lower()
    awq, offset = _FORMATS.get((method, form), (False, -1))
    forms: list[Form] = []
    for where, bits, group in _stated(directory, method, given):
        known = offset >= 0 and bits in ((4,) if awq else (2, 4, 8))
        if not known or type(group) is not int or (group < 1 and group != -1):
            raise UserError(
                f"{directory} is quantized with {method} ({where}{str(bits)[:40]} bits, format {form[:40]}, groups of {str(group)[:40]}); "
                "lmworks reads AWQ of 4 bits (gemm), GPTQ of 2, 4 or 8 bits (gptq, gptq_v2), and these two as AutoRound writes them "
                "(auto_round:auto_awq, auto_round:auto_gptq): take a model in one of these, or the one that it was made from"
            )
        forms.append(Form(bits, None if group == -1 else group))
    return Layout(tuple(dict.fromkeys(forms)), awq, offset)


def _stated(directory: Path, method: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Bits and group size of most modules, and of those that have others, with the pattern that names them."""
    bits, group = given.get("bits", given.get("w_bit")), given.get("group_size", given.get("q_group_size"))
    yield "", bits, group
    key = _OVERRIDES.get(method, "")
    overrides = given.get(key) or {}
    for pattern, own in overrides.items() if isinstance(overrides, dict) else [(key, None)]:
        if str(pattern).startswith("-") or (isinstance(own, dict) and own.get("bits") == _PLAIN):
            continue  # stored as a plain matrix
        other = ["form"] if not isinstance(own, dict) else [name for name in _LAID_OUT if name in own and own[name] != given.get(name)]
        if other or not isinstance(own, dict):
            raise UserError(
                f"{directory} is quantized with {method}; its {key} gives {str(pattern)[:60]!r} another {other[0]}, which lmworks does not "
                "read: take a model with one layout, or the one that it was made from"
            )
        yield f"{key} {str(pattern)[:60]!r}: ", own.get("bits", bits), own.get("group_size", group)


class Int32:
    """An open file. `where` has the file of each tensor, since scales may lie in another one than their weights."""

    def __init__(self, directory: Path, handle: Any, where: Mapping[str, Any], stated: Layout) -> None:
        self._directory, self._handle, self._where, self._stated = directory, handle, where, stated

    def keys(self) -> list[str]:
        names = [name for name in self._handle.keys() if not self._is_part(name)]  # noqa: SIM118
        return [f"{name.removesuffix(WEIGHT)}.weight" if name.endswith(WEIGHT) else name for name in names]

    def _is_part(self, name: str) -> bool:
        return any(name.removesuffix(end) + WEIGHT in self._where for end in _PARTS if name.endswith(end))

    def get_slice(self, name: str) -> Any:
        if name in self._where:
            return self._where[name].get_slice(name)
        module = name.removesuffix(".weight")
        for end in (".qzeros", ".scales"):
            if module + end not in self._where:
                raise UserError(f"{self._directory} has no tensor {module}{end}, a part of {module}{WEIGHT}; download the files again")
        parts = {end: self._where[module + end].get_slice(module + end) for end in (WEIGHT, *_PARTS) if module + end in self._where}
        for end in (WEIGHT, ".qzeros"):
            if (held := parts[end].get_dtype()) != "I32":
                raise UserError(f"{self._directory}: tensor {module}{end} holds {held} and not I32; lmworks does not read that")
        shapes = {end: tuple(part.get_shape()) for end, part in parts.items()}
        expected = {form: self._shapes(form, shapes) for form in self._stated.forms}
        form = next((form for form in expected if all(shapes[end] == expected[form][end] for end in shapes)), None)
        if form is None:
            usual = expected[self._stated.forms[0]]
            wrong = next(end for end in shapes if shapes[end] != usual[end])
            raise UserError(
                f"{self._directory}: tensor {module}{wrong} has shape {shapes[wrong]} and not {usual[wrong]}; its quantization_config "
                f"({', '.join(map(str, self._stated.forms))}) is that of another model"
            )
        groups, outputs = shapes[".scales"]
        if ".g_idx" in parts and not bool(((group := parts[".g_idx"][:]) >= 0).logical_and(group < groups).all()):
            raise UserError(f"{self._directory}: tensor {module}.g_idx names groups that there are not; download the files again")
        return _Slice(parts, form, self._stated, (outputs, self._inputs(form, shapes)))

    def _inputs(self, form: Form, shapes: Mapping[str, tuple[int, ...]]) -> int:
        rows = shapes[WEIGHT][0] if shapes[WEIGHT] else 0
        return rows if self._stated.awq else rows * (32 // form.bits)

    def _shapes(self, form: Form, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The shapes of the parts of a matrix in this form: inputs by its packed numbers, outputs by its scales."""
        each, inputs, outputs = 32 // form.bits, self._inputs(form, shapes), (*shapes[".scales"], 0, 0)[1]
        groups = -(-inputs // (form.group or max(inputs, 1)))
        packed = (inputs, outputs // each) if self._stated.awq else (inputs // each, outputs)
        return {WEIGHT: packed, ".qzeros": (groups, outputs // each), ".scales": (groups, outputs), ".g_idx": (inputs,)}

    def get_tensor(self, name: str) -> Tensor:
        found: Tensor = self.get_slice(name)[:]
        return found


@dataclass(frozen=True)
class _Slice:
    """A matrix of `shape` (out, in), in fp32. It is unpacked whole whatever is taken of it."""

    parts: Mapping[str, Any]
    form: Form
    stated: Layout
    shape: tuple[int, int]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, key: Any) -> Tensor:
        form, inputs = self.form, self.shape[1]
        stored, zeros, scales = (self.parts[end][:] for end in (WEIGHT, ".qzeros", ".scales"))
        numbers = self._columns(stored) if self.stated.awq else self._columns(stored.t()).t()
        zeros = self._columns(zeros) + self.stated.offset & (1 << form.bits) - 1
        group = self.parts[".g_idx"][:].long() if ".g_idx" in self.parts else torch.arange(inputs) // (form.group or inputs)
        return ((numbers - zeros[group]).float() * scales.float()[group]).t()[key]

    def _columns(self, words: Tensor) -> Tensor:
        """Numbers (rows, columns) of words that hold some of a row each."""
        places = torch.tensor(_AWQ_ORDER) if self.stated.awq else torch.arange(32 // self.form.bits)
        return (words[..., None] >> places.int() * self.form.bits & (1 << self.form.bits) - 1).flatten(1)
