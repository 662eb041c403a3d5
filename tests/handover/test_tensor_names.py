"""Names of tensors in both formats: a bijection on real exports, and values that survive both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deployable import GLM, QWEN3, export
from lmworks.errors import UserError
from lmworks.handover.megatron import copies, from_megatron, mapping, require_bijection, to_megatron
from lmworks.weights.huggingface import read_model
from tiny_run import Tiny

MODELS: dict[str, dict[str, Any]] = {
    "glm": GLM | {"mtp": {}},
    "glm, two layers ahead": GLM | {"mtp": {"num_nextn_predict_layers": 2}, "use_qk_norm": False},
    "qwen3, tied": QWEN3 | {"tie_word_embeddings": True},
    "llama": QWEN3 | {"use_qk_norm": False},
    "qwen2": QWEN3 | {"use_qk_norm": False, "attention_bias": True},
    "qwen3moe": QWEN3 | {"moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 0, "scoring_func": "softmax",
        "first_k_dense_replace": 0, "balance": {"method": "aux"},
    }},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("transformer_engine", [True, False])
def test_every_tensor_there_and_back(tiny: Tiny, tmp_path: Path, name: str, transformer_engine: bool) -> None:
    directory = export(tiny, tmp_path, MODELS[name])
    tensors, model = load_file(directory / "model.safetensors"), read_model(directory).config
    assert require_bijection({key: tuple(one.shape) for key, one in tensors.items()}, model) == len(mapping(model))
    pairs = mapping(model, transformer_engine=transformer_engine)
    theirs = {one.megatron: to_megatron(one, tensors, model) for one in pairs}
    assert len(theirs) == len(pairs)
    back = {key: value for one in pairs for key, value in from_megatron(one, theirs[one.megatron], model).items()}
    back |= {copy: back[original] for copy, original in copies(model).items()}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)


def test_query_key_and_value_are_ordered_by_groups(tiny: Tiny, tmp_path: Path) -> None:
    """4 query heads of 32 in 2 groups: rows 0-63 are the queries of group 0, then its key and its value."""
    directory = export(tiny, tmp_path, QWEN3)
    tensors, model = load_file(directory / "model.safetensors"), read_model(directory).config
    (one,) = [one for one in mapping(model) if one.megatron == "decoder.layers.0.self_attention.linear_qkv.weight"]
    fused = to_megatron(one, tensors, model)
    query, key, value = (tensors[name] for name in one.huggingface)
    expected = [query[:64], key[:32], value[:32], query[64:], key[32:], value[32:]]
    assert torch.equal(fused, torch.cat(expected))


def test_a_tensor_too_many_or_too_few_is_named(tiny: Tiny, tmp_path: Path) -> None:
    directory = export(tiny, tmp_path, QWEN3)
    shapes = {key: tuple(one.shape) for key, one in load_file(directory / "model.safetensors").items()}
    model = read_model(directory).config
    with pytest.raises(UserError, match=r"model.extra has no counterpart in Megatron"):
        require_bijection(shapes | {"model.extra": (1,)}, model)
    del shapes["model.norm.weight"]
    with pytest.raises(UserError, match=r"model.norm.weight has no tensor in the directory"):
        require_bijection(shapes, model)
