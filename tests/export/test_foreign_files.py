"""What an export and a GGUF file take over of a model of others: its files, its templates by name, its ids."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from base_models import write_tokenizer
from lmworks.export import export as module
from lmworks.export.export import Report, write_huggingface
from lmworks.export.gguf import write_gguf
from lmworks.model import Transformer
from lmworks.recipe.gguf_header import read_header
from lmworks.recipe.gguf_model import tokenizer_file
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.weights import start_dtype
from lmworks.tokenizer import load
from small_config import small_config

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NAMED = [{"name": name, "template": begin + PLAIN} for name, begin in (("default", ""), ("tool_use", "TOOLS"), ("rag.2", "RAG"))]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))
    write_tokenizer(tmp_path / "base", "qwen")
    return tmp_path / "base"


def name_templates(folder: Path, in_files: bool) -> None:
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        for one in NAMED:
            place = "chat_template" if one["name"] == "default" else f"additional_chat_templates/{one['name']}"
            (folder / f"{place}.jinja").write_text(one["template"])
        return
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": NAMED}))


def model_for(tokenizer: Any) -> Transformer:
    return Transformer(Model.model_validate(small_config(vocab_size=tokenizer.vocab_size + 3)))


@pytest.mark.parametrize("in_files", [False, True])
def test_an_export_has_the_templates_of_its_base(folder: Path, tmp_path: Path, in_files: bool) -> None:
    import transformers

    name_templates(folder, in_files)
    tokenizer, out = load(folder), tmp_path / "out"
    write_huggingface(model_for(tokenizer), tokenizer, out, torch.float32)
    for path in folder.rglob("*.*"):
        assert path.name == "generation_config.json" or (out / path.relative_to(folder)).read_bytes() == path.read_bytes()
    assert (out / "chat_template.jinja").exists() == in_files
    base, exported = (transformers.AutoTokenizer.from_pretrained(one) for one in (folder, out))
    assert exported.chat_template == base.chat_template and len(base.chat_template) == 3


def test_a_pad_id_that_the_base_states_stays(folder: Path, tmp_path: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 3, "temperature": 0.6}))
    tokenizer = load(folder)
    assert tokenizer.eos_id != 3
    write_huggingface(model_for(tokenizer), tokenizer, tmp_path / "out", torch.float32)
    for name in ("config.json", path.name):
        assert json.loads((tmp_path / "out" / name).read_text())["pad_token_id"] == 3
    assert json.loads((tmp_path / "out" / path.name).read_text())["temperature"] == 0.6


@pytest.mark.parametrize("in_files", [False, True])
def test_templates_come_back_from_a_gguf_file(folder: Path, tmp_path: Path, in_files: bool) -> None:
    name_templates(folder, in_files)
    tokenizer, path = load(folder), tmp_path / "model.gguf"
    write_gguf(model_for(tokenizer), tokenizer, path, torch.float32, "named")
    fields = read_header(path).metadata
    assert fields["tokenizer.chat_template"] == PLAIN and fields["tokenizer.chat_template.tool_use"] == "TOOLS" + PLAIN
    assert list(fields["tokenizer.chat_templates"]) == ["rag_2", "tool_use"]
    read = load(tokenizer_file(path).parent)
    for tools in (None, TOOLS):
        assert read.apply_chat(CHAT, tools) == tokenizer.apply_chat(CHAT, tools)


@pytest.mark.parametrize(("pad", "written"), [(3, 3), (100_000, None)])
def test_a_gguf_file_names_a_pad_id_that_it_has(folder: Path, tmp_path: Path, pad: int, written: int | None) -> None:
    """Configs of others name ids beyond their embedding."""
    (folder / "config.json").write_text(json.dumps({"pad_token_id": pad}))
    tokenizer, path = load(folder), tmp_path / "model.gguf"
    write_gguf(model_for(tokenizer), tokenizer, path, torch.float32, "padded")
    assert read_header(path).metadata["tokenizer.ggml.padding_token_id"] == (tokenizer.eos_id if written is None else written)


@pytest.mark.parametrize(("stored", "dtype", "said"), [("float16", "bf16", True), ("float32", "bf16", True), ("bfloat16", "bf16", False),
                                                       ("float16", "fp32", False), (None, "bf16", False)])  # fmt: skip
def test_a_type_that_rounds_the_weights_of_the_base_is_told(
    stored: str | None, dtype: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "start_dtype", lambda recipe: stored)
    report = Report("tuned", dtype, stored=module.rounded_from(Recipe.model_validate({"name": "t", "export": {"dtype": dtype}})))
    console = Console(width=200, file=io.StringIO())
    console.print(report)
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert (f"The weights of start_from are in {stored}; {dtype} rounds them" in text) == said == ("rounds" in text)


def test_the_stored_type_is_that_of_the_config(folder: Path, tmp_path: Path) -> None:
    from base_models import write_model

    write_model(folder, 448)
    config = json.loads((folder / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        rest = {name: value for name, value in config.items() if not name.endswith("dtype")}
        (folder / "config.json").write_text(json.dumps(rest | {key: "float16"}))
        assert start_dtype(Recipe.model_construct(start_from=str(folder))) == "float16"
    assert start_dtype(Recipe.model_construct(start_from=None)) is None
    assert start_dtype(Recipe.model_construct(start_from=str(tmp_path / "gone"))) is None
