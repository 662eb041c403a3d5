"""compressed-tensors: what is read back of it, what every tensor became, and in slow tests llm-compressor itself."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import Lmworks
from engines import engine
from safetensors.torch import load_file, save_file

from lmworks.errors import UserError
from lmworks.model import Transformer
from lmworks.quantize import compressed
from lmworks.quantize.agreement import Window
from lmworks.quantize.certificate import problems
from lmworks.quantize.child import PROGRAMS
from lmworks.quantize.evidence import expert_tokens
from lmworks.quantize.source import SCHEMES, Source, open_source
from lmworks.recipe.schema.model import Model
from small_config import small_config


def quantized_int8(original: Path, target: Path) -> None:
    """A directory as llm-compressor writes it for int8: a scale per row, routers, head and embedding as they are."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensor.float() / scale).round().to(torch.int8)
        tensors[name.replace(".weight", ".weight_scale")] = scale
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    for file in original.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, target / file.name)


@pytest.fixture
def pair(make_run: Callable[..., Any], tmp_path: Path) -> tuple[Source, Path, Path]:
    source = open_source(str(make_run("glm4moe").directory))
    original = source.write_huggingface(tmp_path / "original")
    quantized_int8(original, tmp_path / "target")
    return source, original, tmp_path / "target"


def change(target: Path, act: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(target / "model.safetensors")
    act(tensors)
    save_file(tensors, target / "model.safetensors")


def test_layers_of_one_block_are_refused() -> None:
    model = Model.model_validate(small_config() | {"layer_types": ["full_attention", "mlp"]})
    with torch.device("meta"):
        source: Any = SimpleNamespace(model=Transformer(model))
    with pytest.raises(UserError, match=r"int8 would also round the state spaces of layers of one block .* use a form of GGUF"):
        compressed.require(SCHEMES["int8"], source, ())


def test_every_tensor_is_accounted_for_and_comes_back(pair: tuple[Source, Path, Path], tmp_path: Path) -> None:
    source, original, target = pair
    records = compressed.account(SCHEMES["int8"], original, target)
    assert not problems(records, SCHEMES["int8"].limits) and not compressed.check_files(original, target)
    assert {one.name for one in records} == set(load_file(original / "model.safetensors"))
    assert {one.fate for one in records if one.role} == {"kept"}
    model = compressed.dequantized(source, target, tmp_path)
    expected = source.model.state_dict()
    for name, tensor in model.state_dict().items():
        if "router" in name or "embedding" in name or "norm" in name:
            assert torch.equal(tensor, expected[name]), name
        else:  # half a step of 1/127 of the largest value of a row
            assert (tensor - expected[name]).abs().max() <= expected[name].abs().max() / 127 / 2 * 1.01, name


ROUTER, WEIGHT = "model.layers.1.mlp.gate.weight", "model.layers.2.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda tensors: tensors[ROUTER].zero_(), "gate.weight was to be kept"),
        (lambda tensors: tensors.pop(WEIGHT), "up_proj.weight is missing"),
        (lambda tensors: tensors[WEIGHT.replace(".weight", ".weight_scale")].mul_(1.1), "has an error of 10"),
        (lambda tensors: tensors[WEIGHT].zero_(), "is all zeros"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "extra was to be kept"),
        (lambda tensors: tensors["lm_head.weight"].mul_(1.01), "lm_head.weight was to be kept"),
    ],
)
def test_a_planted_fault_is_found(pair: tuple[Source, Path, Path], act: Callable[[dict[str, torch.Tensor]], Any], says: str) -> None:
    _, original, target = pair
    change(target, act)
    found = problems(compressed.account(SCHEMES["int8"], original, target), SCHEMES["int8"].limits)
    assert len(found) == 1 and says in found[0], found


def test_a_template_or_config_that_changed_is_found(pair: tuple[Source, Path, Path]) -> None:
    _, original, target = pair
    (target / "chat_template.jinja").write_text("other")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    found = compressed.check_files(original, target)
    assert found == ["the chat template differs from the original's", "config.json differs from the original's in num_hidden_layers"]


NORM, OTHER_NORM = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(("name", "fate"), [("gptq", "kept"), ("awq", "scaled")])
def test_what_is_not_quantized_is_the_original_s(pair: tuple[Source, Path, Path], name: str, fate: str) -> None:
    """llm-compressor adds 1 to the norms of Gemma, and subtracts it again; AWQ moves its scales into some of them."""
    source, original, target = pair
    tensors = load_file(target / "model.safetensors")
    for one in (NORM, OTHER_NORM, "model.norm.weight", ROUTER):
        tensors[one] = (tensors[one].float() + 1e-3).to(tensors[one].dtype)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].double()
    later = [one for one in tensors if one.startswith("model.layers.2.")]
    save_file({one: tensors.pop(one) for one in later}, target / "model-2.safetensors")
    save_file(tensors, target / "model.safetensors")
    untouched = (target / "model-2.safetensors").stat().st_mtime_ns
    (original / "additional_chat_templates").mkdir()
    (original / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    config = json.loads((original / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": {"ignore": []}}))
    assert "the file additional_chat_templates/tool_use.jinja differs from the original's" in compressed.check_files(original, target)
    compressed._complete(SCHEMES[name], source, original, target)
    fates = {one.name: one.fate for one in compressed.account(SCHEMES[name], original, target)}
    assert fates.pop(NORM) == fate and fates["lm_head.weight"] == "kept"
    assert set(fates.values()) == {"kept", "quantized"} and not compressed.check_files(original, target)
    assert (target / "model-2.safetensors").stat().st_mtime_ns == untouched


def test_awq_scales_no_other_norms(pair: tuple[Source, Path, Path]) -> None:
    _, original, target = pair
    change(target, lambda tensors: [tensors[name].mul_(1.01) for name in (NORM, OTHER_NORM)])
    fates = {one.name: one.fate for one in compressed.account(SCHEMES["awq"], original, target)}
    assert (fates[NORM], fates[OTHER_NORM]) == ("scaled", "changed")


def test_awq_scales_the_norm_that_comes_before_a_feed_forward_layer() -> None:
    """In Gemma 2 and 3 post_attention_layernorm is behind the attention."""
    program = runpy.run_path(str(PROGRAMS))

    def mapped(*norms: str) -> dict[str, list[str]]:
        names = ["model.layers.0", *(f"model.layers.0.{norm}_layernorm" for norm in norms), "model.layers.0.mlp.gate_proj"]
        model = SimpleNamespace(named_modules=lambda: [(name, None) for name in names])
        return {smooth.replace("\\", "").split(".")[-1]: balance for smooth, balance in program["mappings"](model)}

    assert mapped("input", "post_attention").keys() == {"post_attention_layernorm$"}
    assert mapped("input", "post_attention", "pre_feedforward", "post_feedforward").keys() == {"pre_feedforward_layernorm$"}
    assert not mapped("post_attention", "post_feedforward")  # OLMo 2 has none before it


def test_four_bits_are_unpacked_in_order(tmp_path: Path) -> None:
    """Eight values in an int32, the first in the lowest bits, each with an offset of 8; a scale per group of a row."""
    values = torch.arange(-8, 8).repeat(4).view(2, 32)
    packed = torch.zeros(2, 4, dtype=torch.int64)
    for at in range(32):
        packed[:, at // 8] |= (values[:, at].long() + 8) << (4 * (at % 8))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    save_file({"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_shape": torch.tensor([2, 32])}, tmp_path / "a.safetensors")
    with compressed._tensors(tmp_path) as found:
        got, kind = compressed._dequantized("a.weight", found) or (None, "")
    assert kind == "INT4" and torch.equal(got, values * scale.repeat_interleave(16, 1))


def test_scales_that_awq_moves_are_no_error() -> None:
    torch.manual_seed(0)
    weight = torch.randn(48, 64)
    moved = weight * torch.rand(1, 64).add(0.5) * torch.rand(48, 1).add(0.5)
    fitted = compressed._rescaled(weight, moved)
    torch.testing.assert_close(fitted, moved, rtol=1e-3, atol=1e-3)  # a few rounds of alternating least squares
    moved[3] = torch.randn(64)
    assert (compressed._rescaled(weight, moved)[3] - moved[3]).norm() > 0.5 * moved[3].norm()


def test_tokens_per_expert(make_run: Callable[..., Any]) -> None:
    run = make_run("glm4moe")
    windows = [Window(tuple(range(100, 140)), "a"), Window(tuple(range(50, 70)), "b")]
    found = expert_tokens(run.model, windows, 20)
    assert found and found["count"] == 3 * 8 and found["least"] <= found["median"] <= found["most"] <= 60
    routed = [one["tokens"] for one in found["fewest"]]
    assert routed == sorted(routed) and routed[0] == found["least"]
    assert found["under_limit"] >= sum(tokens < 20 for tokens in routed)
    assert expert_tokens(make_run("llama").model, windows, 20) is None


def test_without_the_library_the_error_names_the_extra(
    make_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(compressed, "find_python", lambda modules, given: None)
    for scheme in ("fp8", "int8", "gptq", "awq"):
        done = Lmworks(monkeypatch, capfd)("quantize", make_run("llama").directory, "--to", scheme, "--out", tmp_path / "out")
        assert "llmcompressor==0.14.0.1" in done.error and "--python" in done.error and "lmworks[compress]" in done.error
    assert not (tmp_path / "out").exists()


def test_rows_that_no_group_divides_are_refused(make_run: Callable[..., Any]) -> None:
    source = open_source(str(make_run("glm4moe").directory))
    assert compressed._group(SCHEMES["gptq"], source) == 64 and compressed._group(SCHEMES["fp8"], source) == 0
    moe = source.model.config.moe
    assert moe is not None
    source.model.config = source.model.config.model_copy(update={"moe": moe.model_copy(update={"moe_intermediate_size": 40})})
    with pytest.raises(Exception, match=r"gptq needs rows of a multiple of 32 weights, and the model has rows of 40; use fp8 or int8"):
        compressed.require(SCHEMES["gptq"], source, [Window((1, 2), "a")])
    with pytest.raises(Exception, match=r"needs text to calibrate with.*--calibration FILE"):
        compressed.require(SCHEMES["gptq"], source, [])


def test_what_states_and_routers_are_made_of_is_named_to_the_library() -> None:
    """Routers of every class, gates of shared experts, and linear layers are kept; the matrices of attention and of experts are not."""
    sensitive = runpy.run_path(str(PROGRAMS))["_SENSITIVE"]

    def is_kept(module: str) -> bool:
        return any(re.match(one[3:], module) if one.startswith("re:") else one == module for one in sensitive)

    layer = "model.layers.3."
    kept = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "block_sparse_moe.router.layer", "mlp.shared_expert_gate",
            "linear_attn.in_proj_qkvz", "linear_attn.out_proj", "mamba.in_proj", "conv.in_proj", "conv.conv")  # fmt: skip
    assert all(is_kept(layer + one) for one in kept) and is_kept("lm_head")
    quantized = ("mlp.gate_proj", "mlp.experts.7.gate_proj", "self_attn.q_proj", "mlp.shared_expert.up_proj", "self_attn.o_proj",
                 "feed_forward.w1")  # fmt: skip
    assert not any(is_kept(layer + one) for one in quantized)


@pytest.mark.slow
@pytest.mark.needs("compress")
@pytest.mark.parametrize("name", ["glm4moe-mtp", "deepseek", "qwen3"])  # deepseek has rows of 48, which 4 bits cannot hold
def test_llm_compressor(make_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, name: str) -> None:
    run = make_run(name, 64)
    python = engine("LMWORKS_COMPRESS_PYTHON")
    options = ("--out", tmp_path, "--tokens", "2000", "--python", python, "--json")
    schemes = "fp8,int8" if name == "deepseek" else "fp8,int8,gptq,awq"
    done = Lmworks(monkeypatch, capfd)("quantize", run.directory, "--to", schemes, *options)
    assert done.code == 0, done.err + done.out
    results = {one["scheme"]: one for one in json.loads(done.out)["results"]}
    for scheme, found in results.items():
        fates = found["tensors"]["fates"]
        assert found["verdict"] == "passed" and not {"missing", "changed"} & set(fates) and fates["quantized"] > 20, scheme
        assert found["mtp"] == ("" if name == "qwen3" else "kept as they are"), scheme
        assert found["template"] == "equal"
        assert found["calibration"]["used"] == (scheme in ("gptq", "awq"))
        if name != "qwen3" and scheme in ("gptq", "awq"):
            assert found["calibration"]["experts"]["count"] == 3 * 8
    assert results["fp8"]["bytes"] < results["fp8"]["original_bytes"]
    assert name == "deepseek" or results["gptq"]["bytes"] < results["fp8"]["bytes"]


@pytest.mark.slow
@pytest.mark.needs("compress")
@pytest.mark.needs("vllm")
@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
def test_vllm_is_asked(make_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, name: str) -> None:
    """Logits and speed are those of the engine that the forms are for, on a CPU for those with kernels for it; of the others the page says
    that it did not run them."""
    run = make_run(name, 64)
    pythons = [word for name in ("COMPRESS", "VLLM") for word in ("--python", engine(f"LMWORKS_{name}_PYTHON"))]
    options = ("--out", tmp_path, "--tokens", "600", *pythons, "--json")
    done = Lmworks(monkeypatch, capfd)("quantize", run.directory, "--to", "fp8,int8,gptq,awq", *options)
    assert done.code == 0, done.err + done.out
    results = {one["scheme"]: one for one in json.loads(done.out)["results"]}
    asked = {scheme for scheme, found in results.items() if found["scored_by"].startswith("vLLM ")}
    print({scheme: (found["scored_by"], found["agreement"]["kl_mean"], found["warnings"]) for scheme, found in results.items()})
    assert name != "qwen3" or "int8" in asked, "on a CPU, vLLM has kernels for int8, and none for quantized experts"
    for scheme, found in results.items():
        assert found["verdict"] == "passed"
        if scheme in asked:
            assert found["speed"]["engine"] == "vLLM" and found["speed"]["decode"] > 0 < found["speed"]["original"]["prefill"]
        else:
            assert any("vLLM does not run it on this machine" in warning for warning in found["warnings"])
