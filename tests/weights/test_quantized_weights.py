"""Base models in FP8, fp16 and in shards: read as what they stand for, or refused by the name of what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from base_models import write_model
from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json
from lmworks.weights.huggingface import map_weights, read_model

BLOCK = (16, 24)  # rows and columns of a scale


def _quantized(folder: Path, form: str) -> dict[str, torch.Tensor]:
    """Write the model of `folder` again with matrices in FP8; returns the values that they stand for."""
    tensors, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj.weight" not in name:
            stored[name] = values[name] = tensor
            continue
        rows, columns = tensor.shape
        if form == "block":
            scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
            whole = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
        else:
            scale = torch.rand(rows, 1) + 0.5 if form == "channel" else torch.rand(1) + 0.5
            whole = scale.expand(rows, columns)
        stored[name] = (tensor / whole).to(torch.float8_e4m3fn)
        values[name] = stored[name].float() * whole
        stored[f"{name}_scale{'_inv' if form == 'block' else ''}"] = scale
    names = sorted(stored)
    parts = {"model-00001-of-00002.safetensors": names[: len(names) // 2], "model-00002-of-00002.safetensors": names[len(names) // 2 :]}
    (folder / "model.safetensors").unlink()
    for file, part in parts.items():  # so that some scales lie in another file than their weights
        save_file({name: stored[name].contiguous() for name in part}, folder / file)
    index = {name: file for file, part in parts.items() for name in part}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": form}}}
    compressed = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    block = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    write_json(folder / "config.json", config | {"quantization_config": block if form == "block" else compressed})
    return values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, 64, hidden_size=40, num_attention_heads=4, intermediate_size=56)  # blocks that do not come out even
    return tmp_path


@pytest.mark.parametrize("form", ["block", "channel", "tensor"])
def test_fp8_is_read_as_what_it_stands_for(folder: Path, form: str) -> None:
    values = _quantized(folder, form)
    model = read_model(folder)
    assert set(map_weights(folder, model.config)) == set(values)
    state = model.state_dict()
    torch.testing.assert_close(state["layers.1.attention.query.weight"], values["model.layers.1.self_attn.q_proj.weight"], rtol=0, atol=0)
    torch.testing.assert_close(state["layers.0.ffn.down.weight"], values["model.layers.0.mlp.down_proj.weight"], rtol=0, atol=0)
    torch.testing.assert_close(state["embedding.weight"], values["model.embed_tokens.weight"], rtol=0, atol=0)


def test_a_part_of_an_fp8_tensor(folder: Path) -> None:
    from contextlib import ExitStack

    from lmworks.weights.huggingface import open_all

    values = _quantized(folder, "block")
    with ExitStack() as stack:
        handles = {name: handle for handle in open_all(folder, stack).values() for name in handle.keys()}  # noqa: SIM118
        for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"):
            for key in ((slice(7, 29), slice(3, 40)), (slice(16, 17),), slice(0, 5)):
                torch.testing.assert_close(handles[name].get_slice(name)[key], values[name][key], rtol=0, atol=0)


def test_fp8_without_its_scale_is_refused(folder: Path) -> None:
    _quantized(folder, "channel")
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor for name, tensor in load_file(file).items() if "up_proj.weight_scale" not in name}, file)
    with pytest.raises(UserError, match=r"up_proj\.weight holds float8_e4m3fn; lmworks does not read this quantization"):
        read_model(folder)


def test_a_scale_of_another_shape_is_refused(folder: Path) -> None:
    _quantized(folder, "block")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: one[:1].contiguous() if name.endswith("scale_inv") else one for name, one in tensors.items()}, file)
    with pytest.raises(UserError, match=r"scale_inv has shape \(1, \d\), which does not fit"):
        read_model(folder)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized with bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "quantized with gptq"),
        ({"quant_method": "awq", "bits": 4}, "quantized with awq"),
        ({"quant_method": "mxfp4"}, "quantized with mxfp4"),
        ({"bits": 4}, "quantized with None"),
        (["fp8"], "quantized with None"),
        ({"quant_method": "fp8", "weight_block_size": [128, "x"]}, "which are not two numbers"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}, "4 bits of int"),
        ({"quant_method": "compressed-tensors"}, "no groups"),
    ],
)
def test_other_quantizations_are_refused_by_name(folder: Path, given: Any, reason: str) -> None:
    write_json(folder / "config.json", read_json(folder / "config.json") | {"quantization_config": given})
    with pytest.raises(UserError) as raised:
        read_model(folder)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_exactly(folder: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    state = read_model(folder).state_dict()
    torch.testing.assert_close(state["norm.weight"], tensors["model.norm.weight"].float(), rtol=0, atol=0)
    torch.testing.assert_close(state["layers.0.ffn.up.weight"], tensors["model.layers.0.mlp.up_proj.weight"].float(), rtol=0, atol=0)


def test_a_missing_part_is_named(folder: Path) -> None:
    _quantized(folder, "tensor")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors does not exist, which model\.safetensors\.index\.json names"):
        read_model(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["a"]}))
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        read_model(folder)


def test_a_pipe_in_the_place_of_weights_is_not_opened(folder: Path) -> None:
    import os

    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors is not a regular file"):
        read_model(folder)
