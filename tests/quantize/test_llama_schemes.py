"""GGUF files by llama.cpp itself: every scheme, scored and timed by the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks
from engines import engine
from small_models import STEPS

from lmworks.quantize import gguf
from lmworks.quantize.source import SCHEMES, open_source

pytestmark = [pytest.mark.slow, pytest.mark.needs("llama")]
GGUF = [name for name, scheme in SCHEMES.items() if scheme.format == "gguf"]


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings of `engines.sh` are installed without a library of their own."""
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(engine("LMWORKS_LLAMA_SERVER").parent))


@pytest.mark.parametrize("name", ["glm4moe", "deepseek", "qwen3"])
def test_every_scheme_passes(make_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, name: str) -> None:
    run = make_run(name, STEPS)
    options = ("--out", tmp_path, "--tokens", "2000", "--python", engine("LMWORKS_LLAMA_PYTHON"), "--json")
    done = Lmworks(monkeypatch, capfd)("quantize", run.directory, "--to", ",".join(GGUF), *options)
    assert done.code == 0, done.err + done.out
    for found in json.loads(done.out)["results"]:
        assert found["verdict"] == "passed" and "llama.cpp" in found["scored_by"] and "llama.cpp" in found["made_by"]
        assert found["speed"]["decode"] > 0 and found["speed"]["original"]["prefill"] > 0
        assert set(found["tensors"]["fates"]) <= {"quantized", "kept", "absent"}
        assert set(found["tensors"]["sensitive"]["embedding"]) == {"Q8_0"}
        assert bool(found["tensors"]["fallbacks"]) == (found["scheme"] != "gguf-q8_0"), "rows of 128 hold no block of 256"


def test_the_python_package_writes_what_the_library_writes(make_run: Callable[..., Any], tmp_path: Path) -> None:
    source = open_source(str(make_run("glm4moe", STEPS).directory))
    original, python = tmp_path / "original.gguf", engine("LMWORKS_LLAMA_PYTHON")
    gguf.write_original(source, original)
    for name, used in (("library", python), ("package", None)):
        gguf.quantize(SCHEMES["gguf-q8_0"], original, tmp_path / f"{name}.gguf", used)
    import gguf as package

    theirs, ours = ({one.name: one for one in package.GGUFReader(tmp_path / f"{name}.gguf").tensors} for name in ("library", "package"))
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert tensor.tensor_type == ours[name].tensor_type and tensor.data.tobytes() == ours[name].data.tobytes(), name


def test_a_file_that_the_engine_does_not_run_fails(
    make_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    honest = gguf.quantize

    def damaged(scheme: Any, original: Path, target: Path, python: Any) -> str:
        made_by = honest(scheme, original, target, python)
        data = target.read_bytes()
        target.write_bytes(data.replace(b"glm4moe.expert_used_count", b"glm4moe.expert_used_counT"))
        return made_by

    monkeypatch.setattr(gguf, "quantize", damaged)
    options = ("--out", tmp_path, "--tokens", "300", "--python", engine("LMWORKS_LLAMA_PYTHON"))
    done = Lmworks(monkeypatch, capfd)("quantize", make_run("glm4moe", STEPS).directory, "--to", "gguf-q8_0", *options)
    assert done.code == 1 and "llama.cpp does not run it" in done.out and (tmp_path / "gguf-q8_0.failed").is_dir()
