"""Writes GGUF, the single-file format of llama.cpp, with the `gguf` package only.

llama.cpp's own converter is only part of its source tree, and it identifies a tokenizer by the hash of a published one, so it rejects
tokenizers trained here. For the architectures that families name (`lmworks.recipe.families`) this module writes the same fields as the
converter (`tests/export/test_llama_cpp.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.export.gguf_tokenizer import add_tokenizer, find_rule
from lmworks.inference.generate import SAMPLING
from lmworks.io.files import atomic_path, final_name
from lmworks.model import Transformer
from lmworks.recipe.gguf_header import TYPES, read_header
from lmworks.recipe.gguf_model import metadata_of
from lmworks.recipe.schema.model import Lora, Model, matrix_of_adapter
from lmworks.tokenizer.tokenizer import Tokenizer
from lmworks.ui.terminal import bar
from lmworks.weights.gguf import ROPE_FACTORS, GgufTensor, Places, architecture_for, gguf_package, latent_parts, rope_factors
from lmworks.weights.names import is_exported

if TYPE_CHECKING:
    import gguf


class Differs(UserError):
    """A file is not the model."""


class NoAdapter(UserError):
    """llama.cpp cannot apply the adapters of a model."""


@contextmanager
def gguf_writer(path: Path, architecture: str) -> Iterator[gguf.GGUFWriter]:
    """A writer of a GGUF file, which is closed in the end, also after an error: a full disk cannot be unmounted while a file is open."""
    writer: gguf.GGUFWriter = gguf_package().GGUFWriter(path, architecture)
    try:
        yield writer
    except BaseException:
        with suppress(OSError):  # what is left to write has no room either
            writer.close()
        raise
    writer.close()


def stored_name(name: str) -> str:
    """A model's name as the file has it. llama.cpp takes three names for those of models whose tokenizers strip spaces beside special
    tokens: it strips them then, or does not load a file whose vocabulary lacks their tokens."""
    return re.sub(r"(phi)-?(?=3)|(modern)-(?=bert)", lambda found: f"{found[1] or found[2]}_", name, flags=re.IGNORECASE)


def notes(tokenizer: Tokenizer, name: str) -> tuple[str, ...]:
    """What a file says otherwise than the model: of its tokenizer, and its name. Raises `UserError` for a tokenizer that llama.cpp
    lacks."""
    found = find_rule(tokenizer).notes
    if (stored := stored_name(name)) != name:
        found += (f"the file names the model {stored}, because llama.cpp takes {name} for one with another tokenizer",)
    return found


def write_gguf(model: Transformer, tokenizer: Tokenizer, path: Path, dtype: torch.dtype, name: str) -> None:
    """Write weights, tokenizer and chat template to one file: matrices in `dtype`; norms, biases and the router in fp32, as llama.cpp
    requires.

    Tensors are converted one at a time, so the model is not in memory twice. Raises `UserError` if llama.cpp cannot express it.
    """
    gguf = gguf_package()
    items = list(_items(model, dtype))
    progressing = bar("gguf", sum(item.nbytes for item in items))
    with atomic_path(path) as aside, gguf_writer(aside, architecture_for(model.config)) as writer, progressing as progress:
        for item in items:
            kind = gguf.GGMLQuantizationType.BF16 if item.dtype == torch.bfloat16 else gguf.GGMLQuantizationType.F32
            writer.add_tensor_info(item.name, item.shape, np.dtype(np.float32), item.nbytes, kind)
        _add_general(writer, name, dtype)
        _add_model(writer, model)
        add_tokenizer(writer, tokenizer, model.config.vocab_size or 0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for item in items:
            writer.write_tensor_data(item.bits())
            progress.advance(item.nbytes)


def write_gguf_adapter(adapters: Mapping[str, Tensor], lora: Lora, model: Transformer, path: Path, name: str) -> None:
    """Write low-rank adapters to a file for llama.cpp's `--lora`, in fp32: for the GGUF file of the model that they were trained on.

    `adapters` are tensors by our names; of `model` only the config and the RoPE matter. Raises `NoAdapter` for an adapter that llama.cpp
    cannot apply.
    """
    gguf, places, items = gguf_package(), Places(model.config), []
    for ours, tensor in adapters.items():
        if latent_parts(matrix_of_adapter(ours)):
            raise NoAdapter("llama.cpp has the expansion of latents to keys and values as other matrices than those with adapters")
        if places.is_part(matrix_of_adapter(ours)):
            raise NoAdapter("llama.cpp has matrices with adapters as parts of larger ones")
        item = places.place(matrix_of_adapter(ours), tensor, torch.float32)
        if ours.endswith("A"):  # whose rows are ranks
            item = replace(item, heads=0, rotated="")
        items.append(replace(item, name=f"{item.name}.lora_{ours[-1].lower()}"))
    with atomic_path(path) as aside, gguf_writer(aside, architecture_for(places.config)) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_name(name)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, lora.scale * lora.rank)  # which llama.cpp divides by the rank
        for item in items:
            writer.add_tensor(item.name, item.bits())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def check_gguf(model: Transformer, path: Path, dtype: torch.dtype) -> int:
    """Read the file and compare every value with the model's, bit for bit. Returns the number of tensors; raises `UserError` if one
    differs."""
    reader = gguf_package().GGUFReader(path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    expected = {item.name: item for item in _items(model, dtype)}
    if found.keys() != expected.keys():
        raise _damaged(path, f"tensor {min(found.keys() ^ expected.keys())} is only in the file or only in the model")
    for name, item in expected.items():
        if list(reversed(found[name].shape.tolist())) != list(item.shape):
            raise _damaged(path, f"tensor {name} has shape {list(reversed(found[name].shape.tolist()))}, not {list(item.shape)}")
        if found[name].data.tobytes() != item.bits().tobytes():
            raise _damaged(path, f"the values of tensor {name} differ")
    return len(expected)


def weight_bits(path: Path) -> int:
    """Bits per weight, rounded down, of the most quantized tensor of a GGUF file; 16 if none is quantized. Raises `UserError` for a damaged
    file."""
    sizes = [TYPES[tensor.type] for tensor in read_header(path).tensors.values()]
    return min([16, *(8 * size // block for _, block, size in sizes)])


def load_gguf(model: Transformer, path: Path) -> None:
    """Copy the weights of a GGUF file of `model`, quantized or not, into it. Raises `UserError` if a tensor is missing or of another shape.

    Quantized values are dequantized to fp32 by llama.cpp's own Python package.
    """
    gguf = gguf_package()
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for item in _items(model, torch.float32):
        if item.name not in found:
            raise UserError(f"{path} has no tensor {item.name}; it is not this model, or it is damaged")
        one = found[item.name]
        if list(reversed(one.shape.tolist())) != list(item.shape):
            raise UserError(f"{path}: tensor {item.name} has another shape than in the model; it is not this model, or it is damaged")
        item.store(torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type)).reshape(item.shape))


def _damaged(path: Path, why: str) -> Differs:
    return Differs(f"{final_name(path)} differs from the trained model: {why}")


def _items(model: Transformer, dtype: torch.dtype) -> Iterator[GgufTensor]:
    config = model.config
    places = Places(config)
    state = model.state_dict()
    for ours, tensor in state.items():
        if ours == "head.weight" and model.config.tie_word_embeddings:
            continue  # llama.cpp uses the embedding if there is no output
        if ours.startswith("mtp."):
            continue  # llama.cpp would load multi-token prediction but not run it
        if not is_exported(ours, places.family):
            continue
        if (parts := latent_parts(ours)) is not None:
            yield from _split_latents(parts, tensor, dtype, config)
            continue
        if (item := places.item(ours, state, dtype)) is not None:
            yield item
    if model.rope.scaling == "llama3":  # llama.cpp divides each frequency by a stored factor
        yield GgufTensor(ROPE_FACTORS, (rope_factors(config),), torch.float32)


def _split_latents(names: tuple[str, str], tensor: Tensor, dtype: torch.dtype, config: Model) -> Iterator[GgufTensor]:
    """The expansion of latents to keys, transposed, and to values: llama.cpp multiplies queries and outputs by them, head by head."""
    mla = config.mla
    assert mla is not None
    key, value = tensor.unflatten(0, (config.num_attention_heads or 1, -1)).split((mla.qk_nope_head_dim, mla.v_head_dim), dim=1)
    yield GgufTensor(names[0], (key.transpose(1, 2),), dtype)
    yield GgufTensor(names[1], (value,), dtype)


def _add_general(writer: gguf.GGUFWriter, name: str, dtype: torch.dtype) -> None:
    gguf = gguf_package()
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(stored_name(name))
    writer.add_size_label(gguf.size_label(*writer.get_total_parameter_count()))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if dtype == torch.bfloat16 else gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_sampling_temp(SAMPLING["temperature"])
    writer.add_sampling_min_p(SAMPLING["min_p"])


def _add_model(writer: gguf.GGUFWriter, model: Transformer) -> None:
    config = model.config
    for key, value in metadata_of(config).items():
        name = f"{architecture_for(config)}.{key}"
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case list():
                writer.add_array(name, value)
            case _:
                writer.add_string(name, value)
