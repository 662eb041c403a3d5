"""Experts in MXFP4, as gpt-oss is published: the values of `transformers`, read in parts, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmworks.errors import UserError
from lmworks.export.huggingface import write_model
from lmworks.io.files import read_json, write_json
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Balance, Model, Moe
from lmworks.weights.huggingface import map_weights, open_all, read_model
from lmworks.weights.mxfp4 import dequantize

_MOE = Moe(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=0, first_k_dense_replace=0,
    scoring_func="softmax", balance=Balance(method="aux"), add_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0,
)  # fmt: skip
CONFIG = Model(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=32,
    attention_bias=True, attention_output_bias=True, attention_sinks=True, moe=_MOE,
)  # fmt: skip


def theirs(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(E, in, out), by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)


def test_all_bytes_and_scales_are_what_transformers_makes_of_them() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255).view(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()  # 255 is not a number
    found, expected = dequantize(blocks, scales, "x").transpose(1, 2), theirs(blocks, scales)
    assert torch.equal(found.to(torch.bfloat16), expected) and torch.equal(found, expected.float())


def _published(folder: Path) -> dict[str, torch.Tensor]:
    """A model with experts in MXFP4, some scales in another file than their blocks; the values that they stand for."""
    write_model(initialize(Transformer(CONFIG), 3), folder, {"eos_token_id": 0, "pad_token_id": 0}, torch.bfloat16)
    stored, values, generator = {}, {}, torch.Generator().manual_seed(4)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(115, 130, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = theirs(blocks, scales)
    names = sorted(stored)
    (folder / "model.safetensors").unlink()
    files = {f"model-{number:05d}-of-00002.safetensors": names[number - 1 :: 2] for number in (1, 2)}
    for file, part in files.items():
        save_file({name: stored[name].contiguous() for name in part}, folder / file)
    write_json(folder / "model.safetensors.index.json",
               {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}})  # fmt: skip
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = read_json(folder / "config.json") | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": left}}
    write_json(folder / "config.json", config)
    return values


def test_a_published_model_is_read_as_what_it_stands_for(tmp_path: Path) -> None:
    values = _published(tmp_path)
    state = read_model(tmp_path).state_dict()
    for layer in range(2):
        start, experts = f"model.layers.{layer}.mlp.experts.", f"layers.{layer}.ffn.experts."
        both, down = values[start + "gate_up_proj"].float(), values[start + "down_proj"].float()
        assert torch.equal(state[experts + "gate"], both[..., 0::2].transpose(1, 2))
        assert torch.equal(state[experts + "up"], both[..., 1::2].transpose(1, 2))
        assert torch.equal(state[experts + "down"], down.transpose(1, 2))


def test_a_part_of_an_expert(tmp_path: Path) -> None:
    """Ranks read slices; each is that of the whole."""
    _published(tmp_path)
    model = read_model(tmp_path)
    with ExitStack() as stack:
        handles = {name: handle for handle in open_all(tmp_path, stack).values() for name in handle.keys()}  # noqa: SIM118
        assert handles.keys() == map_weights(tmp_path, model.config).keys()
        for part, kind in (("gate", "weight"), ("up", "weight"), ("down", "weight"), ("up_bias", "bias")):
            name = f"{part.removesuffix('_bias')}_proj.{kind}"
            whole = model.state_dict()[f"layers.1.ffn.experts.{part}"][2]
            source = handles[f"model.layers.1.mlp.experts.2.{name}"].get_slice(f"model.layers.1.mlp.experts.2.{name}")
            assert source.get_shape() == list(whole.shape)
            for key in ((slice(3, 29), slice(5, 31)), (slice(0, 1), slice(37, 61)), slice(7, 7)):
                key = key[: whole.ndim] if isinstance(key, tuple) else key
                assert torch.equal(source[key].float(), whole[key])


def _without_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]


def _other_shape(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, 1:].contiguous()


def _other_type(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name].float()


def _no_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_scales, r"has no tensor model.layers.0.mlp.experts.down_proj_scales, the scales of .*_blocks"),
        (_other_shape, r"down_proj_blocks and _scales have shapes \(4, 64, 1, 16\) and \(4, 63, 1\), which are not those of MXFP4"),
        (_other_type, r"down_proj_scales holds F32, and MXFP4 is bytes"),
        (_no_number, r"down_proj_scales has a scale that is not a number \(255\); the file is damaged"),
    ],
)
def test_what_does_not_fit_is_one_line(change: Callable[[dict[str, Any]], None], reason: str, tmp_path: Path) -> None:
    _published(tmp_path)
    for file in sorted(tmp_path.glob("*.safetensors")):
        tensors = load_file(file)
        if any(name.startswith("model.layers.0.mlp.experts.down_proj_scales") for name in tensors):
            change(tensors)
            save_file(tensors, file)
    index = read_json(tmp_path / "model.safetensors.index.json")
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(UserError, match=reason) as error:
        read_model(tmp_path)
    assert "\n" not in str(error.value)
