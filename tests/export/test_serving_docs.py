"""The commands of docs/serving.md, run as they stand there on a small export, and asked through the `openai` client."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine
from small_models import STEPS

from lmworks.export.export import write_huggingface
from lmworks.export.gguf import write_gguf

pytestmark = pytest.mark.slow
DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"


def command(program: str, arguments: dict[str, str]) -> list[str]:
    """The one command of the document that starts with `program`, with what is replaced in it."""
    (line,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(program + " ")]
    for old, new in arguments.items():
        assert old in line
        line = line.replace(old, new)
    return shlex.split(line)[1:]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def running(arguments: list[str], port: str, log: Path, seconds: float, **environment: str) -> Iterator[Any]:
    """The server as a process, and an `openai` client once it answers."""
    openai = pytest.importorskip("openai")
    with log.open("wb") as output, subprocess.Popen(arguments, stdout=output, stderr=output, env=os.environ | environment) as process:
        try:
            for _ in range(int(seconds)):
                assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except OSError:
                    time.sleep(1)
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=900)
        finally:
            process.terminate()


def talks(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["quickstart"]
    answer = client.chat.completions.create(model="quickstart", messages=[{"role": "user", "content": "Hello!"}], max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.usage.completion_tokens >= 1
    parts = client.completions.create(model="quickstart", prompt="def main(", max_tokens=8, stream=True)
    assert "".join(part.choices[0].text for part in parts if part.choices)


@pytest.mark.needs("vllm")
def test_vllm_serve(make_run: Callable[..., Any], tmp_path: Path) -> None:
    python, run, port = engine("LMWORKS_VLLM_PYTHON"), make_run("glm4moe", STEPS), free_port()
    write_huggingface(run.model, run.tokenizer, tmp_path / "hf", torch.bfloat16)
    arguments = command("vllm serve", {"runs/quickstart/export/huggingface": str(tmp_path / "hf"), "8000": port})
    # compiling for a tiny model and a few tokens would be most of the time
    arguments = [str(python.with_name("vllm")), *arguments, "--enforce-eager"]
    path = f"{python.parent}:{os.environ['PATH']}"
    with running(arguments, port, tmp_path / "log", 600, VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", PATH=path) as client:
        talks(client)


@pytest.mark.needs("llama")
@pytest.mark.parametrize("quantized", [False, True])
def test_llama_server(make_run: Callable[..., Any], tmp_path: Path, quantized: bool) -> None:
    server, run, port = engine("LMWORKS_LLAMA_SERVER"), make_run("glm4moe", STEPS), free_port()
    path = tmp_path / "model.gguf"
    write_gguf(run.model, run.tokenizer, path, torch.bfloat16, "tiny")
    if quantized:
        tool = server.with_name("llama-quantize")
        arguments = command("llama-quantize", {"runs/quickstart/export/gguf": str(tmp_path)})
        subprocess.run([str(tool), *arguments], check=True, capture_output=True)
        smaller = tmp_path / "model-Q8_0.gguf"
        assert smaller.stat().st_size < 0.65 * path.stat().st_size
        path = smaller
    arguments = command("llama-server", {"runs/quickstart/export/gguf/model.gguf": str(path), "8080": port})
    with running([str(server), *arguments], port, tmp_path / "log", 900) as client:
        talks(client)
