"""`lmworks export` from the command line: an export that fails, whatever stops it, leaves the former one byte for byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command import Lmworks

from lmworks.export import export as stage
from lmworks.export import gguf as export_gguf
from lmworks.export import parity
from tiny_run import Tiny

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'lmworks[export]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'lmworks[export]'")

SET = ("--set", "tune=null", "--set", "export.huggingface=true", "--set", "export.gguf=true")


@pytest.fixture(scope="session")
def exported(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an export."""
    run = shutil.copytree(tiny.run_dir, tmp_path_factory.mktemp("exported") / "run")
    tiny.walk(f"run_dir={run}", *SET[1::2], "export.dtype=fp32", last="export")
    return Path(run)


@pytest.fixture
def again(exported: Path, tiny: Tiny, tmp_path: Path, lmworks: Lmworks) -> tuple[Path, Callable[[], Any]]:
    """A copy of the run, and its export with another dtype, so that the stage is repeated."""
    run = shutil.copytree(exported, tmp_path / "again")
    return run, lambda: lmworks("export", tiny.recipe, "--set", f"run_dir={run}", *SET, "--set", "export.dtype=bf16")


def files(run: Path) -> dict[str, bytes]:
    """Everything in the export but the records of the stage."""
    found = {str(one.relative_to(run)): one.read_bytes() for one in sorted((run / "export").rglob("*")) if one.is_file()}
    return {name: data for name, data in found.items() if not name.endswith("stage.json")}


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["write_huggingface", pytest.param("compare", marks=pytest.mark.slow), "check_gguf"])
def test_an_export_that_is_interrupted_leaves_the_former_one(
    again: tuple[Path, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run, export = again
    before = files(run)
    assert {"export/huggingface/model.safetensors", "export/gguf/model.gguf", "export/parity.json"} <= before.keys()
    with monkeypatch.context() as patch:
        patch.setattr(export_gguf if place == "check_gguf" else stage, place, interrupted)
        done = export()
    assert done.code == 130, done.err
    assert files(run) == before
    done = export()
    assert done.code == 0, done.err
    after = files(run)
    assert after.keys() == before.keys()
    assert len(after["export/gguf/model.gguf"]) < len(before["export/gguf/model.gguf"])


def test_what_killed_exports_left_is_removed_and_a_former_one_gets_its_name_back(again: tuple[Path, Callable[[], Any]]) -> None:
    run, export = again
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    part = run / "export" / f".huggingface.{gone.pid}.part"
    part.mkdir()
    of_a_running_one = run / "export" / f".gguf.{os.getppid()}.part"
    of_a_running_one.mkdir()
    (run / "export" / "gguf").rename(run / "export" / f".gguf.{gone.pid}.former")  # killed between the two renames
    assert export().code == 0
    assert sorted(one.name for one in (run / "export").iterdir() if one.is_dir()) == sorted([of_a_running_one.name, "gguf", "huggingface"])


def test_an_export_that_memory_cannot_hold_is_refused_before(
    again: tuple[Path, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, export = again
    before = files(run)
    monkeypatch.setenv("LMWORKS_MACHINE", f"{os.environ.get('LMWORKS_MACHINE', 'cores=1')},available=1000")
    assert "exporting tiny needs 0.00 GiB of memory, and 0.00 GiB are available; free some" in export().error
    assert files(run) == before


def test_a_refused_format_is_aside_and_the_others_are_in_place(
    again: tuple[Path, Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, export = again
    before, load = files(run), parity._load_in_transformers

    def wrong(directory: Path) -> Any:
        theirs = load(directory)
        theirs.model.norm.weight.data[0] *= 1.01
        return theirs

    with monkeypatch.context() as patch:
        patch.setattr(parity, "_load_in_transformers", wrong)
        done = export()
    assert done.code == 2 and "export/refused/huggingface" in done.error and f"kept: {run / 'export' / 'gguf'}" in done.error
    after = files(run)
    assert after["export/gguf/model.gguf"] != before["export/gguf/model.gguf"], "in bf16 now"
    assert after["export/huggingface/model.safetensors"] == before["export/huggingface/model.safetensors"], "the former one"
    assert {"export/refused/huggingface/model.safetensors", "export/refused/huggingface/parity.json"} <= after.keys()


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    path.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("kind", ["huggingface", "gguf"])
def test_a_full_disk_is_one_line_and_leaves_the_former_export(again: tuple[Path, Callable[[], Any]], tmp_path: Path, kind: str) -> None:
    run, export = again
    # safetensors and numpy lose the number of the error of the operating system
    shutil.move(run / "export", tmp_path / "former")
    needed = sum(one.stat().st_size for one in (tmp_path / "former").rglob("*") if one.is_file())
    huggingface = sum(one.stat().st_size for one in (tmp_path / "former" / "huggingface").iterdir())
    with small_disk(run / "export", needed + (60_000 if kind == "huggingface" else huggingface)):
        shutil.copytree(tmp_path / "former", run / "export", dirs_exist_ok=True)
        before = files(run)
        said = export().error
        assert f"/export/{kind}" in said and "is full (tmpfs, " in said and "free some space" in said and len(said) < 500, said
        assert ".part" not in said
        assert files(run) == before
        assert sorted(one.name for one in (run / "export").iterdir() if one.is_dir()) == ["gguf", "huggingface"]
