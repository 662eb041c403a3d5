"""Checkpoints from somebody who signs what he likes: hashes say what a disk has spoilt, not that a table means well."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint import Checkpoints, list_checkpoints, listing, load, manifest, newest_good, verify
from lmworks.checkpoint.copy_to import copy_checkpoint
from lmworks.checkpoint.tensor_files import TABLE, Reader
from lmworks.errors import UserError
from lmworks.recipe.schema.artifacts import Checkpoints as Options

DATA = "data-00000-00000.bin"


def state() -> dict[str, Any]:
    return {"model": {"weight": torch.arange(8, dtype=torch.uint8)}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpoints(tmp_path / "run", Options(), {}) as checkpoints:
        checkpoints.save(1, state(), {})
    return tmp_path / "run" / listing.name_of(1)


def sign(path: Path, **more: Path) -> None:
    """Write the manifest that fits what lies there, `more` under names of its own."""
    files = {one.name: one for one in path.iterdir() if one.name != manifest.NAME} | more
    (path / manifest.NAME).write_bytes(manifest.canonical({name: manifest.entry_of(one.read_bytes()) for name, one in files.items()}))


def retable(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(gzip.decompress((path / TABLE).read_bytes()))
    change(document)
    (path / TABLE).write_bytes(gzip.compress(json.dumps(document).encode()))
    sign(path)


def part(**values: Any) -> Callable[[dict[str, Any]], None]:
    places = {"name": 0, "dtype": 1, "shape": 2, "offsets": 3, "sizes": 4, "at": 5}

    def change(document: dict[str, Any]) -> None:
        for name, value in values.items():
            document["parts"][0][places[name]] = value

    return change


def test_a_table_names_files_of_the_manifest_only(saved: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"password")
    for name in (str(secret), "../../secret", "data-00000-00001.bin", listing.META):
        retable(saved, lambda document, name=name: document.update(file=name))
        found = state()
        with pytest.raises(UserError, match=rf"is damaged: {TABLE} does not match what was written"):
            load(saved, found)
        assert torch.equal(found["model"]["weight"], state()["model"]["weight"])
        with pytest.raises(UserError, match="is damaged"):
            Reader(saved)
        (row,) = verify(saved.parent)
        assert not row["good"] and TABLE in row["problem"]


@pytest.mark.parametrize(
    "change",
    [
        part(at=1), part(at=-1), part(dtype="save"), part(dtype="float64"), part(sizes=[9]), part(shape=[-8]), part(offsets=["0"]),
        part(shape=[8, 1]), part(at=10**30), part(shape="12345678"), part(name=["a"]), part(name=63),
        lambda document: document.update(parts=3),
    ],
)  # fmt: skip
def test_a_table_of_nonsense_is_said_to_be_one(saved: Path, change: Callable[[dict[str, Any]], None]) -> None:
    retable(saved, change)
    with pytest.raises(UserError, match=r"is damaged|not those of|has other"):
        load(saved, state())
    assert not verify(saved.parent)[0]["good"]


@pytest.mark.parametrize(("dtype", "sizes", "at"), [("uint8", [8], 1), ("float32", [3], 0), ("float32", [2], 1), ("float64", [1], 8)])
def test_a_slice_beyond_the_end_of_its_file_is_told_before_it_is_read(saved: Path, dtype: str, sizes: list[int], at: int) -> None:
    retable(saved, part(dtype=dtype, shape=sizes, sizes=sizes, at=at))
    assert "weight reaches beyond the end of" in str(verify(saved.parent)[0]["problem"])


def test_a_table_that_unpacks_to_more_than_it_describes_is_not_unpacked(saved: Path) -> None:
    (saved / TABLE).write_bytes(gzip.compress(b" " * (1 << 26)))
    sign(saved)
    with pytest.raises(UserError, match="too long for the tensors that it describes"):
        load(saved, state())


@pytest.mark.parametrize("text", ['{"files": {"a": {"bytes": 1e999, "blake3": ""}}}', "[" * 100_000, '{"files": [1]}'])
def test_a_manifest_of_nonsense_is_said_to_be_one(saved: Path, text: str) -> None:
    (saved / manifest.NAME).write_text(text, encoding="utf-8")
    (row,) = verify(saved.parent)
    assert row["problem"] == "manifest.json is not readable" == listing.list_checkpoints(saved.parent)[0]["problem"]


@pytest.mark.parametrize("name", [DATA, listing.META, TABLE])
def test_only_regular_files_are_opened(saved: Path, tmp_path: Path, name: str) -> None:
    """No link is followed and no pipe waited for, by any reader."""
    path, kept = saved / name, tmp_path / "kept"
    path.rename(kept)
    path.symlink_to(kept)
    sign(saved)
    assert newest_good(saved.parent)[0] is None
    with pytest.raises(UserError, match="is damaged"):
        load(saved, state())
    with pytest.raises((OSError, UserError)):
        load(saved, state(), verified=True)
    with pytest.raises(OSError, match=name):
        copy_checkpoint(saved, str(tmp_path / "copy"))
    path.unlink()
    os.mkfifo(path)
    list_checkpoints(saved.parent)
    assert newest_good(saved.parent)[0] is None
    with pytest.raises((OSError, UserError)):
        load(saved, state(), verified=True)


def test_a_manifest_that_is_a_pipe_or_names_what_is_no_file_of_ours_is_none(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x")
    for name in ("..", "", ".hidden", "data-1.bin", "notes.txt"):
        sign(saved, **{name: other})
        assert "does not match what was written" in newest_good(saved.parent)[1][0][1]
    (saved / manifest.NAME).unlink()
    os.mkfifo(saved / manifest.NAME)
    assert "cannot be read" in newest_good(saved.parent)[1][0][1]


def test_a_document_is_read_up_to_a_bound(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MOST_DOCUMENT", 100)
    assert "cannot be read" in newest_good(saved.parent)[1][0][1]
