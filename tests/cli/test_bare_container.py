"""Containers with a read-only file system, or a user ID without a home folder: commands work, or say in one line what they need."""

from __future__ import annotations

import pwd
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from command import Lmworks
from test_init_command import CHAT, ON, rows

from lmworks.bundle import archive
from lmworks.errors import UserError
from lmworks.io import files
from lmworks.ui.exit_codes import ExitCode
from written_run import write_run

NOWHERE = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/nowhere']; "
COMMAND = "from lmworks.cli.main import main; main()"


def without_temporary_folder(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", NOWHERE + program, *arguments], capture_output=True, encoding="utf-8", cwd=folder)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker run --user 4711 --env HOME=` of an image without that user."""

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    for name in ("HOME", "LOGNAME", "USER", "LNAME", "USERNAME", "LMWORKS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize("arguments", [("show", "quickstart"), ("init", "files", *ON)])
def test_commands_need_no_temporary_folder(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    rows(tmp_path / "files" / "chat.jsonl", CHAT["messages"])
    done = without_temporary_folder(tmp_path, COMMAND, *arguments)
    assert done.returncode == 0, done.stderr


def test_what_needs_a_temporary_folder_says_how_to_give_one(tmp_path: Path) -> None:
    needing = "import lmworks.recipe.load; lmworks.recipe.load.load_recipe = lambda *a, **k: tempfile.mkdtemp(); "
    done = without_temporary_folder(tmp_path, needing + COMMAND, "show", "quickstart")
    assert done.returncode == ExitCode.USER_ERROR, done.stderr
    assert "set TMPDIR to a folder that is writable" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_cache_without_a_home_says_what_to_set(no_home: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"HOME is not set.* set LMWORKS_CACHE to a folder"):
        files.cache_directory("wheels")
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path))
    assert files.cache_directory("wheels") == tmp_path / "wheels"


def test_a_bundle_needs_no_home(lmworks: Lmworks, no_home: None, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    done = lmworks("bundle", tmp_path / "run", "--out", tmp_path / "bundle.zip", "--yes")
    assert done.code == 0 and (tmp_path / "bundle.zip").is_file(), done.err
    assert list(archive._users()) == []


def test_a_path_with_a_tilde_without_a_home_is_no_bug(lmworks: Lmworks, no_home: None) -> None:
    done = lmworks("evaluate", "~/model", "--tasks", "arc_easy")
    assert done.code == ExitCode.USER_ERROR and "bug" not in done.error and "give paths without ~" in done.error, done.err
