"""Container files, executed: every RUN line in a fresh Debian root, and then the service of compose.yaml, until its health check passes.

Images of GPU engines cannot be executed without a container engine and GPUs: the fast test names them, and each says so itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from container_build import DEBIAN, PYTHON, BuildError, Image, add_python, build, built, images, instructions, make_base, started
from test_recorded import launches

import slow_needs
import smollm2
from lmworks.deploy import check
from lmworks.deploy.deploy import plan_deployment, write_deployment
from lmworks.deploy.engines import ENGINES
from lmworks.deploy.request import UNTRIED
from lmworks.deploy.sizing import Hardware
from lmworks.deploy.source import Source, open_source
from patience import PATIENCE
from ports import free_port

OWNER = 4711  # who writes a deployment is seldom root
NOT_EXECUTED = {  # the images of which no stage runs in a Debian root, and why
    "vllm/vllm-openai": "CUDA", "vllm/vllm-openai-rocm": "ROCm", "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo": "vLLM's own root",
    "lmsysorg/sglang": "CUDA and ROCm", "nvidia/cuda": "CUDA", "rocm/dev-ubuntu-24.04": "ROCm",
}  # fmt: skip


def test_what_was_not_executed_says_so() -> None:
    """Each image either stands for a Debian root, in which the slow tests execute its file, or is named above and in the file itself."""
    named: set[str] = set()
    for engine in ENGINES:
        for hardware, launch in launches(engine):
            apart = [image for image in images(launch.containerfile) if not DEBIAN.fullmatch(image) and not PYTHON.fullmatch(image)]
            named |= {image.rpartition(":")[0] for image in apart}
            assert (UNTRIED in launch.containerfile) == (not hardware.on_cpu), (engine, hardware.device)
            assert {name for name, _ in instructions(launch.containerfile)} <= {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "ENTRYPOINT"}
    assert named == NOT_EXECUTED.keys()


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_cpu_gets_the_build_of_torch_without_cuda(exported: Path, tmp_path: Path, device: str) -> None:
    out = tmp_path / "out"
    write_deployment(plan_deployment(open_source(exported), "lmworks", "balanced", Hardware(device, 1, 80e9)), out)
    lines = (out / "requirements.txt").read_text().splitlines()
    (torch,) = (line for line in lines if line.startswith("torch=="))
    indexes = [line for line in lines if line.startswith("-")]
    if device == "cpu":
        assert torch.endswith("+cpu") and indexes == ["--extra-index-url https://download.pytorch.org/whl/cpu"]
    else:
        assert "+" not in torch and not indexes
    assert all(line.count("==") == 1 for line in lines if line not in indexes) and len(lines) > 10


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A fresh Debian, and the same with Python."""
    folder = tmp_path_factory.mktemp("bases")
    found = {"debian": folder / "debian", "python": folder / "python"}
    make_base(found["debian"])
    subprocess.run(["cp", "-a", str(found["debian"]), str(found["python"])], check=True)
    add_python(found["python"])
    return found


def deployed(source: Source, engine: str, out: Path) -> str:
    """Write the deployment as its owner has it, and return the URL at which it will answer."""
    port = free_port()
    write_deployment(plan_deployment(source, engine, "balanced", Hardware("cpu", 1, 2e9), port=port), out)
    for path in (out, *out.rglob("*")):
        os.chown(path, OWNER, OWNER)
    return f"http://127.0.0.1:{port}"


def answers(image: Image, out: Path, url: str, log: Path) -> None:
    """Start the engine as compose does, wait until it listens, ask it, and run the health check in the same image."""
    service: dict[str, Any] = yaml.safe_load((out / "compose.yaml").read_text())["services"]["engine"]
    owner = f"{OWNER}:{OWNER}"
    with log.open("wb") as output:
        process = subprocess.Popen(started(image, service, out, owner), stdout=output, stderr=output)
    try:
        end = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text(encoding="utf-8")[-3000:]
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            time.sleep(0.5)
        key, name = check.read_key(out / "secrets" / "api_key"), json.loads((out / "expected.json").read_text())["name"]
        asked = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        )
        reply = json.load(urllib.request.urlopen(request, timeout=PATIENCE))
        assert reply["usage"]["completion_tokens"] >= 1
        kind, *words = service["healthcheck"]["test"]
        assert kind == "CMD"
        health = started(image, service | {"command": words}, out, owner)
        done = subprocess.run(health, capture_output=True, encoding="utf-8")
        print(done.stdout)
        assert done.returncode == 0 and done.stdout.startswith("ok: "), done.stdout + done.stderr
    finally:
        process.kill()  # unshare waits for its child at other signals
        process.wait()


@pytest.fixture(scope="module")
def llama(exported: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The image of llama.cpp, which does not depend on the model. Compiling takes 13 minutes of one core; the image is kept."""
    folder, engines = tmp_path_factory.mktemp("llama"), slow_needs.folder()
    deployed(open_source(exported), "llama.cpp", folder / "out")
    return built(folder / "out", bases, folder, engines and engines / "images")


@pytest.mark.slow
@pytest.mark.needs("debootstrap")
def test_llama_cpp(exported: Path, llama: Image, tmp_path: Path) -> None:
    url = deployed(open_source(exported), "llama.cpp", tmp_path / "out")
    answers(llama, tmp_path / "out", url, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.needs("debootstrap")
def test_llama_cpp_with_a_real_model(llama: Image, tmp_path: Path) -> None:
    model = smollm2.write_huggingface_folder(tmp_path / "model")  # of which the answers are recorded
    url = deployed(open_source(model, smollm2.gguf_file(), "smollm2"), "llama.cpp", tmp_path / "out")
    answers(llama, tmp_path / "out", url, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.needs("debootstrap")
def test_the_built_in_server(exported: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    url = deployed(open_source(exported), "lmworks", tmp_path / "out")
    answers(build(tmp_path / "out", bases, tmp_path), tmp_path / "out", url, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.needs("debootstrap")
def test_a_broken_line_is_found(exported: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    """In the generated file, with one word wrong: a file that RUN reads, a folder that COPY copies."""
    out = tmp_path / "out"
    deployed(open_source(exported), "lmworks", out)
    text = (out / "Containerfile").read_text()
    for number, (right, wrong) in enumerate((("-r /opt/requirements.txt", "-r /opt/requirement.txt"), ("COPY package ", "COPY packages "))):
        assert text.count(right) == 1
        broken = text.replace(right, wrong)
        (out / "Containerfile").write_text(re.sub("RUN pip install.*", "RUN true", broken) if number else broken)
        with pytest.raises(BuildError, match=re.escape(wrong.split()[-1])):
            build(out, bases, tmp_path / f"{number}")
