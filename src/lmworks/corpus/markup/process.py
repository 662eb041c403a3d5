"""The process in which markup is parsed: documents come in by its input, texts go out by its output. It imports little, to start soon."""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
from importlib import import_module

HEADER = struct.Struct("<BQ")  # whether it failed, bytes that follow
_MEMORY = 4 << 30


def serve() -> None:
    """What the process does: an answer to each document that comes in, until no more come."""
    try:
        _answer(sys.argv[1], float(sys.argv[2]))
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)


def _answer(name: str, seconds: float) -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    extract = import_module(f"lmworks.corpus.markup.{name}").extractor()
    sink.write(HEADER.pack(0, 0))
    sink.flush()
    while header := source.read(HEADER.size):
        data = source.read(HEADER.unpack(header)[1])
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles SIGPROF, so it ends this process, in C code too
        try:
            failed, text = 0, extract(data)
        except Exception as error:  # whatever a parser makes of bad input is a reason
            failed, text = 1, f"{type(error).__name__}: {error}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = text.encode("utf-8", "replace")
        sink.write(HEADER.pack(failed, len(answer)) + answer)
        sink.flush()

