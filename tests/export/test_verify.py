"""Damaged files of an export are found by name, wherever the folder lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmworks.errors import UserError
from lmworks.export.export import export
from lmworks.io.files import read_json, write_json
from lmworks.weights.huggingface import read_model
from lmworks.weights.verified import REPORT, verify_export

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'lmworks[export]'")


@pytest.fixture(scope="session")
def exported(make_run: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, out = make_run("llama"), tmp_path_factory.mktemp("exported")
    export(run.recipe, run.directory, out)
    return out


@pytest.fixture
def copied(exported: Path, tmp_path: Path) -> Path:
    """Copied elsewhere, as people do."""
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def flip(file: Path, share: float) -> None:
    """One bit at a place of the file."""
    data = bytearray(file.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    file.write_bytes(data)


def test_what_passed_is_verified(copied: Path) -> None:
    for path in (copied, copied / "huggingface", copied / "gguf", copied / "gguf" / "model.gguf"):
        verify_export(path)
    (copied / "huggingface" / "README.md").write_text("edited by its owner")
    verify_export(copied / "huggingface")
    files = read_json(copied / REPORT)["files"]
    assert {"gguf/model.gguf", "huggingface/model.safetensors", "huggingface/config.json", "huggingface/tokenizer.json"} <= files.keys()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_one_bit_of_any_file_is_named(copied: Path, name: str, share: float) -> None:
    flip(copied / "huggingface" / name, share)
    for path in (copied, copied / "huggingface"):
        with pytest.raises(UserError, match=rf"{name} is not the file that passed \(SHA-256"):
            verify_export(path)
    with pytest.raises(UserError, match="is not the file that passed"):
        read_model(copied / "huggingface")
    verify_export(copied / "gguf")


def test_a_gguf_file_is_verified_where_only_it_is_named(copied: Path) -> None:
    flip(copied / "gguf" / "model.gguf", 0.9)
    with pytest.raises(UserError, match=r"model\.gguf is not the file that passed"):
        verify_export(copied / "gguf" / "model.gguf")


def test_lost_cut_and_added_files_are_named(copied: Path) -> None:
    folder = copied / "huggingface"
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"model\.safetensors is not the file that passed \(1,000 bytes instead of"):
        verify_export(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors is missing"):
        verify_export(folder)
    shutil.copyfile(copied / "gguf" / "model.gguf", copied / "gguf" / "other.gguf")
    with pytest.raises(UserError, match=r"other\.gguf has no entry .* never compared"):
        verify_export(copied / "gguf")


def test_folders_of_others_are_taken_as_they_are(tmp_path: Path) -> None:
    verify_export(tmp_path)
    (tmp_path / REPORT).write_text("[]")
    verify_export(tmp_path)


def test_hostile_and_refused_reports(copied: Path) -> None:
    folder = copied / "huggingface"
    report = read_json(folder / REPORT)
    for name in ("/etc/passwd", "../gguf/model.gguf"):
        write_json(folder / REPORT, report | {"files": {name: {"bytes": 1, "sha256": "0"}}})
        with pytest.raises(UserError, match="which is not in"):
            verify_export(folder)
    write_json(folder / REPORT, report | {"files": {"config.json": "?"}})
    with pytest.raises(UserError, match="is damaged"):
        verify_export(folder)
    (folder / REPORT).write_text(json.dumps(report | {"verdict": "refused", "reason": "logits differ"}))
    with pytest.raises(UserError, match="was refused by the export: logits differ"):
        verify_export(folder)
