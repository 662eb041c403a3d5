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
from types import TracebackType
from typing import IO

from lmworks.corpus.items import Item, broken
from lmworks.corpus.readers import html, latex
from lmworks.errors import UserError

_SECONDS = 20
_MEMORY = 4 << 30
_MISSING = 3
_HEADER = struct.Struct("<BQ")
_FORMATS = {"html": html, "latex": latex}


class Extractor:
    """A context manager; `text` may be called any number of times in it."""

    def __init__(self, name: str) -> None:
        self._name, self._process = name, None  # type: tuple[str, subprocess.Popen[bytes] | None]

    def __enter__(self) -> Extractor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def text(self, data: bytes, origin: str, consumed: int) -> Item:
        """The text in `data`, or as what is wrong with it: `no_text`, `hangs_parser`, `kills_parser`."""
        if self._process is None:
            # the order of sets must not depend on the process
            settings = {**os.environ, "PYTHONHASHSEED": "0"}
            command = [sys.executable, "-c", "from lmworks.corpus.readers.extraction import serve; serve()", self._name]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=settings)
        process = self._process
        assert process.stdin and process.stdout, "both are pipes"
        try:
            process.stdin.write(_HEADER.pack(0, len(data)) + data)
            process.stdin.flush()
            failed, size = _HEADER.unpack(_exactly(process.stdout, _HEADER.size))
            text = _exactly(process.stdout, size).decode()
        except (BrokenPipeError, EOFError):
            process.communicate()
            self._process = None
            if process.returncode == _MISSING:
                raise UserError(f"kind {self._name} needs more packages: pip install 'lmworks[web]'") from None
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
    try:
        extract = _FORMATS[name].extractor()
    except ImportError:
        sys.exit(_MISSING)
    while header := source.read(_HEADER.size):
        data = source.read(_HEADER.unpack(header)[1])
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # nobody handles SIGPROF, so it ends this process, in C code too
        try:
            failed, text = 0, extract(data)
        except (ValueError, RecursionError, MemoryError, AssertionError, LookupError, TypeError, AttributeError) as error:
            failed, text = 1, f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = text.encode("utf-8", "replace")
        sink.write(_HEADER.pack(failed, len(answer)) + answer)
        sink.flush()

