"""AWQ, GPTQ and AutoRound: matrices that are packed here as their documentation says are read as what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from base_models import write_model
from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json
from lmworks.weights.huggingface import map_weights, read_model

GROUP = 16


def _words(numbers: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """int32 (rows, columns / each) of numbers (rows, columns): the i-th place of a word has its number `order[i]`."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // len(order), dtype=torch.int64)
    for place, of_word in enumerate(order):
        words |= numbers[:, of_word :: len(order)].long() << bits * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _write(folder: Path, method: str, bits: int = 4, form: str = "gptq", desc_act: bool = False,
           own: dict[str, tuple[int, int] | None] | None = None) -> dict[str, torch.Tensor]:  # fmt: skip
    """Write the model of `folder` again with packed matrices; returns the values that they stand for. Names that contain a key of `own`
    have other bits and groups, or are not packed."""
    write_model(folder, 64)
    stored, values, usual = {}, {}, (bits, GROUP)
    for name, tensor in load_file(folder / "model.safetensors").items():
        found = next((one for part, one in (own or {}).items() if part in name), usual)
        if "_proj.weight" not in name or found is None:
            stored[name] = tensor
            continue
        bits, group = found
        order = [0, 2, 4, 6, 1, 3, 5, 7] if method == "awq" else list(range(32 // bits))
        outputs, inputs = tensor.shape
        groups, module = inputs // group, name.removesuffix(".weight")
        numbers, zeros = torch.randint(1 << bits, (inputs, outputs)), torch.randint(1 << bits, (groups, outputs))
        scales = (torch.rand(groups, outputs) + 0.5).half()
        of = torch.arange(inputs) // group
        of = of[torch.randperm(inputs)] if desc_act else of
        values[name] = ((numbers - zeros[of]).float() * scales[of].float()).t()
        kept = (zeros - 1) % (1 << bits) if method == "gptq" and form == "gptq" else zeros
        stored |= {f"{module}.qzeros": _words(kept, bits, order), f"{module}.scales": scales}
        packed = _words(numbers, bits, order) if method == "awq" else _words(numbers.t(), bits, order).t()
        stored[f"{module}.qweight"] = packed.contiguous()
        if method == "gptq":
            stored[f"{module}.g_idx"] = of.int()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    given = {"quant_method": method, "bits": usual[0], "group_size": GROUP, "desc_act": desc_act}
    given |= {"version": "gemm", "zero_point": True} if method == "awq" else {"checkpoint_format": form}
    write_json(folder / "config.json", read_json(folder / "config.json") | {"quantization_config": given})
    return values


CASES: list[dict[str, Any]] = [
    {"method": "awq"}, {"method": "gptq"}, {"method": "gptq", "bits": 8}, {"method": "gptq", "bits": 2, "form": "gptq_v2"},
    {"method": "gptq", "desc_act": True},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_packed_matrices_are_read_as_what_they_stand_for(tmp_path: Path, case: dict[str, Any]) -> None:
    from contextlib import ExitStack

    from lmworks.weights.huggingface import open_all

    values = _write(tmp_path, **case)
    model = read_model(tmp_path)
    assert set(values) < set(map_weights(tmp_path, model.config))
    for ours, theirs in (("1.ffn.down", "1.mlp.down_proj"), ("0.attention.value", "0.self_attn.v_proj")):
        torch.testing.assert_close(model.state_dict()[f"layers.{ours}.weight"], values[f"model.layers.{theirs}.weight"], rtol=0, atol=0)
    with ExitStack() as stack:
        (handle,) = open_all(tmp_path, stack).values()
        for name, expected in values.items():
            torch.testing.assert_close(handle.get_slice(name)[3:9, 5:31], expected[3:9, 5:31], rtol=0, atol=0)


def _state(folder: Path, **changes: Any) -> None:
    """Change the quantization_config of a folder."""
    config = read_json(folder / "config.json")
    config["quantization_config"] = {key: one for key, one in (config["quantization_config"] | changes).items() if one is not None}
    write_json(folder / "config.json", config)


def _require(folder: Path, values: dict[str, torch.Tensor]) -> None:
    from contextlib import ExitStack

    from lmworks.weights.huggingface import open_all

    read_model(folder)
    with ExitStack() as stack:
        (handle,) = open_all(folder, stack).values()
        for name, expected in values.items():
            torch.testing.assert_close(handle.get_tensor(name), expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize(
    ("method", "form", "packing"),
    [("gptq", "gptq", "auto_round:auto_gptq"), ("gptq", "gptq", None), ("gptq", "gptq_v2", "auto_round:gptqmodel"),
     ("awq", "gemm", "auto_round:auto_awq")],
)  # fmt: skip
def test_a_folder_of_autoround_has_the_layout_that_it_names(tmp_path: Path, method: str, form: str, packing: str | None) -> None:
    values = _write(tmp_path, method, form=form)
    _state(tmp_path, quant_method="auto-round", packing_format=packing, version=None, checkpoint_format=None, data_type="int", sym=False)
    _require(tmp_path, values)


OWN: dict[str, tuple[int, int] | None] = {"0.mlp.up_proj": (8, GROUP), "0.self_attn.v_proj": (4, 32), "1.mlp.gate_proj": None}


@pytest.mark.parametrize(
    "stated",
    [
        {"dynamic": {r"-:.*1\.mlp\.gate_proj": {}, r"+:.*0\.mlp\.up_proj": {"bits": 8, "sym": False}, ".*v_proj": {"group_size": 32}}},
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int",
         "extra_config": {"model.layers.1.mlp.gate_proj": {"bits": 16, "data_type": "float"}, "model.layers.0.mlp.up_proj": {"bits": 8},
                          "model.layers.0.self_attn.v_proj": {"group_size": 32}}},
    ],
)  # fmt: skip
def test_modules_may_have_bits_and_groups_of_their_own(tmp_path: Path, stated: dict[str, Any]) -> None:
    values = _write(tmp_path, "gptq", own=OWN)
    _state(tmp_path, **stated)
    _require(tmp_path, values)


EARLY = {
    "awq": ("quant_config.json", {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}),
    "gptq": ("quantize_config.json", {"bits": 4, "group_size": GROUP, "damp_percent": 0.01, "desc_act": False, "sym": False}),
}


@pytest.mark.parametrize("method", EARLY)
def test_an_early_folder_of_autoawq_or_autogptq_says_its_form_in_a_file_of_its_own(tmp_path: Path, method: str) -> None:
    values = _write(tmp_path, method)
    config = read_json(tmp_path / "config.json")
    del config["quantization_config"]
    write_json(tmp_path / "config.json", config)
    name, given = EARLY[method]
    write_json(tmp_path / name, given)
    found = read_model(tmp_path).state_dict()["layers.0.ffn.up.weight"]
    torch.testing.assert_close(found, values["model.layers.0.mlp.up_proj.weight"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("awq", {"version": "gemv"}, r"awq \(4 bits, format gemv, groups of 16\); lmworks reads"),
        ("gptq", {"bits": 3}, r"gptq \(3 bits"), ("gptq", {"group_size": None}, "groups of None"),
        ("gptq", {"bits": 8}, r"qzeros has shape .* and not .*; its quantization_config \(8 bits in groups of 16\) is that of"),
        ("gptq", {"group_size": 8}, r"(scales|qzeros) has shape \(\d, \d+\) and not \(\d, \d+\)"),
        ("gptq", {"dynamic": {"+:a": {"bits": 3}}}, r"gptq \(dynamic '\+:a': 3 bits, format gptq"),
        ("gptq", {"dynamic": {"+:a": {"format": "marlin"}}}, r"its dynamic gives '\+:a' another format, which lmworks does not read"),
        ("gptq", {"dynamic": ["a"]}, "its dynamic gives 'dynamic' another form"),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:fp8"}, r"auto-round \(4 bits, format auto_round:fp8"),
        ("gptq", {"quant_method": "auto-round", "data_type": "int", "extra_config": {"a": {"data_type": "mx_fp"}}},
         "its extra_config gives 'a' another data_type"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(tmp_path: Path, method: str, changes: dict[str, Any], reason: str) -> None:
    _write(tmp_path, method)
    _state(tmp_path, **changes)
    with pytest.raises(UserError, match=reason):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("end", "change", "reason"),
    [
        (".scales", None, r"has no tensor .*\.scales, a part of .*up_proj\.qweight"),
        (".qweight", torch.Tensor.float, "qweight holds F32 and not I32"),
        (".g_idx", lambda one: one + 1, "g_idx names groups that there are not"),
    ],
)  # fmt: skip
def test_damaged_parts_are_named(tmp_path: Path, end: str, change: Any, reason: str) -> None:
    _write(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj{end}"
    part = tensors.pop(name)
    save_file(tensors | ({name: change(part)} if change else {}), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=reason):
        read_model(tmp_path)
