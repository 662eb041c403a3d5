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


def _compressed(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def _packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed integers (rows, columns) in words of 32 bits along each row, the lowest bits first."""
    every = 32 // bits
    numbers = torch.nn.functional.pad(numbers.long() + (1 << bits - 1), (0, -numbers.shape[1] % every))
    words = (numbers.unflatten(1, (-1, every)) << bits * torch.arange(every)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _integers(folder: Path, bits: int, packed: bool, groups: int, zeros: bool) -> dict[str, torch.Tensor]:
    """Write the model of `folder` again with matrices of integers, as the package compressed-tensors does; returns their values.
    `groups`: scales of a row; 0 for one scale for all."""
    stored, values = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        numbers = torch.randint(-(1 << bits - 1), 1 << bits - 1, (rows, columns))
        shape = (rows, groups) if groups else (1, 1)
        scale = torch.rand(shape) + 0.5
        zero = torch.randint(-3, 4, shape) if zeros else torch.zeros(shape, dtype=torch.long)
        whole = [one.repeat_interleave(columns // shape[1], 1).expand(rows, columns) for one in (scale, zero)]
        values[name] = (numbers - whole[1]).float() * whole[0]
        if packed:
            stored |= {f"{name}_packed": _packed(numbers, bits), f"{name}_shape": torch.tensor(tensor.shape)}
        else:
            stored[name] = numbers.to(torch.int8)
        stored[f"{name}_scale"] = scale
        if zeros:
            stored[f"{name}_zero_point"] = _packed(zero.t(), bits).t().contiguous() if packed else zero.to(torch.int8)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    given = _compressed(num_bits=bits, type="int") | {"format": "pack-quantized" if packed else "int-quantized"}
    write_json(folder / "config.json", read_json(folder / "config.json") | {"quantization_config": given})
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
    with pytest.raises(UserError, match=r"has no scale of tensor model\.layers\.\d\.mlp\.up_proj\.weight "):
        read_model(folder)


@pytest.mark.parametrize(
    ("bits", "packed", "groups", "zeros"),
    [(8, False, 1, False), (8, False, 4, True), (4, True, 4, False), (4, True, 8, True), (8, True, 1, True)],
)
def test_integers_are_read_as_what_they_stand_for(folder: Path, bits: int, packed: bool, groups: int, zeros: bool) -> None:
    from contextlib import ExitStack

    from lmworks.weights.huggingface import open_all

    values = _integers(folder, bits, packed, groups, zeros)
    with ExitStack() as stack:
        handles = {name: handle for handle in open_all(folder, stack).values() for name in handle.keys()}  # noqa: SIM118
        for name, expected in values.items():
            for key in ((slice(None), slice(None)), (slice(7, 29), slice(3, 21)), slice(1, 5)):
                torch.testing.assert_close(handles[name].get_slice(name)[key], expected[key], rtol=0, atol=0)
    model = read_model(folder)
    assert set(values) < set(map_weights(folder, model.config))
    down = model.state_dict()["layers.1.ffn.down.weight"]
    torch.testing.assert_close(down, values["model.layers.1.mlp.down_proj.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("other", ["int8", "fp8"])
def test_groups_of_layers_may_have_different_forms(folder: Path, other: str) -> None:
    """As llm-compressor writes a recipe with two schemes: which weights have which form, the tensors say."""
    values, eight = _integers(folder, 4, True, 4, True), folder / "eight"
    four = load_file(folder / "model.safetensors")
    write_model(eight, 64, hidden_size=40, num_attention_heads=4, intermediate_size=56)
    others = _integers(eight, 8, True, 8, True) if other == "int8" else _quantized(eight, "channel")
    names = [name for name in values if "mlp" in name]
    stored = {name: one for name, one in four.items() if not any(name.startswith(start) for start in names)}
    for file in eight.glob("*.safetensors"):
        stored |= {name: one for name, one in load_file(file).items() if any(name.startswith(start) for start in names)}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    groups = {
        "group_0": {"format": "pack-quantized", "targets": ["re:.*self_attn.*"], "weights": {"num_bits": 4, "type": "int"}},
        "group_1": {"format": "pack-quantized" if other == "int8" else "float-quantized", "targets": ["re:.*mlp.*"],
                    "weights": {"num_bits": 8, "type": "int" if other == "int8" else "float"}},
    }  # fmt: skip
    given = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    write_json(folder / "config.json", read_json(folder / "config.json") | {"quantization_config": given})
    state = read_model(folder).state_dict()
    expected = others["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(state["layers.1.ffn.down.weight"], expected, rtol=0, atol=0)
    torch.testing.assert_close(state["layers.0.attention.value.weight"], values["model.layers.0.self_attn.v_proj.weight"], rtol=0, atol=0)


@pytest.mark.parametrize(("part", "reason"), [("_shape", "has no tensor"), ("_scale", "has no scale of tensor")])
def test_packed_integers_without_a_part_are_refused(folder: Path, part: str, reason: str) -> None:
    _integers(folder, 4, True, 4, False)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if not name.endswith(f"up_proj.weight{part}")}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"{reason}.*up_proj"):
        read_model(folder)


def test_packed_integers_of_another_size_are_refused(folder: Path) -> None:
    _integers(folder, 4, True, 4, True)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {f"{name}_zero_point": tensors[f"{name}_zero_point"][:1]}, folder / "model.safetensors")
    with pytest.raises(UserError, match="zero_point does not fit"):
        read_model(folder)
    save_file(tensors | {f"{name}_shape": torch.tensor([56, 39 * 8])}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"up_proj\.weight_packed has shape .* which does not hold \(56, 312\) integers of 4 bits"):
        read_model(folder)


def test_a_scale_of_something_else_is_refused(folder: Path) -> None:
    values = _integers(folder, 8, False, 1, False)
    name = next(iter(values))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensors[name].float()}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"tensor {name} has a scale and holds F32"):
        read_model(folder)


def test_quantized_weights_without_their_config_are_named(folder: Path) -> None:
    _quantized(folder, "block")
    write_json(folder / "config.json", {key: one for key, one in read_json(folder / "config.json").items() if key != "quantization_config"})
    with pytest.raises(UserError, match=r"has quantized weights \(.*_scale_inv is a scale\), but its config.json has no "):
        read_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["nf4", "double", "int8", "compressed"])
def test_what_a_refusal_advises_can_be_read(tmp_path: Path, form: str) -> None:
    """The printed command is executed as it stands, for quantizations that lmworks refuses."""
    import shlex
    import subprocess
    import sys

    import transformers

    from base_models import write_tokenizer

    pytest.importorskip("compressed_tensors" if form == "compressed" else "bitsandbytes")
    plain, old, new = (tmp_path / name for name in ("plain", "old", "new"))
    write_model(plain, 400, hidden_size=64, intermediate_size=128)
    if form == "compressed":
        with_bits = transformers.CompressedTensorsConfig(
            format="pack-quantized", config_groups={"group_0": {"targets": ["Linear"], "weights": {
                "num_bits": 3, "type": "int", "strategy": "channel", "symmetric": True}}},
            ignore=["lm_head"], quantization_status="compressed",
        )  # fmt: skip
        _integers(plain, 4, True, 1, False)
        tensors = load_file(plain / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_packed")]:
            rows, columns = tensors[name.replace("_packed", "_shape")].tolist()
            tensors[name] = torch.randint(0, 1 << 30, (rows, -(-columns * 3 // 32)), dtype=torch.int32)
        plain.rename(old)
        save_file(tensors, old / "model.safetensors", {"format": "pt"})
        write_json(old / "config.json", read_json(old / "config.json") | {"quantization_config": with_bits.to_dict()})
    else:
        asked = {"load_in_8bit": True} if form == "int8" else {
            "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": form == "double"}  # fmt: skip
        config = transformers.BitsAndBytesConfig(**asked)
        transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu").save_pretrained(old)
    write_tokenizer(old, "qwen", 400)
    with pytest.raises(UserError) as raised:
        read_model(old)
    words = shlex.split(str(raised.value)[str(raised.value).index("python -c") :])
    assert words[0] == "python" and words[3:] == ["OLD", "NEW"]
    subprocess.run([sys.executable, *words[1:3], str(old), str(new)], check=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(old, device_map="cpu")
    wanted = loaded.dequantize().state_dict() if form != "compressed" else {}
    state = read_model(new).state_dict()
    assert (new / "tokenizer.json").is_file()
    for name, ours in (("self_attn.q_proj", "attention.query"), ("mlp.down_proj", "ffn.down")):
        if wanted:
            expected = wanted[f"model.layers.1.{name}.weight"].float()
            torch.testing.assert_close(state[f"layers.1.{ours}.weight"], expected, rtol=1e-2, atol=1e-2)
        assert state[f"layers.1.{ours}.weight"].unique().numel() > 2


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
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 3, "type": "int"}}}}, "3 bits of int"),
        (_compressed(num_bits=4, type="int", actorder="group"), "4 bits of int, actorder group"),
        (_compressed(num_bits=8, type="int") | {"format": "marlin-24"}, "8 bits of int, format marlin-24"),
        (_compressed(num_bits=8, type="int") | {"transform_config": {"a": 1}}, "transform_config {'a': 1}"),
        ({"quant_method": "compressed-tensors"}, "no groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4,
          "type": "int"}}}}, "format nvfp4-pack-quantized"),
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
