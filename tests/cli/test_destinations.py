"""A path that a command cannot write to is refused in one line before its work begins; what is missing beside it is said later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from command import Lmworks

from lmworks.errors import UserError
from lmworks.io.destinations import require_file, require_folder
from lmworks.io.files import explain_os_errors, write_text
from tiny_run import Tiny

FOLDERS = (
    ("evaluate", "nowhere", "--tasks", "piqa", "--out"),
    ("evaluate", "nowhere", "--harness", "piqa", "--out"),
    ("quantize", "nowhere", "--to", "gguf-q8_0", "--out"),
    ("ablate", "pair.yaml", "--out"),
    ("ladder", "run", "ladder.yaml", "--out"),
    ("ladder", "fit", "PATH", "nowhere"),
    ("data", "import", "megatron", "nowhere", "--tokenizer", "nowhere", "--name", "web", "--out"),
    ("export-harness", "PATH", "--tasks", "piqa"),
    ("deploy", "write", "nowhere", "--out"),
    ("handover", "slime", "nowhere", "--prompts", "nowhere.jsonl", "--out"),
)
FILES = (
    ("compare", "nowhere", "elsewhere", "--html"),
    ("report", "RUN", "--out"),
    ("bundle", "RUN", "--yes", "--out"),
    ("profile", "nowhere", "--trace"),
    ("deploy", "record", "nowhere", "--out"),
    ("init", "nowhere", "--output"),
    ("corpus", "classifier", "train", "PATH", "--good", "nowhere", "--bad", "nowhere"),
    ("corpus", "analyze", "RUN", "--page"),
)


@pytest.fixture
def place(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what the commands are given: a file, a full directory, an ablation and a ladder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full" / "page").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    ablation = {"recipe": str(tiny.recipe), "budget": "5120 tokens", "seeds": 1, "arms": {"a": [], "b": ["optimizer.weight_decay=0.2"]}}
    sizes = {str(width): [f"model.intermediate_size={width}"] for width in (16, 64, 256)}
    ladder = {"recipe": str(tiny.recipe), "sizes": sizes, "horizons": ["2048 tokens", "4096 tokens", "8192 tokens"]}
    for name, tree in (("pair", ablation), ("ladder", ladder)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


def refused(lmworks: Lmworks, tiny: Tiny, words: tuple[str, ...], path: str) -> str:
    given = [str(tiny.run_dir) if word == "RUN" else path if word == "PATH" else word for word in words]
    return lmworks(*given, *([] if "PATH" in words else [path])).error


@pytest.mark.parametrize("words", FOLDERS, ids=" ".join)
def test_a_folder_that_cannot_be_made_comes_first(lmworks: Lmworks, tiny: Tiny, place: Path, words: tuple[str, ...]) -> None:
    for path in ("file", "file/below"):
        error = refused(lmworks, tiny, words, path)
        assert path in error and ("is not a directory" in error or "is not an empty directory" in error)
    assert (place / "file").read_text() == "mine"


@pytest.mark.parametrize("words", FILES, ids=" ".join)
def test_a_file_that_cannot_be_made_comes_first(lmworks: Lmworks, tiny: Tiny, place: Path, words: tuple[str, ...]) -> None:
    """`report --out DIR` writes into the directory."""
    error = refused(lmworks, tiny, words, "file/below")
    assert ("cannot be written: " in error and "file is not a directory" in error) or "the folder does not exist" in error
    if words[0] != "report":
        error = refused(lmworks, tiny, words, "full/page")
        assert "is a directory" in error or ("exists" in error and words[0] in ("bundle", "init")) or "folder does not exist" in error
    if words[0] not in ("bundle", "init"):
        assert "no regular file" in refused(lmworks, tiny, words, "/dev/null")


def test_a_closed_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    for check in (require_folder, require_file):
        with pytest.raises(UserError, match=f"--out {tmp_path}/a/b cannot be written: {tmp_path} is closed to you; make it writable"):
            check(tmp_path / "a" / "b")


def test_what_comes_into_the_way_later_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "page").mkdir()
    for path, said in (("file/below", "file: File exists"), ("file/a/b", "Not a directory"), ("page", "page: Is a directory")):
        with pytest.raises(UserError, match=f"cannot write .*{path}: .*{said}; remove that, or write elsewhere"):
            write_text(tmp_path / path, "")
    with pytest.raises(FileExistsError), explain_os_errors(tmp_path / "page"):
        (tmp_path / "file").mkdir()  # an error about something else stays what it is
