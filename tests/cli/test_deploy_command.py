"""`lmworks deploy` from the command line: what it writes, hostile names, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Lmworks

from deployable import GLM, export, serving
from lmworks.deploy.source import open_source
from lmworks.weights.verified import file_records
from patience import PATIENCE
from ports import free_port
from tiny_run import Tiny

HOSTILE = 'it\'s "a"; $(touch /tmp/pwned) `x` $HOME ${LMWORKS_MODEL}\n- b: {c}\u2028#é \\'


@pytest.fixture(scope="session")
def exported(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny, tmp_path_factory.mktemp("models"), GLM | {"mtp": {}}, gguf=True)


@pytest.fixture(scope="session")
def answers(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded answers, so that not every test records them."""
    from lmworks.deploy.request import record
    from lmworks.deploy.source import open_source

    path = tmp_path_factory.mktemp("answers") / "expected.json"
    path.write_text(json.dumps(record(open_source(exported))))
    return path


def arguments(script: Path, program: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """With which arguments and environment start.sh starts its program."""
    fake = folder / "bin" / program
    fake.parent.mkdir()
    fake.write_text(f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n")
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:/usr/bin:/bin"}
    done = subprocess.run([str(script)], env=environment, capture_output=True, encoding="utf-8", cwd="/")
    assert done.returncode == 0, done.stderr
    words, variables = json.loads(done.stdout)
    return words, variables


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until the server answers."""
    end = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[1]
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=5)
            return
        time.sleep(0.2)


def test_vllm(lmworks: Lmworks, exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "d"
    done = lmworks(
        "deploy", exported, "--engine", "vllm", "--scenario", "latency", "--gpus", "8xh100", "--out", out, "--trainer", "127.0.0.1:9400"
    )
    assert done.code == 0, done.err
    key = (out / "secrets/api_key").read_text().strip()
    assert (out / "secrets/api_key").stat().st_mode & 0o777 == 0o600 and len(key) >= 32
    words, variables = arguments(out / "start.sh", "vllm", tmp_path)
    assert words[:2] == ["serve", str(exported.resolve())]
    options = dict(zip(words, [*words[1:], ""], strict=True))
    assert options["--host"] == "127.0.0.1" and options["--tool-call-parser"] == "glm45" and options["--tensor-parallel-size"] == "4"
    assert json.loads(options["--speculative-config"])["method"] == "mtp"
    assert options["--dtype"] == "float32" and options["--max-model-len"] == "512"
    assert variables["VLLM_API_KEY"] == key
    for path in out.rglob("*"):
        if path.is_file() and path.parent.name != "secrets":
            assert key not in path.read_text(), path
    assert not any(key in word for word in words) and key not in done.out
    compose = yaml.safe_load((out / "compose.yaml").read_text())
    assert set(compose["services"]) == {"engine", "check", "prometheus", "grafana"}
    assert all(":" in service["image"].rpartition("/")[2] for service in compose["services"].values() if "image" in service)
    assert re.search(r"^FROM \S+:v\d", (out / "Containerfile").read_text(), flags=re.M)
    jobs = {job["job_name"] for job in yaml.safe_load((out / "prometheus.yml").read_text())["scrape_configs"]}
    assert jobs == {"engine", "check", "trainer"}
    every = json.loads((out / "decisions.json").read_text())["flags"]
    assert all(flag["reason"] for flag in every)
    for flag in every:
        assert flag["reason"] in (out / "start.sh").read_text() and flag["reason"] in (out / "README.md").read_text()


def test_the_built_in_server_is_started_by_its_script_and_passes_the_check(
    lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path
) -> None:
    out = tmp_path / "d"
    assert lmworks("deploy", exported, "--engine", "lmworks", "--cpu", "--out", out, "--expect", answers).code == 0
    assert (out / "package/lmworks/cli/main.py").is_file()
    wanted = (out / "requirements.txt").read_text()
    assert re.search(r"^torch==\d", wanted, flags=re.M) and "uvicorn==" in wanted and "trafilatura" not in wanted
    with serving(exported) as url:
        done = lmworks("deploy", "check", url, "--expect", out / "expected.json")
        assert done.code == 0 and done.out.startswith("ok: "), done.out
    with serving(exported, noise=1.0) as url:
        done = lmworks("deploy", "check", url, "--expect", out / "expected.json", "--json")
        assert done.code == 1 and json.loads(done.out)["ok"] is False


def test_llama_cpp_gets_the_key_as_a_file(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("my-own-key\n")
    key.chmod(0o600)
    out = tmp_path / "d"
    done = lmworks("deploy", exported, "--engine", "llama.cpp", "--cpu", "--out", out, "--expect", answers, "--api-key-file", key, "--json")
    assert json.loads(done.out)["fit"]["sequences"] >= 1
    words, variables = arguments(out / "start.sh", "llama-server", tmp_path)
    assert words[:2] == ["--model", str((exported.parent / "gguf/model.gguf").resolve())]
    assert words[words.index("--api-key-file") + 1] == str(out / "secrets/api_key")
    assert (out / "secrets/api_key").read_text() == "my-own-key\n"
    assert "my-own-key" not in [*words, *variables.values()]


def test_sglangs_key_is_in_no_command_line(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    """The words of the start script reach the module with the key, which /proc shows nowhere."""
    out, own = tmp_path / "d", tmp_path / "key"
    own.write_text("-begins-with-a-dash")  # as one of 64 keys that are drawn does
    own.chmod(0o600)
    options = ("--engine", "sglang", "--gpus", "h100", "--out", out, "--expect", answers, "--api-key-file", own)
    assert lmworks("deploy", exported, *options).code == 0
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        "import argparse, json, logging, sys\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--api-key')\n"
        "key = parser.parse_known_args()[0].api_key\n"
        "logging.basicConfig(stream=sys.stderr, level=logging.INFO)\n"
        "options = {'model_path': 'm', 'api_key': key}\n"
        "logging.getLogger(__name__).info(f'server_args={options}')\n"  # as SGLang does
        "logging.getLogger('other').warning('started with %s and %d GPUs', options, 8)\n"
        "print(json.dumps([[*sys.argv, key], open('/proc/self/cmdline').read()]))\n"
    )
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([str(out / "start.sh")], env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    words, shown = json.loads(done.stdout)
    key = (out / "secrets/api_key").read_text().strip()
    assert words[-1] == key and key not in shown
    assert words[words.index("--model-path") + 1] == str(exported.resolve())
    assert key not in done.stderr and done.stderr.count("'api_key': '[API key]'") == 2 and "and 8 GPUs" in done.stderr
    assert "sglang#37457" in (out / "README.md").read_text()


@pytest.mark.parametrize(("gpus", "engine", "used"), [("4xh100", "lmworks", 1), ("4xh100", "vllm", 4), ("8xmi300x", "sglang", 8)])
def test_gpus_are_reserved_as_they_are_used(
    lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path, gpus: str, engine: str, used: int
) -> None:
    out = tmp_path / "d"
    done = lmworks("deploy", exported, "--engine", engine, "--gpus", gpus, "--out", out, "--expect", answers, "--json")
    assert json.loads(done.out)["fit"]["devices"] == used
    service = yaml.safe_load((out / "compose.yaml").read_text())["services"]["engine"]
    if "mi300x" in gpus:
        assert "deploy" not in service and "/dev/kfd:/dev/kfd" in service["devices"] and "video" in service["group_add"]
        assert "rocm" in (out / "Containerfile").read_text()
    else:
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == used


def test_the_built_in_server_has_no_container_for_amd(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    said = lmworks("deploy", exported, "--engine", "lmworks", "--gpus", "mi300x", "--out", tmp_path / "d", "--expect", answers).error
    assert "no container for GPUs of AMD: use --engine vllm" in said


def test_the_model_is_served_by_the_name_that_clients_were_given(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    """The start script itself, the README and the check agree on it; a server under another name fails the check."""
    out, port = tmp_path / "d", free_port()
    done = lmworks(
        "deploy", exported, "--engine", "lmworks", "--cpu", "--out", out, "--expect", answers, "--name", "my-model", "--port", str(port)
    )
    assert done.code == 0 and "`my-model`" in (out / "README.md").read_text()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(out / "package")}
    url, options = f"http://127.0.0.1:{port}", ("--expect", out / "expected.json", "--key-file", out / "secrets" / "api_key")
    process = subprocess.Popen([out / "start.sh"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait_for(f"{url}/health", process)
        done = lmworks("deploy", "check", url, *options)
        assert done.code == 0 and done.out.startswith("ok: "), done.out
    finally:
        process.terminate()
        process.communicate()
    with serving(exported) as url:
        done = lmworks("deploy", "check", url, *options)
    assert done.code == 1 and "serves huggingface, and not my-model, the name that clients were given" in done.out.replace("\n", " ")


def damage(file: Path, share: float = 0.3) -> None:
    """A part of the file becomes zeros; size and times stay."""
    before, size = file.stat(), file.stat().st_size
    with file.open("r+b") as handle:
        handle.seek(size // 2)
        handle.write(bytes(int(size * share)))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def passed(folder: Path) -> None:
    """As an export writes it."""
    (folder / "parity.json").write_text(json.dumps({"verdict": "passed", "files": file_records(folder)}))


def test_damaged_files_are_refused_by_name(lmworks: Lmworks, exported: Path, answers: Path, tiny: Tiny, tmp_path: Path) -> None:
    """By every command that reads an export, before it writes anything."""
    model, gguf = tmp_path / "huggingface", tmp_path / "gguf"
    shutil.copytree(exported, model)
    shutil.copytree(exported.parent / "gguf", gguf)
    passed(model), passed(gguf)
    rows, out = tmp_path / "rows.jsonl", tmp_path / "d"
    rows.write_text('{"question": "What is 1 + 1?", "answer": "2"}\n{"text": "a text"}\n')
    wanted = ("--out", out, "--expect", answers)
    commands: dict[str, tuple[tuple[Any, ...], Path]] = {
        "vllm": (("deploy", model, "--gpus", "h100", *wanted), model),
        "recorded": (("deploy", model, "--gpus", "h100", "--out", out), model),
        "llama.cpp": (("deploy", model, "--engine", "llama.cpp", "--cpu", *wanted), gguf),
        "record": (("deploy", "record", model, "--out", out), model),
        "serve": (("serve", model, "--port", "0"), model),
        "chat": (("chat", model), model),
        "quantize": (("quantize", model, "--to", "gguf-q8_0", "--held-out", rows, "--out", out), model),
        "handover": (("handover", "slime", model, "--prompts", rows, "--out", out), model),
        "start_from": (("run", "tiny.yaml"), model),
    }
    recipe = f"name: tiny\nstart_from: {model}\nrun_dir: {tmp_path / 'run'}\ntune: {{data: [{{kind: files, path: {rows}, name: a}}]}}\n"
    (tmp_path / "tiny.yaml").write_text(recipe)
    commands["start_from"] = (("run", tmp_path / "tiny.yaml"), model)
    damage(model / "model.safetensors"), damage(gguf / "model.gguf")
    for name, (command, folder) in commands.items():
        said = lmworks(*command).error
        file = "model.gguf" if folder is gguf else "model.safetensors"
        assert f"{folder.resolve() / file} is not the file that passed (SHA-256" in said, (name, said)
        assert not out.exists(), name


def test_a_deployment_does_not_start_with_other_files(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    model = tmp_path / HOSTILE.replace("/", "_")
    shutil.copytree(exported, model)
    for engine, program in (("vllm", "vllm"), ("llama.cpp", "llama-server")):
        out, gguf = tmp_path / engine, exported.parent / "gguf" / "model.gguf"
        if engine == "llama.cpp":
            gguf = Path(shutil.copyfile(gguf, tmp_path / "model.gguf"))
        assert lmworks("deploy", model, "--engine", engine, "--cpu", "--gguf", gguf, "--out", out, "--expect", answers).code == 0
        folder = tmp_path / f"run-{engine}"
        folder.mkdir()
        arguments(out / "start.sh", program, folder)
        damage(gguf if engine == "llama.cpp" else model / "model.safetensors", 0.01)
        environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
        done = subprocess.run([out / "start.sh"], env=environment, capture_output=True, encoding="utf-8")
        assert done.returncode == 1 and done.stdout == "" and "damaged or were changed" in done.stderr
        assert ("model.safetensors: FAILED" if engine == "vllm" else "-: FAILED") in done.stderr
        skipped = subprocess.run([out / "start.sh"], env=environment | {"LMWORKS_VERIFY": "no"}, capture_output=True)
        assert skipped.returncode == 0


def test_hostile_names(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE.replace("/", "_")
    folder.symlink_to(exported)
    renamed = tmp_path / "real" / HOSTILE.replace("/", "_")
    renamed.parent.mkdir()
    renamed.mkdir()
    for file in exported.iterdir():
        (renamed / file.name).symlink_to(file)
    out = tmp_path / "d"
    done = lmworks("deploy", renamed, "--gpus", "h100", "--out", out, "--expect", answers, "--name", HOSTILE)
    assert done.code == 0, done.err
    words, _ = arguments(out / "start.sh", "vllm", tmp_path)
    assert words[1] == str(renamed.resolve()) and words[words.index("--served-model-name") + 1] == HOSTILE
    compose = yaml.safe_load((out / "compose.yaml").read_text())
    (mounted,) = [one["source"] for one in compose["services"]["engine"]["volumes"] if one["target"] == "/model"]
    assert mounted.replace("$$", "$") == str(renamed.resolve()) and "$" not in mounted.replace("$$", "")
    assert json.loads((out / "expected.json").read_text())["name"] == HOSTILE
    assert "\n- b" not in (out / "README.md").read_text()
    assert not Path("/tmp/pwned").exists()


BAD: dict[str, tuple[list[str], str]] = {
    "engine": (["--engine", "tgi"], "--engine 'tgi' is not known; it is one of: vllm, sglang, llama.cpp, lmworks"),
    "scenario": (["--scenario", "fast"], "--scenario 'fast' is not known"),
    "gpu": (["--gpus", "8xv100"], "--gpus '8xv100' is not known"),
    "none": (["--gpus", "0xh100"], "at least 1 GPU"),
    "many": (["--gpus", "65xh100"], "64"),
    "both": (["--gpus", "h100", "--cpu"], "exclude each other"),
    "context": (["--gpus", "h100", "--context", "100000"], "exceeds the 512 tokens"),
    "host": (["--gpus", "h100", "--host", "a b"], "neither an IP address nor a host name"),
    "zone": (["--gpus", "h100", "--host", "fe80::1%$(x)"], "neither an IP address nor a host name"),
    "port": (["--gpus", "h100", "--port", "3000"], "--port 3000 is that of Grafana"),
    "trainer": (["--gpus", "h100", "--trainer", "9400"], "must be HOST:PORT"),
    "trainer host": (["--gpus", "h100", "--trainer", "a b:1"], "--trainer 'a b' is neither an IP address nor a host name"),
    "trainer port": (["--gpus", "h100", "--trainer", "localhost:8000"], "is the address of the engine in this deployment"),
    "option": (["--gpus", "h100", "--name=-m"], "takes '-' in '-m' for something else than a part of the model's name"),
    "adapter": (["--gpus", "h100", "--engine", "sglang", "--name", "a:b"], "takes ':' in 'a:b'"),
    "names": (["--cpu", "--engine", "llama.cpp", "--name", "a,b"], "takes ',' in 'a,b'"),
    "gguf": (["--gpus", "h100", "--engine", "llama.cpp", "--gguf", "/nonexistent.gguf"], "is not a file"),
    "expect": (["--gpus", "h100", "--expect", "/nonexistent.json"], "has no recorded answers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line(lmworks: Lmworks, exported: Path, tmp_path: Path, case: str) -> None:
    options, message = BAD[case]
    assert message in lmworks("deploy", exported, "--out", tmp_path / "d", *options).error
    assert not (tmp_path / "d").exists()


def test_all_interfaces_are_checked_by_the_loopback_address_of_their_family(
    lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path
) -> None:
    """asyncio's servers, such as SGLang's, listen on :: without IPv4."""
    for host, url in (("::", "http://[::1]:8000"), ("0.0.0.0", "http://127.0.0.1:8000")):
        out = tmp_path / url[7:9]
        assert lmworks("deploy", exported, "--gpus", "h100", "--host", host, "--out", out, "--expect", answers).code == 0
        services = yaml.safe_load((out / "compose.yaml").read_text())["services"]
        assert url in services["check"]["command"] and url in services["engine"]["healthcheck"]["test"]
        targets = [one["static_configs"][0]["targets"] for one in yaml.safe_load((out / "prometheus.yml").read_text())["scrape_configs"]]
        assert [url[7:]] in targets


def test_processes_of_containers_are_stopped_and_have_a_user(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    """The first process of a container ignores SIGTERM unless it handles it; torch fails without a name for the user (vllm#44548)."""
    assert lmworks("deploy", exported, "--gpus", "h100", "--out", tmp_path / "d", "--expect", answers).code == 0
    services = yaml.safe_load((tmp_path / "d" / "compose.yaml").read_text())["services"]
    assert services["engine"]["init"] is services["check"]["init"] is True
    assert services["engine"]["environment"]["USER"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://user:s3cret@127.0.0.1:1", "no credentials and no query; give the API key as a file, with --key-file"),
        ("http://127.0.0.1:1?key=s3cret", "no credentials and no query"),
        ("http://127.0.0.1:80a", "is no address of a server"),
        ("http://[::1", "is no address of a server"),
        ("http://", "is no address of a server"),
        ("http://127.0.0.1:1/a b", "is no address of a server"),
        ("ftp://127.0.0.1", "is no address of a server"),
    ],
)
def test_what_is_no_address_is_not_asked(lmworks: Lmworks, answers: Path, url: str, reason: str) -> None:
    done = lmworks("deploy", "check", url, "--expect", answers)
    assert reason in done.error and "s3cret" not in done.err


@pytest.mark.parametrize(("reply", "says"), [
    (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer: SSH-2.0-OpenSSH_9.6"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not answer: IncompleteRead"),
    (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "sent a reply without log-probabilities (RecursionError"),
])  # fmt: skip
def test_a_reply_that_cannot_be_read_fails_the_check(lmworks: Lmworks, answers: Path, reply: bytes, says: str) -> None:
    """With --watch the check goes on after it, instead of ending."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        done = lmworks("deploy", "check", f"http://127.0.0.1:{listener.getsockname()[1]}", "--expect", answers, "--json")
        thread.join()
    assert done.code == 1 and says in json.loads(done.out)["reason"]


def test_one_of_several_gguf_files_is_named(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    model, gguf = tmp_path / "model", exported.parent / "gguf" / "model.gguf"
    shutil.copytree(exported, model)
    for name in ("q4.gguf", "q8.gguf", "part-00001-of-00002.gguf", "part-00002-of-00002.gguf"):
        (model / name).symlink_to(gguf)

    def deploy(*options: Any) -> Any:
        return lmworks("deploy", model, "--cpu", "--expect", answers, *options)

    refused = deploy("--engine", "llama.cpp", "--out", tmp_path / "d").error
    assert "reads one GGUF file: export one (--set export.gguf=true), or say which" in refused
    part = model / "part-00001-of-00002.gguf"
    refused = deploy("--engine", "llama.cpp", "--gguf", part, "--out", tmp_path / "d").error
    assert "is one of 2 parts of a model; join them with llama-gguf-split --merge part-00001-of-00002.gguf FILE" in refused
    assert deploy("--engine", "llama.cpp", "--gguf", model / "q8.gguf", "--out", tmp_path / "d").code == 0
    assert deploy("--engine", "vllm", "--out", tmp_path / "e").code == 0


def test_a_key_that_others_may_read_is_refused_before_weights_are_read(
    lmworks: Lmworks, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("lmworks.deploy.deploy.verify_export", read.append)
    key = tmp_path / "key"
    key.write_text("k")
    key.chmod(0o644)
    for options in (("--api-key-file", key), ("--expect", tmp_path / "none.json")):
        assert lmworks("deploy", exported, "--gpus", "h100", "--out", tmp_path / "d", *options).error
    assert not read


def test_what_lies_around_is_refused(
    lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(*options: Any) -> str:
        return lmworks("deploy", exported, "--gpus", "h100", "--expect", answers, *options).error

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    assert "is not an empty directory" in error("--out", tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["a"]
    key = tmp_path / "key"
    key.write_text("k")
    key.chmod(0o644)
    assert f"can be read by other users; run: chmod 600 {key}" in error("--out", tmp_path / "d", "--api-key-file", key)
    key.chmod(0o600)
    key.write_text("two words")
    assert "one key of printable ASCII" in error("--out", tmp_path / "d", "--api-key-file", key)
    monkeypatch.setenv("LMWORKS_MACHINE", f"{os.environ['LMWORKS_MACHINE']},memory=1e8")
    refused = lmworks("deploy", exported, "--cpu", "--out", tmp_path / "d", "--expect", answers).error
    assert "does not fit a CPU with 0.1 GB" in refused and "would do" in refused
    assert not (tmp_path / "d").exists()
    assert "is no run directory" in lmworks("deploy", tmp_path, "--gpus", "h100", "--out", tmp_path / "d").error


def test_a_quantized_model_needs_a_certificate(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    """As llm-compressor and others write it: what is quantized is said in config.json."""
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    config = json.loads((model / "config.json").read_text())

    def write(method: str) -> None:
        (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))

    write("compressed-tensors")

    def deploy(*options: str) -> Any:
        return lmworks("deploy", model, "--gpus", "h100", "--expect", answers, "--out", tmp_path / "d", *options)

    assert "is quantized and has no certificate.json" in deploy().error
    (model / "certificate.json").write_text(json.dumps({"verdict": "passed", "bytes": 1}))
    assert "keeps no hashes of the files that passed" in deploy().error
    (model / "certificate.json").write_text(json.dumps({"verdict": "passed", "files": file_records(model)}))
    assert deploy().code == 0
    shutil.rmtree(tmp_path / "d")
    (model / "certificate.json").unlink()
    assert deploy("--uncertified").code == 0
    shutil.rmtree(tmp_path / "d")
    write("fp8")
    assert deploy().code == 0, "a form in which models are published is the original"
    shutil.rmtree(tmp_path / "d")
    (model / "certificate.json").write_text(json.dumps({"verdict": "failed", "failures": ["the mean KL divergence is 2"]}))
    assert "has failed its certificate: the mean KL divergence is 2" in deploy().error


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        ("quant_config.json", {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}, ("awq", 4)),
        ("quantize_config.json", {"bits": 8, "group_size": 128, "desc_act": False}, ("gptq", 8)),
    ],
)
def test_an_early_folder_of_autoawq_or_autogptq_is_quantized(
    lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path, name: str, given: dict[str, Any], found: tuple[str, int]
) -> None:
    """Its form is in a file of its own, which engines read too, and not in config.json."""
    model = tmp_path / "model"
    shutil.copytree(exported, model)
    (model / name).write_text(json.dumps(given))
    error = lmworks("deploy", model, "--gpus", "h100", "--expect", answers, "--out", tmp_path / "d").error
    assert "is quantized and has no certificate.json" in error
    source = open_source(model)
    assert (source.quantization, source.bits) == found


def test_answers_of_a_quantized_gguf_file_are_judged_by_its_bits(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    from lmworks.quantize import gguf
    from lmworks.quantize.source import SCHEMES

    original, quantized = exported.parent / "gguf" / "model.gguf", tmp_path / "quantized.gguf"
    gguf.quantize(SCHEMES["gguf-q8_0"], original, quantized, None)
    tolerances = {}
    for file in (original, quantized):
        out = tmp_path / file.stem
        options = ("--cpu", "--engine", "llama.cpp", "--gguf", file, "--expect", answers, "--uncertified", "--out", out)
        assert lmworks("deploy", exported, *options).code == 0
        tolerances[file.stem] = json.loads((out / "expected.json").read_text())["tolerance"]
    assert tolerances == {"model": json.loads(answers.read_text(encoding="utf-8"))["tolerance"], "quantized": 0.2}
    assert "is quantized and has no certificate" in lmworks("deploy", exported, *options[:-3], "--out", tmp_path / "d").error


def test_recorded_answers_are_a_file_of_their_own(lmworks: Lmworks, exported: Path, tmp_path: Path) -> None:
    done = lmworks("deploy", "record", exported, "--out", tmp_path / "e.json", "--json")
    assert json.loads(done.out)["tokens"] >= 15 and (tmp_path / "e.json").is_file()
    assert "is no address" in lmworks("deploy", "check", "localhost", "--expect", tmp_path / "e.json").error
    assert lmworks("deploy", "record", exported, "--out", tmp_path / "e.json").code == 0  # again
    mine = shutil.copyfile(exported / "config.json", tmp_path / "mine.json")
    assert "mine.json is there, and holds no recorded answers" in lmworks("deploy", "record", exported, "--out", mine).error
    assert mine.read_bytes() == (exported / "config.json").read_bytes()


def test_pickled_weights_are_named_with_the_remedy(lmworks: Lmworks, exported: Path, tmp_path: Path) -> None:
    model = shutil.copytree(exported, tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    said = lmworks("deploy", model, "--engine", "vllm", "--cpu", "--out", tmp_path / "d").error
    assert "only pytorch_model.bin, which is pickled" in said and "save_pretrained(DIRECTORY)" in said
    assert not (tmp_path / "d").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(lmworks: Lmworks, exported: Path, answers: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        said = lmworks("deploy", exported, "--engine", "lmworks", "--cpu", "--expect", answers, "--out", disk / "d").error
        assert f"the disk of {disk}/d" in said and "is full (tmpfs, " in said and len(said) < 500, said
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
