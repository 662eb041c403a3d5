"""GGUF files as base models: what our writer and the package `gguf` have written is read back, and what is not known is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_configs import random_config

from lmworks.errors import UserError
from lmworks.export.gguf import architecture_for, write_gguf
from lmworks.model import Transformer
from lmworks.recipe.families.family import Family
from lmworks.recipe.families.registry import FAMILIES, from_config
from lmworks.recipe.gguf_header import TYPES, read_header
from lmworks.recipe.gguf_model import model_of
from lmworks.recipe.schema.model import Model
from lmworks.recipe.weights import find_weights
from lmworks.weights.gguf import _expert, _read
from lmworks.weights.huggingface import load_weights, read_model
from lmworks.weights.open import open_model

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))


def random_model(config: Model, seed: int = 0) -> Transformer:
    """Every weight is different from every other, so that none can be in the wrong place."""
    model = Transformer(config).eval()
    torch.manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not name.endswith("router.bias") or config.moe is None or config.moe.balance.method == "bias":
            tensor.copy_(torch.randn(tensor.shape))
    return model


def _same(read: Transformer, model: Transformer) -> None:
    expected = model.state_dict()
    assert read.state_dict().keys() == expected.keys()
    for name, tensor in read.state_dict().items():
        rounded = 1e-6 if name.endswith(".A_log") else 0.0  # the file has the decay itself, -exp(A_log)
        torch.testing.assert_close(tensor, expected[name], rtol=rounded, atol=rounded, msg=name)


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.architectures], ids=lambda family: family.model_type)
@pytest.mark.parametrize("models", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_random_models_of_each_class_come_back(family: Family, models: int, make_run: Callable[..., Any], tmp_path: Path) -> None:
    tokenizer, written = make_run("llama").tokenizer, 0
    for seed in range(300):
        config = from_config(random_config(family, seed).to_dict() | {"vocab_size": tokenizer.vocab_size})
        config = config.model_copy(update={"mtp": None})  # which a GGUF file does not have
        try:
            architecture_for(config)
        except UserError:
            continue
        model, path = random_model(config, seed), tmp_path / f"{seed}.gguf"
        write_gguf(model, tokenizer, path, torch.float32, "random")
        found = find_weights(path)
        # a file does not say how weights were drawn and balanced, and of llama3's scaling it has the factors only
        free = {"initializer_range", "moe", "rope", "layer_types"}
        assert found.model.model_dump(exclude=free) == config.model_dump(exclude=free)
        read = read_model(found.path)
        _same(read, model)
        ids = torch.randint(0, tokenizer.vocab_size, (2, 16))
        if found.model.rope == config.rope:  # else from factors in fp32, and weights as wide as these make any rounding large
            torch.testing.assert_close(read(ids), model(ids), rtol=1e-5, atol=1e-5)
        written += 1
        if written == models:
            break
    assert written


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-llama3", "llama-yarn", "glm4moe", "deepseek", "qwen3moe", "gpt-oss",
     *(pytest.param(name, marks=pytest.mark.slow) for name in (
         "qwen3", "smollm3", "mixtral", "olmoe", "olmo3", "mellum", "minimax-m2", "qwen2moe", "lfm2", "lfm2moe"))],
)
def test_a_run_comes_back_with_its_tokenizer(make_run: Callable[..., Any], tmp_path: Path, name: str) -> None:
    run = make_run(name)
    write_gguf(run.model, run.tokenizer, tmp_path / "model.gguf", torch.float32, "tiny")
    opened = open_model(tmp_path / "model.gguf")
    ids = run.tokenizer.encode("The answer, in 2024, isn't 12345:\n\n  def f(x):\treturn x")
    assert opened.tokenizer.encode("The answer, in 2024, isn't 12345:\n\n  def f(x):\treturn x") == ids
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    assert opened.tokenizer.encode_chat(chat) == run.tokenizer.encode_chat(chat)
    assert set(opened.tokenizer.stop_ids) == set(run.tokenizer.stop_ids) and opened.name == "model"
    torch.testing.assert_close(opened.model(torch.tensor([ids])), run.model(torch.tensor([ids])), rtol=1e-5, atol=1e-5)


def _quantized(path: Path, source: Path, kind: int) -> dict[str, np.ndarray]:
    """Write the file again with matrices in another type; the values that the package itself reads."""
    reader = gguf.GGUFReader(source)
    writer, values = gguf.GGUFWriter(path, "llama"), {}
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        data, stored = tensor.data, gguf.GGMLQuantizationType.F32
        if data.ndim > 1:
            stored = gguf.GGMLQuantizationType(kind)
            data = gguf.quants.quantize(data, stored)
        values[tensor.name] = gguf.quants.dequantize(data, stored)
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_values_are_those_of_the_package(make_run: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    run = make_run("qwen3")
    write_gguf(run.model, run.tokenizer, tmp_path / "plain.gguf", torch.float32, "tiny")
    number = next(number for number, (name, _, _) in TYPES.items() if name == kind)
    values = _quantized(tmp_path / "model.gguf", tmp_path / "plain.gguf", number)
    # the file is of architecture llama now, and has norms that llama lacks: read the tensors alone
    header = read_header(tmp_path / "model.gguf")
    for name, expected in values.items():
        np.testing.assert_array_equal(_read(header.tensors[name]).numpy(), expected.reshape(header.tensors[name].shape))
        rows = len(expected) if expected.ndim > 1 else 0
        if rows:
            np.testing.assert_array_equal(_read(header.tensors[name], rows // 3, rows // 2).numpy(), expected[rows // 3 : rows // 2])


def test_sizes_of_types_are_those_of_the_package() -> None:
    assert {name for name, _, _ in TYPES.values()} == {kind.name for kind in gguf.quants._type_traits} | {"F32", "F16"}
    for number, (name, block, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block, size))
        rows = np.random.default_rng(0).integers(0, 256, (2, size), dtype=np.uint8)
        with np.errstate(all="ignore"):
            assert gguf.quants.dequantize(rows, kind).shape == (2, block)  # and it can be read


@pytest.mark.parametrize("kind", TYPES)
def test_rows_experts_and_vectors_of_each_type_are_those_of_the_package(tmp_path: Path, kind: int) -> None:
    """Also of types that the package cannot write, such as IQ2_XXS: of random bytes, any of which is a block."""
    stored, (name, block, size) = gguf.GGMLQuantizationType(kind), TYPES[kind]
    of_row = 4 * max(1, 64 // block)
    random, writer, expected = np.random.default_rng(kind), gguf.GGUFWriter(tmp_path / "model.gguf", "llama"), {}
    for tensor, rows in (("vector", ()), ("matrix", (3,)), ("experts", (4, 3))):
        data = random.integers(0, 256, (*rows, of_row * size), dtype=np.uint8)
        given = data.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
        writer.add_tensor(tensor, given, raw_dtype=stored)
        with np.errstate(all="ignore"):
            expected[tensor] = gguf.quants.dequantize(given, stored).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(all="ignore"):
        for tensor, info in read_header(tmp_path / "model.gguf").tensors.items():
            values, end = expected[tensor], len(expected[tensor])
            assert info.shape == values.shape
            for part in (slice(0, end), slice(1, end - 1), slice(end // 2, end), slice(2, 2)):
                np.testing.assert_array_equal(_read(info, part.start, part.stop).numpy(), values[part])
            if tensor == "experts":
                np.testing.assert_array_equal(_expert(info, 2)[1:3].numpy(), values[2, 1:3])


def test_a_part_of_a_layout_reads_its_rows_only(make_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the file has, of which new ones become the mean: as with safetensors."""
    run = make_run("llama")
    write_gguf(run.model, run.tokenizer, tmp_path / "model.gguf", torch.float32, "tiny")
    weights = find_weights(tmp_path / "model.gguf")
    rows = weights.model.vocab_size
    assert rows
    larger = Transformer(weights.model.model_copy(update={"vocab_size": rows + 3}))
    load_weights(weights.path, larger.state_dict(), larger.config, extend=True)
    before = run.model.state_dict()["embedding.weight"]
    torch.testing.assert_close(larger.state_dict()["embedding.weight"][:rows], before, rtol=0, atol=0)
    torch.testing.assert_close(larger.state_dict()["embedding.weight"][rows], before.mean(0))


def _rewritten(source: Path, path: Path, change: Callable[[str, Any], Any], added: dict[str, Any] | None = None) -> Path:
    """The same file with other metadata."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            value = change(field.name, field.contents())
            if value is not None:
                writer.add_key_value(field.name, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    for key, value in (added or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.attention.scale", 0.5, "llama.attention.scale = 0.5, which lmworks does not know"),
        ("llama.attention.sliding_window", 64, "llama.attention.sliding_window = 64"),
        ("llama.rope.scaling.attn_factor", 1.5, "llama.rope.scaling.attn_factor = 1.5"),
        ("llama.rope.scaling.type", "longrope", "llama.rope.scaling.type is longrope"),
        ("llama.attention.value_length", 32, "llama.attention.value_length is 32"),
        ("llama.expert_count", 8, "expert_count is 8, but no tensor has as many experts"),
        ("llama.block_count", 2_000_000_000, "block_count is 2,000,000,000"),
        ("llama.attention.head_count", 0, "head_count is 0"),
        ("llama.rope.freq_base", float("nan"), "rope.freq_base is nan"),
        ("llama.attention.head_count_kv", [1, 2, 2, 2], "head_count_kv is [1, 2, 2, 2]"),
        ("tokenizer.ggml.pre", "jina-v2-zh", "splits text by the rule 'jina-v2-zh'"),
        ("tokenizer.ggml.model", "bert", "tokenizer is of kind 'bert'"),
        ("tokenizer.ggml.add_bos_token", "yes", "add_bos_token is not true or false"),
        ("general.type", "adapter", "it is of type 'adapter'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    make_run: Callable[..., Any], tmp_path: Path, key: str, value: Any, reason: str
) -> None:  # fmt: skip
    run = make_run("llama")
    write_gguf(run.model, run.tokenizer, tmp_path / "plain.gguf", torch.float32, "tiny")
    path = _rewritten(tmp_path / "plain.gguf", tmp_path / "model.gguf", lambda name, old: None if name == key else old, {key: value})
    with pytest.raises(UserError) as raised:
        find_weights(path)
    assert reason in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "key", "default"),
    [
        ("deepseek", "deepseek2.expert_gating_func", "takes 1, and this model has 2"), ("glm4moe", "glm4moe.expert_gating_func", None),
        ("deepseek", "deepseek2.expert_weights_scale", None), ("llama-yarn", "llama.rope.scaling.yarn_beta_fast", None),
    ],
)  # fmt: skip
def test_a_key_that_is_absent_means_what_llama_cpp_takes(
    make_run: Callable[..., Any], tmp_path: Path, name: str, key: str, default: str | None
) -> None:  # fmt: skip
    run = make_run(name)
    write_gguf(run.model, run.tokenizer, tmp_path / "plain.gguf", torch.float32, "tiny")
    path = _rewritten(tmp_path / "plain.gguf", tmp_path / "model.gguf", lambda name, old: None if name == key else old)
    if default is None:
        assert find_weights(path).model.moe is None or find_weights(path).model.moe.scoring_func == "sigmoid"
        return
    with pytest.raises(UserError, match=f"it has no {key}, without which llama.cpp {default}"):
        find_weights(path)


def test_another_architecture_is_refused_with_those_that_are_read(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("llama")
    write_gguf(run.model, run.tokenizer, tmp_path / "plain.gguf", torch.float32, "tiny")
    data = (tmp_path / "plain.gguf").read_bytes().replace(b"llama", b"gemma")
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(UserError, match=r"model\.gguf: its architecture is 'gemma'; lmworks reads deepseek2, .*llama"):
        find_weights(tmp_path / "model.gguf")
    path = _rewritten(tmp_path / "plain.gguf", tmp_path / "hybrid.gguf", lambda name, old: None if name == "general.architecture" else old,
                      {"general.architecture": "gemma4"})  # fmt: skip
    with pytest.raises(UserError, match=r"its architecture is 'gemma4', which has heads of another size.*nearest class is Gemma3"):
        find_weights(path)


def test_what_llama_cpps_converter_leaves_out_of_nemotron_h_changes_nothing(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("nemotron-h")
    write_gguf(run.model, run.tokenizer, tmp_path / "plain.gguf", torch.float32, "tiny")
    left, turned = ("nemotron_h.attention.layer_norm_rms_epsilon", "nemotron_h.rope.freq_base"), "nemotron_h.rope.dimension_count"
    path = _rewritten(
        tmp_path / "plain.gguf", tmp_path / "model.gguf", lambda name, old: None if name in (*left, turned) else old, {turned: 64}
    )
    found = find_weights(path).model
    assert found == find_weights(tmp_path / "plain.gguf").model
    assert found.layer_types[:4] == ("linear_attention", "mlp", "full_attention", "mlp") and found.hidden_act == "relu2"


def test_experts_where_no_class_of_the_architecture_has_any_are_refused(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("qwen3")
    write_gguf(run.model, run.tokenizer, tmp_path / "plain.gguf", torch.float32, "tiny")
    path = _rewritten(tmp_path / "plain.gguf", tmp_path / "model.gguf", lambda _, old: old, {"qwen3.expert_count": 8})
    with pytest.raises(UserError, match=r"it has 8 experts \(qwen3.expert_count\), and lmworks knows no such model of architecture qwen3"):
        find_weights(path)


def test_a_folder_with_one_model_and_one_with_two(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("llama")
    folder = tmp_path / "downloaded"
    folder.mkdir()
    write_gguf(run.model, run.tokenizer, folder / "small-Q8_0.gguf", torch.float32, "tiny")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))  # as repositories of GGUF files have it
    assert find_weights(folder).origin == folder / "small-Q8_0.gguf"
    (folder / "small-F16.gguf").write_bytes((folder / "small-Q8_0.gguf").read_bytes())
    with pytest.raises(UserError, match=r"has 2 models \(small-F16\.gguf, small-Q8_0\.gguf\); name one of the files"):
        find_weights(folder)
    _same(read_model(find_weights(folder / "small-F16.gguf").path), run.model)


def test_parts_are_one_model(make_run: Callable[..., Any], tmp_path: Path) -> None:
    run = make_run("llama")
    write_gguf(run.model, run.tokenizer, tmp_path / "plain.gguf", torch.float32, "tiny")
    reader, half = gguf.GGUFReader(tmp_path / "plain.gguf"), 10
    parts = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, path in enumerate(parts):
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    writer.add_key_value(field.name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
        writer.add_uint16("split.count", 2)
        for tensor in reader.tensors[:half] if number == 0 else reader.tensors[half:]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for named in (parts[0], parts[1]):
        _same(read_model(find_weights(named).path), run.model)
    assert find_weights(tmp_path / parts[0].name).origin == parts[0]
    parts[1].unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.gguf does not exist; it is one of the 2 parts"):
        find_weights(parts[0])


def test_factors_of_frequencies_that_are_no_scaling_of_ours_are_refused(make_run: Callable[..., Any], tmp_path: Path) -> None:
    """Off by 5e-5, a frequency turns by a radian more at position 20,000."""
    run = make_run("llama-llama3")
    write_gguf(run.model, run.tokenizer, tmp_path / "model.gguf", torch.float32, "tiny")
    reader = gguf.GGUFReader(tmp_path / "model.gguf", "r+")
    factors = next(tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight")
    between = np.flatnonzero((factors > 1) & (factors < factors.max()))
    assert len(between) > 2, "the first and the last of them decide which scaling it is"
    factors[between[1]] *= 1 + 5e-5
    factors.flush()
    with pytest.raises(UserError, match=r"the factors in rope_freqs\.weight are not those of the scaling of Llama 3"):
        open_model(tmp_path / "model.gguf")


def test_the_pattern_of_sliding_layers_is_that_of_the_model(make_run: Callable[..., Any], tmp_path: Path) -> None:
    """llama.cpp has the pattern of an architecture, so that a file with another one is another model."""
    run = make_run("olmo3")
    write_gguf(run.model, run.tokenizer, tmp_path / "model.gguf", torch.float32, "tiny")
    header = read_header(tmp_path / "model.gguf")
    key, slides = "olmo2.attention.sliding_window_pattern", [True, True, True, False]
    assert header.metadata[key] == slides and model_of(header).sliding_window == 24
    assert model_of(replace(header, metadata=header.metadata | {key: 4})) == model_of(header)
    for other in (slides[::-1], 3, True, "often"):
        with pytest.raises(UserError, match=r"olmo2\.attention\.sliding_window_pattern is .*, which lmworks cannot read"):
            model_of(replace(header, metadata=header.metadata | {key: other}))


def test_any_pattern_of_mellum_is_read_as_a_list_or_a_period(make_run: Callable[..., Any], tmp_path: Path) -> None:
    """As llama.cpp reads it, which takes a period of 4 for a file without a pattern, and computes sliding layers with `rope.freq_base`."""
    run, key = make_run("mellum"), "mellum.attention.sliding_window_pattern"
    write_gguf(run.model, run.tokenizer, tmp_path / "model.gguf", torch.float32, "tiny")
    header = read_header(tmp_path / "model.gguf")
    assert header.metadata[key] == [True, True, False, True] and header.metadata["mellum.attention.sliding_window"] == 24
    without = {name: value for name, value in header.metadata.items() if name not in (key, "mellum.rope.freq_base_swa")}
    for pattern, slides in (
        ({key: [True, True, False, True]}, "1101"), ({key: [False, True, True, False]}, "0110"), ({key: [True] * 4}, "1111"),
        ({key: 2}, "1010"), ({key: 3}, "1101"), ({key: 9}, "1111"), ({}, "1110"),
    ):
        found = model_of(replace(header, metadata=without | pattern))
        assert "".join(str(int(found.slides(layer))) for layer in range(4)) == slides
        assert found.sliding_rope is not None and found.sliding_rope.theta == found.rope.theta and found.rope.scaling == "yarn"
    for other in ("often", [True, False], [1, 0, 1, 0], 0):
        with pytest.raises(UserError, match="sliding_window_pattern is neither a period nor one truth value per layer"):
            model_of(replace(header, metadata=without | {key: other}))
    with pytest.raises(UserError, match=r"mellum\.rope\.freq_base_swa is 500\.0, which lmworks cannot read"):
        model_of(replace(header, metadata=header.metadata | {"mellum.rope.freq_base_swa": 500.0}))
    for none in ({key: [False] * 4}, {"mellum.attention.sliding_window": 0}):
        with pytest.raises(UserError, match="it is no model of architecture mellum that lmworks has"):
            model_of(replace(header, metadata=header.metadata | none))
