"""The command line, called in this process: that spares the seconds that importing torch takes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest

from lmworks.cli.main import main
from lmworks.launch.launch_dir import COMMAND


@dataclass(frozen=True)
class Done:
    """What a command left: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a user's fault gets: the exit code is 2, nothing follows the line, and there is no traceback."""
        assert self.code == 2, (self.code, self.err)
        assert "Traceback" not in self.err + self.out
        line = self.err.rstrip("\n").splitlines()[-1]
        assert line.startswith("error: "), self.err
        return line.removeprefix("error: ")


@dataclass(frozen=True)
class Lmworks:
    """`lmworks("run", ...)`."""

    monkeypatch: pytest.MonkeyPatch
    capfd: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Done:
        self.monkeypatch.setattr(sys, "argv", ["lmworks", *map(str, arguments)])
        self.monkeypatch.setenv(COMMAND, os.environ.get(COMMAND, ""))  # undone: a launch sets it for its ranks, and would for the next test
        self.capfd.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Done(code, *self.capfd.readouterr())
