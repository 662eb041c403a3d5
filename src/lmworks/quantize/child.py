"""Runs a program of `programs.py` under a Python that has a foreign library.

The library may be in another environment, whose versions of torch and transformers are its own. The program gets and returns JSON lines
and files only. A library that crashes ends its own process, not ours.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.io.files import is_full_disk
from lmworks.ui.terminal import Bar

PROGRAMS = Path(__file__).with_name("programs.py")
_LAST_LINES = 40
_STEP = re.compile(r"\[\s*(\d+)/\s*(\d+)\]")


class Crashed(Exception):
    """The program ended without an answer; the message is its last line."""


class Killed(Crashed):
    """The program was killed from outside, which says nothing about what it was asked."""


class Child:
    """A running program. `ask` sends a request and waits for its answer."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process, self._name = process, name
        self._lines: list[str] = []
        self._done = 0
        self.progress: Bar | None = None
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The program's answer. Raises `Crashed` if it ends, and with its message if it reports an error; `Killed` if it was killed."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):  # it may end within an answer
            code = self._process.wait()
            self._thread.join(5)
            if code in (-signal.SIGKILL, -signal.SIGTERM):
                raise Killed(f"{self._name} was killed (signal {-code}), as the system does where memory is short")
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            last = next((one for one in reversed(self._lines) if one.strip()), "no message").strip()
            raise Crashed(f"{self._name} ended with {how}: {last[:300]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Crashed(" ".join(str(answer["error"]).split())[:400])
        return answer

    def _listen(self) -> None:
        """Keep the last lines of the program's messages, and turn `[ 3/ 60]` into progress."""
        assert self._process.stderr
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace")
            self._lines = [*self._lines[-_LAST_LINES:], line]
            if (step := _STEP.search(line)) and self.progress is not None:
                self.progress.advance(max(0, int(step[1]) - self._done))
                self._done = max(self._done, int(step[1]))

    def messages(self) -> list[str]:
        """The last lines that the program has printed."""
        return list(self._lines)


@dataclass
class ChildScorer:
    """Logits of the model that a program has opened."""

    child: Child
    scratch: Path
    vocabulary: int
    name: str

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Logits (T, V). Raises `Crashed`, and `OSError` if the disk of `scratch` is full."""
        path = self.scratch / "logits.f32"
        try:
            self.child.ask({"do": "logits", "ids": list(ids), "to": str(path)})
        except Crashed as error:
            if is_full_disk(str(error)):  # says nothing about the engine
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
            raise
        found = np.fromfile(path, np.float32)
        if found.size != len(ids) * self.vocabulary:
            raise Crashed(f"{self.name} has computed {found.size} logits for {len(ids)} tokens and a vocabulary of {self.vocabulary}")
        return torch.from_numpy(found.reshape(len(ids), self.vocabulary))


@contextmanager
def running(python: Path, program: str, name: str = "", **environment: str) -> Iterator[Child]:
    """Start a program of `programs.py` under `python`, and end it with the block, however it is left."""
    with tempfile.TemporaryDirectory() as scratch:
        variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | environment
        command = [str(python), "-I", str(PROGRAMS), program]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables | {"TMPDIR": scratch}
        )
        try:
            yield Child(process, name or program)
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    with suppress(OSError):  # unsent bytes
                        stream.close()


def find_python(modules: Sequence[str], given: Sequence[Path]) -> Path | None:
    """The first Python that has all `modules`: those of `--python`, then this one. Raises `UserError` for one that does not run."""
    return next((python for python in (*given, Path(sys.executable)) if _has(python, tuple(modules))), None)


@cache
def _has(python: Path, modules: tuple[str, ...]) -> bool:
    program = "import importlib.util, sys; print(all(importlib.util.find_spec(name) for name in sys.argv[1:]))"
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", program, *modules], capture_output=True, encoding="utf-8", errors="replace", timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode:
        raise UserError(f"--python {python} is not a Python that runs; name the file, such as ENVIRONMENT/bin/python")
    return done.stdout.strip() == "True"
