"""`start_from` names a model on the Hugging Face hub: from the command line, against a stand-in of the hub."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from command import Lmworks
from huggingface_hub import constants

from base_models import write_model, write_tokenizer
from hub import Hub
from lmworks.checkpoint import listing
from lmworks.io.files import read_json
from lmworks.recipe.hub import parse
from lmworks.watch.ledger import read_ledger

NAME = "someone/tiny-base"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions of a model, with files beside them that nobody should load."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for seed, folder in enumerate(folders):
        write_tokenizer(folder, "qwen")
        write_model(folder, 448, seed)
        (folder / "pytorch_model.bin").write_bytes(b"pickled")
        (folder / "modeling_tiny.py").write_text("raise SystemExit('run')\n")
        (folder / "consolidated.safetensors").write_bytes(b"another format")
        (folder / "onnx").mkdir()
        (folder / "onnx" / "config.json").write_text("{}")
    return folders


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", made.address)  # read from the environment when the library is imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return made


def write_recipe(folder: Path, start: str) -> Path:
    chats = [[{"role": "user", "content": f"{a} + 1?"}, {"role": "assistant", "content": f"It is {a + 1}."}] for a in range(40)]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats) + "\n")
    tree = {
        "name": "tuned", "threads": 1, "start_from": start, "train": {"precision": "fp32", "compile": False, "micro_batch_sequences": 2},
        "tune": {"data": [{"name": "sums", "kind": "files", "path": str(folder / "chats.jsonl")}], "tokens": "512 tokens",
                 "sequence_length": "64 tokens", "global_batch_tokens": "256 tokens"},
        "evaluate": {"benchmarks": [], "questions": []}, "export": {"huggingface": True, "gguf": False, "dtype": "fp32"},
    }  # fmt: skip
    (folder / "tune.yaml").write_text(yaml.safe_dump(tree))
    return folder / "tune.yaml"


def test_a_run_keeps_the_commit_that_it_began_with(lmworks: Lmworks, published: tuple[Path, Path], hub: Hub, tmp_path: Path) -> None:
    first, recipe, run_dir = hub.publish(NAME, published[0]), write_recipe(tmp_path, NAME), tmp_path / "runs" / "tuned"
    with hub.serving():
        done = lmworks("tune", recipe)
    assert done.code == 0, done.err
    assert f"{NAME}@main:{first}" in "".join(done.err.split()), "printed"
    assert not [line for line in hub.asked if line.endswith((".bin", ".py", "onnx/config.json")) or "consolidated" in line], hub.asked
    event = next(line for line in read_ledger(run_dir / "ledger.jsonl") if line["event"] == "start_from")
    assert event["hub"] == {"name": NAME, "revision": "main", "commit": first}
    meta = listing.read_meta(run_dir / "checkpoints" / "step-00000000")["meta"]
    assert meta["start_from"]["hub"]["commit"] == first and Path(meta["start_from"]["path"]).name == first
    assert read_json(run_dir / "resolved.json")["start_from"] == f"{NAME}@main:{first}"
    again = lmworks("evaluate", recipe)
    assert again.code == 0, again.err  # the hub is off
    second = hub.publish(NAME, published[1])
    with hub.serving():
        moved = lmworks("run", recipe)
        assert moved.code == 0, moved.err
        new = lmworks("show", recipe, "--set", "run_dir=elsewhere")
        assert new.code == 0 and second in "".join(new.out.split()), "a run that has not begun takes what the branch is now"
        other = lmworks("run", recipe, "--set", f"start_from={NAME}@{second}")
        assert "start_from" in other.error and "--allow" in other.error, "another revision was asked for"
        same = lmworks("run", recipe, "--set", f"start_from={NAME}@{first}")
        assert same.code == 0, same.err  # the commit, written into the recipe
    assert read_json(run_dir / "resolved.json")["start_from"] == f"{NAME}@main:{first}"
    shutil.rmtree(tmp_path / "cache")
    with hub.serving():
        assert lmworks("show", recipe).code == 0 and (tmp_path / "cache").exists(), "the same commit is downloaded again"


def test_what_cannot_be_had_is_refused_in_one_line(
    lmworks: Lmworks, published: tuple[Path, Path], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    hub.publish(NAME, published[0])
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")

    def error(start: str) -> str:
        text = lmworks("show", write_recipe(tmp_path, start)).error
        assert "hf_verysecret" not in text and text.startswith("start_from: "), text
        return text

    with hub.serving():
        assert "has no such model" in (text := error("someone/missing")) and "HF_TOKEN" in text and hub.address in text
        assert "has no revision v9; name a branch" in error(f"{NAME}@v9")
        assert "has no revision 0000" in error(f"{NAME}@{'0' * 40}")
        hub.refused[NAME] = (403, "GatedRepo")
        assert "is gated: ask for access" in (text := error(NAME)) and f"{hub.address}/{NAME}" in text and "hf auth login" in text
        for status in (401, 403):
            hub.refused[NAME] = (status, "everything")
            assert "does not show it to you" in error(f"{NAME}")
        hub.refused.clear()
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "model.gguf").write_bytes(b"GGUF")
        hub.publish("someone/files-GGUF", tmp_path / "files")
        assert "hf download someone/files-GGUF FILE" in error("someone/files-GGUF")
        assert hub.tokens == {"Bearer hf_verysecret"}
    assert "cannot be had from" in (text := error("someone/missing")) and "check the path, the network and HF_ENDPOINT" in text
    monkeypatch.setenv("HF_TOKEN", "hf_very\x01secret")
    assert "secret" not in error("someone/missing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'lmworks[export]'" in error(NAME)


COMMANDS: dict[str, tuple[object, ...]] = {
    "chat": ("chat", "MODEL", "--max-tokens", 2, "--temperature", 0),
    "serve": ("serve", "MODEL", "--port", 0),
    "evaluate": ("evaluate", "MODEL", "--tasks", "copa"),
    "quantize": ("quantize", "MODEL", "--to", "gguf-q8_0", "--out", "quantized"),
    "deploy": ("deploy", "MODEL", "--engine", "lmworks", "--cpu", "--out", "deployed"),
    "record": ("deploy", "record", "MODEL", "--out", "answers.json"),
}
"""Where else a model is named."""


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_refuse_a_name_as_start_from_does(lmworks: Lmworks, hub: Hub, name: str) -> None:
    def error(model: str) -> str:
        return lmworks(*[model if word == "MODEL" else word for word in COMMANDS[name]]).error

    assert "cannot be had from" in (text := error("someone/missing")) and "check the path, the network and HF_ENDPOINT" in text
    assert "is not of the form wheel:NAME==VERSION/FILE#sha256=HASH" in error("wheel:other")
    with hub.serving():
        assert "has no such model" in error("someone/missing@v1")
    assert any("someone/missing" in line for line in hub.asked)


def test_commands_take_a_name(
    lmworks: Lmworks, published: tuple[Path, Path], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A model of the hub answers and is deployed under its own name, and from the cache when the hub is off and it is named by commit."""
    commit = hub.publish(NAME, published[0], "v1")
    with hub.serving():
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n"), encoding="utf-8"))
        done = lmworks(*[f"{NAME}@v1" if word == "MODEL" else word for word in COMMANDS["chat"]])
        assert done.code == 0, done.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n"), encoding="utf-8"))
    again = lmworks(*[f"{NAME}@{commit}" if word == "MODEL" else word for word in COMMANDS["chat"]])
    assert again.code == 0 and again.out == done.out
    done = lmworks(*[f"{NAME}@{commit}" if word == "MODEL" else word for word in COMMANDS["deploy"]])
    assert done.code == 0, done.err
    assert "tiny-base" in (tmp_path / "deployed" / "README.md").read_text()


def test_the_environment_names_hub_and_cache(published: tuple[Path, Path], hub: Hub, tmp_path: Path) -> None:
    """In a process of its own, since the library reads them when it is imported; and from the cache when the hub is off."""
    commit = hub.publish("someone/other", published[0], "v1")
    command = [sys.executable, "-m", "lmworks.cli.main", "show", str(write_recipe(tmp_path, "someone/other@v1"))]
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home")}
    with hub.serving():
        done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0 and commit in done.stdout, done.stderr
    assert list((tmp_path / "home").rglob(f"snapshots/{commit}/model.safetensors"))
    off = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=120)
    assert off.returncode == 0 and commit in off.stdout, off.stderr


def test_what_is_a_name_and_what_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "gone").symlink_to("nothing")
    commit = "0123456789" * 4
    paths = ("runs/mine", "runs/mine@tuned", "runs/gone", "./a/b", "~/a", "/a/b", "a", "a/b/c", "../a", "a/b.gguf", "a/b@", "a/b@x:y")
    for text in paths:
        assert parse(text) is None, text
    for text, expected in (
        ("a/b", ("main", None)), ("a/b.c-d_e@refs/pr/1", ("refs/pr/1", None)), (f"a/b@{commit}", (commit, commit)),
        (f"a/b@v1:{commit}", ("v1", commit)),
    ):  # fmt: skip
        found = parse(text)
        assert found is not None and (found.revision, found.commit) == expected
        assert parse(str(found)) == found, "what is recorded names the same"
