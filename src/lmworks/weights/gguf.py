"""Tensors of a GGUF file under the names and in the row order of Hugging Face's format, dequantized when they are read.

Rows are quantized independently of each other, so that reading some rows takes the memory of these alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmworks.checkpoint.save_plan import local_slice
from lmworks.errors import UserError
from lmworks.model import Transformer
from lmworks.model.rope import frequencies
from lmworks.recipe.gguf.header import TensorInfo, read_header
from lmworks.recipe.schema.model import Model
from lmworks.weights.gguf_names import Places, from_neighbors, gguf_package, latent_parts
from lmworks.weights.names import sources

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class GgufSlice:
    """One tensor, with the methods of a slice of safetensors. `rows` reads rows of it, begin to end, in fp32."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, key: Any) -> Tensor:
        first, *others = key if isinstance(key, tuple) else (key,)
        begin, end, step = first.indices(self.shape[0])
        assert step == 1
        return self.rows(begin, max(begin, end))[(slice(None), *others)]


class GgufWeights:
    """The tensors of the GGUF file of `model`, as an open file of safetensors has them."""

    def __init__(self, path: Path, model: Model) -> None:
        gguf_package()  # which an installation without extras lacks
        self._header, self._model = read_header(path), model
        self._tensors = dict(self._found())

    def keys(self) -> list[str]:
        """Hugging Face's names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> GgufSlice:
        return self._tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name][:]

    def _found(self) -> Iterator[tuple[str, GgufSlice]]:
        """Raises `UserError` for a tensor that is missing, or that the model does not have."""
        places, unread = Places(self._model), set(self._header.tensors)
        for ours, tensor in _tensors_of(self._model).items():
            part = local_slice(ours, tensor)
            names = [name for name, _ in sources(part, self._model, places.family)] if part is not None else []
            if not names or ours.startswith("mtp."):  # not in this class, or not in a GGUF file
                continue
            if (parts := latent_parts(ours)) is not None:
                unread -= set(parts)
                yield names[0], self._latents(*(self._info(part) for part in parts))
                continue
            item = places.place(ours, tensor, torch.float32)
            info = self._info(item.name)
            unread.discard(item.name)
            for number, name in enumerate(names):
                yield name, _expert(info, number) if len(info.shape) == 3 else _plain(info, item.heads)
        if ROPE_FACTORS in unread:
            self._check_rope(self._header.tensors[ROPE_FACTORS])
        if unread - {ROPE_FACTORS}:
            raise UserError(f"{self._path} has tensor {min(unread - {ROPE_FACTORS})}, which lmworks does not know; it is another model")

    @property
    def _path(self) -> Path:
        return self._header.files[0]

    def _info(self, name: str) -> TensorInfo:
        if name not in self._header.tensors:
            raise UserError(f"{self._path} has no tensor {name}; it is another model, or damaged")
        return self._header.tensors[name]

    def _latents(self, key: TensorInfo, value: TensorInfo) -> GgufSlice:
        """The expansion of latents: keys, which are transposed there, and values, head by head."""
        heads, latent, nope = key.shape
        wide = value.shape[1]

        def rows(begin: int, end: int) -> Tensor:
            whole = torch.cat((_read(key).transpose(1, 2), _read(value)), dim=1)
            return whole.reshape(-1, latent)[begin:end]

        return GgufSlice((heads * (nope + wide), latent), rows)

    def _check_rope(self, info: TensorInfo) -> None:
        rope, head_dim = self._model.rope, self._model.head_dim
        assert head_dim
        expected = rope_factors(self._model) if rope.scaling == "llama3" else torch.ones(int(head_dim * rope.partial_rotary_factor) // 2)
        if expected.shape != info.shape or not torch.allclose(_read(info), expected, rtol=1e-4):
            raise UserError(f"{self._path}: the factors in {info.name} are not those of the scaling of Llama 3; lmworks has no other ones")


def _tensors_of(model: Model) -> dict[str, Tensor]:
    with torch.device("meta"):
        state = Transformer(model).state_dict()
    return {name: tensor for name, tensor in state.items() if not (name == "head.weight" and model.tie_word_embeddings)}


def rope_factors(model: Model) -> Tensor:
    """What llama.cpp divides each frequency by under rope.scaling llama3."""
    assert model.head_dim
    plain = model.rope.model_copy(update={"scaling": "none", "factor": 1.0})
    return frequencies(plain, model.head_dim)[0] / frequencies(model.rope, model.head_dim)[0]


def _plain(info: TensorInfo, heads: int) -> GgufSlice:
    def rows(begin: int, end: int) -> Tensor:
        if not heads:
            return _read(info, begin, end)
        height = info.shape[0] // heads
        first, last = begin // height * height, -(-end // height) * height  # whole heads
        return from_neighbors(_read(info, first, last), height)[begin - first : end - first]

    return GgufSlice(info.shape, rows)


def _expert(info: TensorInfo, number: int) -> GgufSlice:
    height = info.shape[1]
    stacked = replace(info, shape=(info.shape[0] * height, *info.shape[2:]))
    return GgufSlice(info.shape[1:], lambda begin, end: _read(stacked, number * height + begin, number * height + end))


def _read(info: TensorInfo, begin: int = 0, end: int | None = None) -> Tensor:
    """Rows of a tensor in fp32, all by default."""
    gguf = gguf_package()
    count = (info.shape[0] if end is None else end) - begin
    row = info.nbytes // info.shape[0]
    raw = np.fromfile(info.file, dtype=np.uint8, count=count * row, offset=info.offset + begin * row)
    if raw.size != count * row:
        raise UserError(f"{info.file} is cut short: tensor {info.name} ends behind its end; get it again from its origin")
    # one row of bytes for each row of values of a matrix, and a single one for a vector
    values = gguf.quants.dequantize(raw.reshape(1 if len(info.shape) == 1 else -1, row * count if len(info.shape) == 1 else _line(info)),
                                    gguf.GGMLQuantizationType(info.type))
    return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(count, *info.shape[1:])


def _line(info: TensorInfo) -> int:
    """Bytes of the innermost rows."""
    return info.nbytes // math.prod(info.shape[:-1])
