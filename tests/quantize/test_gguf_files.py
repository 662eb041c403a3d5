"""Q8_0 files of models of others: the chat template, wherever it is kept, and matrices whose rows the format does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks

from base_models import TEXT, write_model, write_tokenizer
from lmworks.deploy.source import open_source as deployed
from lmworks.errors import UserError
from lmworks.quantize import gguf as quantize_gguf
from lmworks.quantize.source import SCHEMES, open_source
from lmworks.tokenizer import load
from lmworks.weights.chat import require_template

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")

SCHEME = SCHEMES["gguf-q8_0"]
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOOLS = {"name": "tool_use", "template": "TOOLS" + PLAIN}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # llama.cpp's library is not installed, whatever the machine of the test has
    monkeypatch.setattr(quantize_gguf, "find_python", lambda modules, given: None)
    write_tokenizer(tmp_path / "base", "qwen")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("in_file", "in_config", "template"),
    [
        (PLAIN, None, PLAIN), (None, PLAIN, PLAIN), (None, [TOOLS, {"name": "default", "template": PLAIN}], PLAIN),
        (PLAIN, "OLD" + PLAIN, PLAIN), (None, [TOOLS], None), (None, None, None),
    ],
    ids=["file", "config", "named", "both", "tools alone", "none"],
)  # fmt: skip
def test_the_template_is_that_of_the_tokenizer(
    folder: Path, tmp_path: Path, in_file: str | None, in_config: Any, template: str | None
) -> None:
    write_model(folder, 448)
    (folder / "chat_template.jinja").unlink()
    if in_file is not None:
        (folder / "chat_template.jinja").write_text(in_file)
    if in_config is not None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": in_config}))
    source, (original, target) = open_source(str(folder)), (tmp_path / f"{name}.gguf" for name in ("original", "made"))
    assert source.template == template and load(folder).has_chat_template == (template is not None)
    assert deployed(folder).template == (template or "")
    if template is None:
        with pytest.raises(UserError, match="has no chat template"):
            require_template(str(folder))
    else:
        require_template(str(folder))
    quantize_gguf.write_original(source, original)
    quantize_gguf.quantize(SCHEME, original, target, None)
    assert quantize_gguf.check_fields(source, original, target) == []


def test_a_quantized_file_is_refused_with_what_is_read_instead(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_model(folder, 448)
    original, target = tmp_path / "original.gguf", tmp_path / "made.gguf"
    quantize_gguf.write_original(open_source(str(folder)), original)
    quantize_gguf.quantize(SCHEME, original, target, None)
    (tmp_path / "text.txt").write_text(TEXT)
    refused = Lmworks(monkeypatch, capfd)("quantize", target, "--to", "gguf-q8_0", "--held-out", tmp_path / "text.txt")
    assert "is quantized already" in refused.error and "(FP8, MXFP4, compressed-tensors, AWQ, GPTQ, AutoRound)" in refused.error


@pytest.mark.parametrize(("width", "quantized"), [(72, 0), (96, 2)])
def test_rows_that_q8_0_does_not_hold_are_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], width: int, quantized: int
) -> None:
    """All rows of a model of hidden size 72 but those of its down projections, which have its intermediate size."""
    write_model(folder, 448, hidden_size=72, intermediate_size=width)
    (tmp_path / "text.txt").write_text(TEXT)
    why = "rows of 72 values: Q8_0 needs multiples of 32"
    done = Lmworks(monkeypatch, capfd)("quantize", folder, "--to", "gguf-q8_0", "--held-out", tmp_path / "text.txt", "--tokens", "200",
                                       "--out", tmp_path / "out", "--json")  # fmt: skip
    (found,) = json.loads(done.out)["results"]
    assert done.code == (0 if quantized else 1) and found["failures"] == ([] if quantized else [f"no tensor was quantized ({why})"])
    fallbacks = found["tensors"]["fallbacks"]
    assert {one["note"] for one in fallbacks} == {why} and len(fallbacks) == 16 - quantized
    assert f"{16 - quantized} tensors have larger types than the scheme's ({why})" in found["warnings"]
    assert not [one["name"] for one in fallbacks if "norm" in one["name"]], "norms are never quantized"
    assert found["tensors"]["fates"].get("quantized", 0) == quantized


def test_a_larger_type_of_llama_cpp_is_told() -> None:
    """Its library stores rows that Q8_0 does not hold in F16."""
    assert quantize_gguf._why(SCHEME, "F16", 72) and not quantize_gguf._why(SCHEME, "Q8_0", 96)
    assert quantize_gguf._why(SCHEMES["gguf-q4_k_m"], "Q5_0", 96) and not quantize_gguf._why(SCHEMES["gguf-q4_k_m"], "Q6_K", 256)
