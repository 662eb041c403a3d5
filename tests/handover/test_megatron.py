"""Our export in Megatron-Core itself, built from the MODEL_ARGS that slime gets: the same tensors, logits and layers ahead.

Tolerance: 2e-5 of the largest logit, in fp32; the libraries sum in different orders. Wrong ordering of query, key and value, or of the two
halves of `eh_proj`, changes logits by more than 1e-2.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployable import GLM, QWEN3, export
from lmworks.handover.megatron import mapping, model_arguments, to_megatron
from lmworks.model import Transformer
from lmworks.recipe.families.registry import family_of
from lmworks.weights.huggingface import read_model
from tiny_run import Tiny

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("megatron_model.py")
MODELS: dict[str, dict[str, Any]] = {
    "glm": GLM | {"mtp": {}}, "qwen3, tied": QWEN3 | {"tie_word_embeddings": True}, "llama": QWEN3 | {"use_qk_norm": False},
    "qwen2": QWEN3 | {"use_qk_norm": False, "attention_bias": True},
    "qwen3moe": QWEN3 | {"moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 0, "scoring_func": "softmax",
        "first_k_dense_replace": 0, "balance": {"method": "aux"},
    }},
}  # fmt: skip


def in_megatron(directory: Path, model: Transformer, ids_BT: torch.Tensor, folder: Path) -> dict[str, torch.Tensor]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra: slow)")
    tensors = load_file(directory / "model.safetensors")
    pairs = mapping(model.config, transformer_engine=False)
    save_file({one.megatron: to_megatron(one, tensors, model.config).contiguous() for one in pairs}, folder / "weights.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {one.name: one.value for one in model_arguments(model.config, family_of(model.config).name)}
    asked = {
        "arguments": arguments, "weights": str(folder / "weights.safetensors"), "ids": ids_BT.tolist(), "port": port,
        "out": str(folder / "answer.safetensors"),
    }  # fmt: skip
    done = subprocess.run([sys.executable, str(SCRIPT)], input=json.dumps(asked), capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(folder / "answer.safetensors")


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_names_shapes_and_logits(tiny: Tiny, tmp_path: Path, name: str) -> None:
    directory = export(tiny, tmp_path, MODELS[name])
    model = read_model(directory)
    ids_BT = torch.randint(0, model.config.vocab_size or 0, (2, 24), generator=torch.Generator().manual_seed(1))
    answer = in_megatron(directory, model, ids_BT, tmp_path)
    expected = model(ids_BT)
    assert float((answer["logits"] - expected).abs().max() / expected.abs().max()) < 2e-5
    if model.mtp:
        hidden_BTD, _ = model.hidden(ids_BT)
        layer = model.mtp[0]
        spans = model.spans(ids_BT, None, None)
        ahead_BTD, *_ = layer(hidden_BTD, model.embed(ids_BT.roll(-1, dims=1)), model.rotations(spans)[0], spans.mask, None)
        assert float((answer["mtp"] - ahead_BTD)[:, :-1].abs().max() / ahead_BTD.abs().max()) < 2e-5
