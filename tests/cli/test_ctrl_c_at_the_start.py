"""Ctrl-C before a command has begun: one line and exit code 130, whatever is imported at that moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmworks.ui.exit_codes import ExitCode
from patience import PATIENCE

# Python runs this file before the program: it sends the signal when MODULE is looked for.
AT_IMPORT = """
import os, signal, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["MODULE"]:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            except KeyboardInterrupt as stop:
                if os.environ["FATE"] == "swallowed":
                    return None
                if os.environ["FATE"] == "replaced":
                    raise RuntimeError("Error calling __set_name__") from stop
                raise

sys.meta_path.insert(0, Finder())
"""
PROGRAMS = ([sys.executable, "-m", "lmworks.cli.main"], [str(Path(sys.executable).parent / "lmworks")])


def interrupted(folder: Path, program: list[str], module: str, fate: str) -> None:
    (folder / "sitecustomize.py").write_text(AT_IMPORT)
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "MODULE": module, "FATE": fate}
    words = [*program, "evaluate", str(folder), "--tasks", "piqa"]
    done = subprocess.run(words, env=environment, capture_output=True, encoding="utf-8", timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.INTERRUPTED, ""), done.stderr
    assert done.stderr == "interrupted; finished work is kept, and the same command resumes it\n"


@pytest.mark.parametrize("program", PROGRAMS, ids=["module", "script"])
@pytest.mark.parametrize("fate", ["raised", "swallowed", "replaced"])
def test_while_the_command_line_is_imported(tmp_path: Path, program: list[str], fate: str) -> None:
    interrupted(tmp_path, program, "typer", fate)


@pytest.mark.parametrize(("module", "fate"), [("lmworks.cli.serve_commands", "swallowed"), ("torch", "raised"), ("torch", "replaced")])
def test_while_a_command_is_imported(tmp_path: Path, module: str, fate: str) -> None:
    interrupted(tmp_path, PROGRAMS[0], module, fate)
