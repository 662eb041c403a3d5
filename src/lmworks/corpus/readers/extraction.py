"""Text out of HTML and LaTeX, in a process of its own: their parsers can be made to hang, to crash and to fill the memory.

A document may take `_SECONDS` of processor time, however busy the machine is; the kernel then ends the process, and the next document gets
a new one. The process ends with its input.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
from importlib.util import find_spec
from types import TracebackType
from typing import IO

from lmworks.corpus.items import Item, broken
from lmworks.corpus.readers import html, latex
from lmworks.errors import UserError

_SECONDS = 20
_MEMORY = 4 << 30
_PACKAGES = {"html": "trafilatura", "latex": "pylatexenc"}
_HEADER = struct.Struct("<BQ")
_FORMATS = {"html": html, "latex": latex}


class Extractor:
    """A context manager in which `text` may be called any number of times. Raises UserError without the packages (extra `web`)."""

    def __init__(self, name: str) -> None:
        self._name, self._process = name, None  # type: tuple[str, subprocess.Popen[bytes] | None]

    def __enter__(self) -> Extractor:
        if find_spec(_PACKAGES[self._name]) is None:
            raise UserError(f"reading {self._name} needs {_PACKAGES[self._name]}: pip install 'lmworks[web]'")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "from lmworks.corpus.readers.extraction import serve; serve()", self._name]
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        settings = {**os.environ, "PYTHONHASHSEED": "0"}  # the order of sets must not depend on the process
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=settings)
        try:
            _exactly(process.stdout, _HEADER.size)  # type: ignore[arg-type]
        except EOFError:
            process.communicate()
            raise UserError(f"the parser of {self._name} does not start; python -c 'import {_PACKAGES[self._name]}' says why") from None
        return process

    def text(self, data: bytes, origin: str, consumed: int) -> Item:
        """The text in `data`, or as what is wrong with it: `no_text`, `hangs_parser`, `kills_parser`."""
        process = self._process = self._process or self._start()
        assert process.stdin and process.stdout, "both are pipes"
        try:
            process.stdin.write(_HEADER.pack(0, len(data)) + data)
            process.stdin.flush()
            failed, size = _HEADER.unpack(_exactly(process.stdout, _HEADER.size))
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


def serve() -> None:
    """What the process does: an answer to each document that comes in, until no more come."""
    try:
        _answer(sys.argv[1])
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


def _answer(name: str) -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    extract = _FORMATS[name].extractor()
    sink.write(_HEADER.pack(0, 0))
    sink.flush()
    while header := source.read(_HEADER.size):
        data = source.read(_HEADER.unpack(header)[1])
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # nobody handles SIGPROF, so it ends this process, in C code too
        try:
            failed, text = 0, extract(data)
        except Exception as error:  # whatever a parser makes of bad input is a reason
            failed, text = 1, f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = text.encode("utf-8", "replace")
        sink.write(_HEADER.pack(failed, len(answer)) + answer)
        sink.flush()

