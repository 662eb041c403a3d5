"""The header of GGUF files: metadata, and name, shape, type and place of each tensor. Weights are not read.

The format (github.com/ggml-org/ggml, docs/gguf.md): a magic number, version, numbers of tensors and of keys; the keys with their values;
the tensors; then the data, aligned. A file comes from anywhere, so every number in it is compared with the size of the file before anything
is made of it: nothing here takes more memory or time than the limits below. The reader of the package `gguf` makes an object for each
element of each array and trusts the offsets, so only its functions that dequantize are used.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from lmworks.errors import UserError
from lmworks.io.files import open_regular

MAGIC = b"GGUF"
_MOST_HEADER = 1 << 28  # bytes; a vocabulary of 262,144 entries with its merges takes 15 MB
_MOST_KEYS, _MOST_TENSORS, _MOST_ELEMENTS = 1 << 12, 1 << 17, 1 << 22
_MOST_NAME = 1 << 8  # bytes of the name of a key or a tensor
_MOST_DIMENSIONS = 4  # of ggml
_MOST_PARTS = 1000
_SPLIT = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}

TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
"""Types of tensors whose values can be read: name, elements of a block, and bytes of a block."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its shape as PyTorch has it (rows first), its type, and where its bytes lie in which file."""

    name: str
    shape: tuple[int, ...]
    type: int
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.shape, self.type)


@dataclass(frozen=True)
class Header:
    """The metadata and the tensors of a model, which may lie in several files."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def nbytes_of(shape: tuple[int, ...], kind: int) -> int:
    """Bytes of a tensor of this shape and type."""
    _, block, size = TYPES[kind]
    return math.prod(shape) // block * size


def is_gguf(path: Path) -> bool:
    """Whether a path looks like a GGUF file, by its name."""
    return path.suffix.lower() == ".gguf"


def files_of_model(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to: itself, or all parts of a file that was split (-00001-of-00003.gguf).

    Raises `UserError` naming the part that is missing.
    """
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    if not 0 < count <= _MOST_PARTS:
        raise UserError(f"{path} says that it is one of {count} parts; a model has at most {_MOST_PARTS}")
    parts = [path.with_name(f"{found['name']}-{number:05d}-of-{found['count']}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise UserError(f"{part} does not exist; it is one of the {count} parts of {path.name}, put it beside the others")
    return parts


def read_header(path: Path) -> Header:
    """The header of a model in one file, or in parts, of which the first has the metadata. Raises `UserError` for a damaged file."""
    files = files_of_model(path)
    first, *others = [_Parser(file).parse() for file in files]
    tensors = dict(first.tensors)
    for other in others:
        if twice := tensors.keys() & other.tensors.keys():
            raise UserError(f"{other.files[0]} has tensor {min(twice)} once more; get the files again from their origin")
        tensors |= other.tensors
    stated = first.metadata.get("split.count", len(files))
    if stated not in (0, len(files)):
        raise UserError(f"{files[0]} is one of {stated} parts by its metadata, and one of {len(files)} by its name; restore the names")
    if (total := first.metadata.get("split.tensors.count", len(tensors))) != len(tensors):
        raise UserError(f"{files[0]} and its other parts have {len(tensors):,} of {total} tensors; get them again from their origin")
    return Header(first.metadata, tensors, tuple(files))


class _Parser:
    """Reads one file from the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO
        self._size = self._at = 0

    def parse(self) -> Header:
        with open_regular(self.path) as self._file:
            self._size = self._file.seek(0, 2)
            self._file.seek(0)
            if self._take(4) != MAGIC:
                self._refuse("it does not begin with the letters GGUF")
            version = self._number("I")
            if version not in (2, 3):
                swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
                self._refuse("it is big-endian" if swapped else f"its version is {version}, and lmworks reads 2 and 3")
            tensors, keys = self._number("Q"), self._number("Q")
            self._limit(tensors, _MOST_TENSORS, "tensors")
            self._limit(keys, _MOST_KEYS, "keys")
            metadata: dict[str, Any] = {}
            for _ in range(keys):
                name = self._name()
                if name in metadata:
                    self._refuse(f"it has the key {name} twice")
                metadata[name] = self._value(self._number("I"), name)
            found = [self._tensor() for _ in range(tensors)]
            alignment = metadata.get("general.alignment", 32)
            if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 16:
                self._refuse(f"general.alignment is {str(alignment)[:20]}")
            begin = -(-self._at // alignment) * alignment
        return Header(metadata, self._placed(found, begin, alignment), (self.path,))

    def _placed(self, found: list[tuple[str, tuple[int, ...], int, int]], begin: int, alignment: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in found:
            if name in tensors:
                self._refuse(f"it has tensor {name} twice")
            tensors[name] = TensorInfo(name, shape, kind, self.path, begin + offset)
            if offset % alignment:
                self._refuse(f"tensor {name} is not aligned")
            if begin + offset + tensors[name].nbytes > self._size:
                self._refuse(f"tensor {name} ends behind the end of the file, so the file is cut short")
        end, before = 0, ""
        for one in sorted((one for one in tensors.values() if one.nbytes), key=lambda one: one.offset):
            if one.offset < end:
                self._refuse(f"tensors {before} and {one.name} overlap")
            end, before = one.offset + one.nbytes, one.name
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._name(), self._number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            self._refuse(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise UserError(f"{self.path}: tensor {name} has type {kind}, which lmworks does not read; it reads "
                            f"{', '.join(one for one, _, _ in TYPES.values())}")  # fmt: skip
        if 0 in shape or shape[-1] % TYPES[kind][1]:
            self._refuse(f"tensor {name} of type {TYPES[kind][0]} has shape {shape}")
        return name, shape, kind, offset

    def _name(self) -> str:
        name = self._text(_MOST_NAME)
        if not name.isprintable():
            self._refuse("it has a name that cannot be printed")
        return name

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BOOL:
            return self._number("B") != 0
        if kind == _STRING:
            return self._text(_MOST_HEADER)
        if kind == _ARRAY:
            return self._array(key)
        return self._refuse(f"the value of {key} has type {kind}")

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        self._limit(count, _MOST_ELEMENTS, f"elements of {key}")
        if kind in _NUMBERS:
            code = _NUMBERS[kind]
            return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(code))))
        if kind == _BOOL:
            return [byte != 0 for byte in self._take(count)]
        if kind == _STRING:
            return [self._text(_MOST_HEADER) for _ in range(count)]
        return self._refuse(f"{key} is an array of arrays" if kind == _ARRAY else f"the elements of {key} have type {kind}")

    def _text(self, most: int) -> str:
        size = self._number("Q")
        self._limit(size, most, "bytes of a text")
        try:
            return self._take(size).decode("utf-8")
        except UnicodeDecodeError:
            return self._refuse("it has a text that is not UTF-8")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(code)))[0]

    def _take(self, size: int) -> bytes:
        self._at += size
        if self._at > self._size:
            self._refuse("it is cut short")
        if self._at > _MOST_HEADER:
            self._refuse(f"its header is longer than {_MOST_HEADER:,} bytes")
        return self._file.read(size)

    def _limit(self, count: int, most: int, what: str) -> None:
        if count > min(most, self._size):
            self._refuse(f"it states {count:,} {what}")

    def _refuse(self, why: str) -> NoReturn:
        raise UserError(f"{self.path} is damaged, or no GGUF file: {why}; get it again from its origin")
