"""Text out of HTML and LaTeX, in a process of its own: their parsers can be made to hang, to crash and to fill the memory.

A document may take `_SECONDS` of processor time, however busy the machine is; the kernel then ends the process, and the next document gets
a new one. The process ends with its input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from types import TracebackType
from typing import IO

from lmworks.corpus.items import Item, broken
from lmworks.corpus.markup.process import HEADER
from lmworks.errors import UserError

_SECONDS = 20
_PACKAGES = {"html": "trafilatura", "latex": "pylatexenc"}


class Extractor:
    """A context manager in which `text` may be called any number of times. Raises UserError without the packages (extra `web`)."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Extractor:
        if find_spec(_PACKAGES[self._name]) is None:
            raise UserError(f"reading {self._name} needs {_PACKAGES[self._name]}: pip install 'lmworks[web]'")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "from lmworks.corpus.markup.process import serve; serve()", self._name, str(_SECONDS)]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        settings = {**os.environ, "PYTHONHASHSEED": "0"}  # the order of sets must not depend on the process
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=settings)
        try:
            _exactly(process.stdout, HEADER.size)  # type: ignore[arg-type]
        except EOFError:
            process.communicate()
            raise UserError(f"the parser of {self._name} does not start; python -c 'import {_PACKAGES[self._name]}' says why") from None
        return process

    def text(self, data: bytes, origin: str, consumed: int) -> Item:
        """The text in `data`, or as what is wrong with it: `no_text`, `hangs_parser`, `kills_parser`."""
        process = self._process = self._process or self._start()
        assert process.stdin and process.stdout, "both are pipes"
        try:
            process.stdin.write(HEADER.pack(0, len(data)) + data)
            process.stdin.flush()
            failed, size = HEADER.unpack(_exactly(process.stdout, HEADER.size))
            text = _exactly(process.stdout, size).decode()
        except (BrokenPipeError, EOFError):
            process.communicate()
            self._process = None
            hangs = process.returncode == -signal.SIGPROF
            return broken("hangs_parser" if hangs else "kills_parser", origin, data, consumed)
        return broken("no_text", origin, text or data, consumed) if failed or not text.strip() else Item(text, origin, consumed)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data
