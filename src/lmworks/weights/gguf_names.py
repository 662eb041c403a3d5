"""Where llama.cpp has the tensors of a model, and in which order of rows: for writing GGUF files and for reading them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.recipe.families.family import Gguf, NoClass
from lmworks.recipe.families.registry import family_of
from lmworks.recipe.schema.model import Model
from lmworks.weights.names import from_interleaved, huggingface_name, is_interleaved, to_interleaved

_LATENT_KEYS_AND_VALUES = re.compile(r"layers\.(\d+)\.attention\.kv_up\.weight\Z")
_QUERY_OR_KEY = re.compile(r"layers\.\d+\.attention\.(query|key)\.(weight|bias)\Z")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write: its name in the file, our tensor or a view of a part of it, and the dtype in the file.

    `heads` is the number of heads whose rows are reordered (0 for no reordering). `rotated` names our tensor if it has rows of latent
    attention that llama.cpp wants interleaved, and `model` is then the config."""

    name: str
    tensor: Tensor
    dtype: torch.dtype
    heads: int = 0
    rotated: str = ""
    model: Model | None = None

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def bits(self) -> np.ndarray:
        """The values as stored in the file; bfloat16, which numpy lacks, as int16."""
        tensor = self.tensor.detach().cpu()
        if self.rotated and self.model:
            tensor = to_interleaved(self.rotated, tensor, self.model)
        if self.heads:
            rows = len(tensor) // self.heads
            tensor = tensor.reshape(self.heads, 2, rows // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        tensor = tensor.to(self.dtype).contiguous()
        return (tensor.view(torch.int16) if self.dtype == torch.bfloat16 else tensor).numpy()

    @torch.no_grad()
    def store(self, values: Tensor) -> None:
        """Copy values of the file, in its order, into our tensor: the inverse of `bits`."""
        if self.heads:
            values = from_neighbors(values, len(values) // self.heads)
        if self.rotated and self.model:
            values = from_interleaved(self.rotated, values, self.model)
        self.tensor.copy_(values)


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


class Places:
    """Where llama.cpp has the tensors of a model, whose config has the RoPE of the last phase."""

    def __init__(self, config: Model) -> None:
        gguf = gguf_package()
        self.config, self.family, self._known = config, family_of(config), gguf_of(config)
        number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == self._known.architecture)
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def place(self, ours: str, tensor: Tensor, dtype: torch.dtype) -> GgufTensor:
        """The tensor to write for one of ours, or for another one with the same rows."""
        # the package maps Hugging Face's names, with stacked experts and the bias as a separate tensor
        theirs = huggingface_name(ours, self.family).replace(".{e}", "").replace("e_score_correction_bias", "e_score_correction.bias")
        name = self._names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name, f"gguf has no name for {theirs}"
        is_matrix = tensor.dim() > 1 and not name.endswith("ffn_gate_inp.weight")
        config, match = self.config, _QUERY_OR_KEY.match(ours) if self._known.interleaved_rope else None
        heads = 0 if match is None else config.num_attention_heads if match[1] == "query" else config.num_key_value_heads
        rotated = ours if is_interleaved(ours, config) else ""
        return GgufTensor(name, tensor, dtype if is_matrix else torch.float32, heads or 0, rotated, config)
