"""Tensors of GGUF files: their names and row orders in llama.cpp, for writing and reading, and a reader that dequantizes them.

The reader gives tensors the names and the row order of Hugging Face's format. Rows are quantized independently of each other, so that
reading some rows takes the memory of these alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmworks.checkpoint.save_plan import local_slice
from lmworks.errors import UserError
from lmworks.model import Transformer
from lmworks.model.rope import frequencies
from lmworks.recipe.families.family import Form, Gguf, NoClass
from lmworks.recipe.families.registry import family_of
from lmworks.recipe.gguf_header import TYPES, TensorInfo, read_header
from lmworks.recipe.schema.model import Model
from lmworks.weights.names import (
    Packing,
    from_interleaved,
    huggingface_name,
    is_interleaved,
    is_shifted,
    matches,
    name_in_table,
    packed_together,
    packing,
    packing_in,
    sources,
    to_interleaved,
)

_LATENT_KEYS_AND_VALUES = re.compile(r"layers\.(\d+)\.attention\.kv_up\.weight\Z")
# as llama.cpp requires
_IN_FP32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight", "shortconv.conv.weight", ".bias")
_QUERY_OR_KEY = re.compile(r"layers\.\d+\.attention\.(query|key)\.(weight|bias)\Z")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write: its name in the file, our tensors whose rows it has (usually one, or a view of a part of one), and the dtype in
    the file.

    `heads` is the number of heads whose rows are reordered (0 for no reordering). `rotated` names our tensor if it has rotated rows that
    llama.cpp wants interleaved. `packing` is how the rows of several tensors lie, and `forms` are those of each of them, if any has one;
    `model` is then the config."""

    name: str
    tensors: tuple[Tensor, ...]
    dtype: torch.dtype
    heads: int = 0
    rotated: str = ""
    model: Model | None = None
    packing: Packing | None = None
    forms: tuple[Form | None, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it is one of ours, if in another order."""
        return self.packing is None and not self.forms

    @property
    def shape(self) -> tuple[int, ...]:
        if self.plain:
            return tuple(self.tensors[0].shape)
        return tuple(self._joined([torch.empty(tensor.shape, device="meta") for tensor in self.tensors]).shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def bits(self) -> np.ndarray:
        """The values as stored in the file; bfloat16, which numpy lacks, as int16."""
        tensor = self._joined([tensor.detach().cpu() for tensor in self.tensors])
        if self.rotated and self.model:
            tensor = to_interleaved(self.rotated, tensor, self.model)
        if self.heads:
            rows = len(tensor) // self.heads
            tensor = tensor.reshape(self.heads, 2, rows // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        tensor = tensor.to(self.dtype).contiguous()
        return (tensor.view(torch.int16) if self.dtype == torch.bfloat16 else tensor).numpy()

    @torch.no_grad()
    def store(self, values: Tensor) -> None:
        """Copy values of the file, in its order, into our tensors: the inverse of `bits`."""
        if self.heads:
            values = from_neighbors(values, len(values) // self.heads)
        if self.rotated and self.model:
            values = from_interleaved(self.rotated, values, self.model)
        for tensor, part in zip(self.tensors, self.parts(values), strict=True):
            tensor.copy_(part)

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        formed = [form.to(tensor, self.model) if form else tensor for tensor, form in zip(tensors, self._forms(), strict=True)]  # type: ignore[arg-type]
        return formed[0] if self.packing is None else self.packing.pack(formed)

    def parts(self, values: Tensor) -> tuple[Tensor, ...]:
        """Our tensors from the values of the file, in the order of Hugging Face's format where `heads` or `rotated` say so."""
        rows = [tensor.shape[0] for tensor in self.tensors]
        found = (values,) if self.packing is None else self.packing.unpack(values, rows)
        return tuple(form.back(part, self.model) if form else part for part, form in zip(found, self._forms(), strict=True))  # type: ignore[arg-type]

    def _forms(self) -> tuple[Form | None, ...]:
        return self.forms or (None,) * len(self.tensors)


def from_neighbors(values: Tensor, rows: int) -> Tensor:
    """Whole heads of `rows` rows of query or key, in llama.cpp's order of neighbors (2i, 2i + 1), in the order of halves (i, i + R/2)."""
    return values.reshape(-1, rows // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def latent_parts(ours: str) -> tuple[str, str] | None:
    """The names of the two tensors that llama.cpp has for the expansion of latents; None for any other of our tensors."""
    found = _LATENT_KEYS_AND_VALUES.match(ours)
    return (f"blk.{found[1]}.attn_k_b.weight", f"blk.{found[1]}.attn_v_b.weight") if found else None


def architecture_for(model: Model) -> str:
    """llama.cpp's architecture of a model. Raises `UserError` with the reason if it has none."""
    return gguf_of(model).architecture


def gguf_of(model: Model) -> Gguf:
    try:
        return family_of(model).gguf(model)
    except NoClass as error:
        raise UserError(
            f"no architecture of llama.cpp expresses this model: {error.reason}; change the recipe's model, or set export.gguf=false"
        ) from None


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF files need the gguf package: pip install 'lmworks[export]'; or set export.gguf=false") from None
    return gguf


class Item(NamedTuple):
    """A tensor of a file, and the number of one of ours among its parts."""

    tensor: GgufTensor
    number: int
    own: Tensor

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def plain(self) -> bool:
        return self.tensor.plain

    @property
    def heads(self) -> int:
        return self.tensor.heads


class Places:
    """Where llama.cpp has the tensors of a model, whose config has the RoPE of the last phase."""

    def __init__(self, config: Model) -> None:
        gguf = gguf_package()
        self.config, self.family, self._known = config, family_of(config), gguf_of(config)
        named = self._known.names_of or self._known.architecture
        number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == named)
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def item(self, ours: str, state: Mapping[str, Tensor], dtype: torch.dtype) -> GgufTensor | None:
        """The tensor to write for one of ours; None for a part of one that is not the first."""
        config, known = self.config, self._known
        own = packing_in(known.names, ours, config)
        packed = own if own and len(own.ours) > 1 else packing(ours, config, self.family) if own is None else None
        if packed is None:
            return self.place(ours, state[ours], dtype, own.name if own else None)
        if ours != packed.ours[0]:
            return None
        first = self.place(ours, state[ours], dtype, own.name if own else None)
        forms = tuple(self._form(name) for name in packed.ours)
        return replace(first, tensors=tuple(state[name] for name in packed.ours), packing=packed, forms=forms if any(forms) else ())

    def whole(self, ours: str, state: Mapping[str, Tensor]) -> Item:
        """The tensor of the file in which one of ours is, alone or with others."""
        own = packing_in(self._known.names, ours, self.config) or packing(ours, self.config, self.family)
        names = own.ours if own else (ours,)
        item = self.item(names[0], state, torch.float32)
        assert item is not None
        return Item(item, names.index(ours), state[ours])

    def is_theirs(self, ours: str) -> bool:
        """Whether the tensor of the file in which one of ours is has the rows of the one in Hugging Face's format."""
        names = packing(ours, self.config, self.family)
        return names is not None and packing_in(self._known.names, ours, self.config) is None and not any(map(self._form, names.ours))

    def is_part(self, ours: str) -> bool:
        """Whether one of ours is a part of a larger matrix in the file."""
        own = packing_in(self._known.names, ours, self.config)
        return len(own.ours) > 1 if own else packing(ours, self.config, self.family) is not None

    def place(self, ours: str, tensor: Tensor, dtype: torch.dtype, name: str | None = None) -> GgufTensor:
        """The tensor to write for one of ours, or for another one with the same rows; `name` is that in the file, if it is known."""
        if name is None:
            # the package maps Hugging Face's names, with stacked experts and the bias as a separate tensor
            theirs = huggingface_name(ours, self.config, self.family).replace(".{e}", "")
            theirs = theirs.replace("e_score_correction_bias", "e_score_correction.bias")
            theirs += ".weight" if theirs.endswith(".sinks") else ""
            name = self._names.get_name(theirs, try_suffixes=(".weight", ".bias"))
            assert name, f"gguf has no name for {theirs}"
        is_matrix = tensor.dim() > 1 and not name.endswith(_IN_FP32)
        config, match = self.config, _QUERY_OR_KEY.match(ours) if self._known.interleaved_rope else None
        heads = 0 if match is None else config.num_attention_heads if match[1] == "query" else config.num_key_value_heads
        rotated = ours if is_interleaved(ours, config, self.family) else ""
        form = self._form(ours)
        return GgufTensor(
            name, (tensor,), dtype if is_matrix else torch.float32, heads or 0, rotated, config, forms=(form,) if form else ()
        )  # fmt: skip

    def _form(self, ours: str) -> Form | None:
        found = {template: form for template, form in self._known.forms.items() if matches(template, name_in_table(ours, self.config))}
        return next(iter(found.values()), None)


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
        self._last = ("", torch.empty(0))
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
        state = {name: tensor for name, tensor in _tensors_of(self._model).items() if not name.startswith("mtp.")}
        for together in packed_together(state, self._model):
            ours = together[0]
            part = local_slice(ours, state[ours])
            names = [name for name, _ in sources(part, state, self._model, places.family)] if part is not None else []
            if not names:  # not in this class
                continue
            if (parts := latent_parts(ours)) is not None:
                unread -= set(parts)
                yield names[0], self._latents(*(self._info(part) for part in parts))
                continue
            items = [places.whole(name, state) for name in together]
            infos = [self._info(item.name) for item in items]
            unread -= {item.name for item in items}
            if (len({item.name for item in items}) > 1 or not all(item.plain for item in items)) and not places.is_theirs(ours):
                yield names[0], self._joined(names[0], together, items, infos)
                continue
            is_part = packing(ours, self._model, places.family) is not None
            for number, name in enumerate(dict.fromkeys(names)):
                shift = -1.0 if is_shifted(ours, places.family) else 0.0  # llama.cpp has the factors of norms, as we do
                stacked = not is_part and names[0] != huggingface_name(ours, self._model, places.family)
                yield name, _expert(infos[0], number) if stacked else _plain(infos[0], items[0].heads, shift)
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

    def _joined(self, theirs: str, together: tuple[str, ...], items: list[Item], infos: list[TensorInfo]) -> GgufSlice:
        """A tensor of Hugging Face's format whose parts lie otherwise in the file: it is made as a whole, and the last one is kept."""
        if any(item.tensor.shape != tuple(info.shape) for item, info in zip(items, infos, strict=True)):
            return _plain(infos[0], 0)  # whose shape is refused by whoever reads it
        packed = packing(together[0], self._model, family_of(self._model))
        parts = [item.own for item in items]

        def rows(begin: int, end: int) -> Tensor:
            if self._last[0] != theirs:
                read = {info.name: _read(info) for info in infos}
                own = [item.tensor.parts(read[info.name])[item.number] for item, info in zip(items, infos, strict=True)]
                self._last = (theirs, own[0] if packed is None else packed.pack(own))
            return self._last[1][begin:end]

        return GgufSlice((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), rows)

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
        if expected.shape != info.shape or not torch.allclose(_read(info), expected, rtol=1e-5):
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


def _plain(info: TensorInfo, heads: int, shift: float = 0.0) -> GgufSlice:
    def rows(begin: int, end: int) -> Tensor:
        if not heads:
            return _read(info, begin, end).double() + shift if shift else _read(info, begin, end)
        height = info.shape[0] // heads
        first, last = begin // height * height, -(-end // height) * height  # whole heads
        return from_neighbors(_read(info, first, last), height)[begin - first : end - first]

    return GgufSlice(info.shape, rows)


def _expert(info: TensorInfo, number: int) -> GgufSlice:
    """The matrix or the bias of one expert."""
    if len(info.shape) == 2:
        return GgufSlice(info.shape[1:], lambda begin, end: _read(info, number, number + 1)[0, begin:end])
    height = info.shape[1]
    stacked = replace(info, shape=(info.shape[0] * height, *info.shape[2:]))
    return GgufSlice(info.shape[1:], lambda begin, end: _read(stacked, number * height + begin, number * height + end))


def _read(info: TensorInfo, begin: int = 0, end: int | None = None) -> Tensor:
    """Rows of a tensor, or values of a vector, in fp32, all by default."""
    end = info.shape[0] if end is None else end
    if len(info.shape) == 1:  # whose blocks are of several values
        _, block, size = TYPES[info.type]
        first, last = begin // block, -(-end // block)
        return _dequantize(info, first * size, last * size, (last - first) * size).reshape(-1)[begin - first * block : end - first * block]
    row = info.nbytes // info.shape[0]
    return _dequantize(info, begin * row, end * row, _line(info)).reshape(end - begin, *info.shape[1:])


def _dequantize(info: TensorInfo, begin: int, end: int, line: int) -> Tensor:
    """The values in a range of bytes of a tensor, whose innermost rows have `line` bytes."""
    gguf = gguf_package()
    if begin == end:
        return torch.empty(0)
    raw = np.fromfile(info.file, dtype=np.uint8, count=end - begin, offset=info.offset + begin)
    if raw.size != end - begin:
        raise UserError(f"{info.file} is cut short: tensor {info.name} ends behind its end; get it again from its origin")
    values = gguf.quants.dequantize(raw.reshape(-1, line), gguf.GGMLQuantizationType(info.type))
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _line(info: TensorInfo) -> int:
    """Bytes of the innermost rows."""
    return info.nbytes // math.prod(info.shape[:-1])
