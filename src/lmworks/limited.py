"""A function in a process of its own with limits: hostile input makes parsers hang, crash and fill the memory.

A call may take so much processor time, however busy the machine is; the kernel then ends the process, and the next call gets a new one. The
process ends with its input. It imports little, to start soon.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import IO

_HEADER = struct.Struct("<BQ")  # whether it failed, bytes that follow


class Failed(Exception):
    """The function raised; says what."""


class Ended(Exception):
    """The process has ended before it answered; `hangs` says that it was for the time that it took."""

    def __init__(self, hangs: bool) -> None:
        super().__init__("takes too much time" if hangs else "takes too much memory, or crashes its parser")
        self.hangs = hangs


class Limited:
    """Calls of a function of bytes that gives bytes. `make`, as MODULE:NAME, gives the function, in a process started at the first call.

    A call may take `seconds` of processor time, the process `memory` bytes of address space. Threads take turns.
    """

    def __init__(self, make: str, seconds: float, memory: int) -> None:
        self._make, self._seconds, self._memory = make, seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock, self._owner = threading.Lock(), 0

    def __call__(self, data: bytes) -> bytes:
        """What the function returns. Raises `Failed` and `Ended`, and `OSError` if the process does not start."""
        with self._lock:
            try:
                if self._process is None or self._owner != os.getpid():
                    self._start()
                failed, answer = self._ask(data)
            except (BrokenPipeError, EOFError):
                assert self._process is not None
                self._process.communicate()
                hangs, self._process = self._process.returncode == -signal.SIGPROF, None
                raise Ended(hangs) from None
            except BaseException:  # what it would still answer is no answer to the next call
                self.close()
                raise
        if failed:
            raise Failed(answer.decode("utf-8", "replace"))
        return answer

    def close(self) -> None:
        """End the process. Another call would start a new one."""
        self._end()
        self._process = None

    def _start(self) -> None:
        code = "from lmworks.limited import serve; serve()"
        command = [sys.executable, "-P", "-c", code, self._make, str(self._seconds), str(self._memory)]
        settings = {**os.environ, "PYTHONHASHSEED": "0"}  # the order of sets must not depend on the process
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._process, self._owner = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=settings), os.getpid()
        self._end = weakref.finalize(self, _end, self._process, self._owner)
        try:
            self._answer()
        except EOFError:
            self.close()
            raise OSError(f"the process of {self._make} does not start") from None

    def _ask(self, data: bytes) -> tuple[int, bytes]:
        assert self._process and self._process.stdin
        self._process.stdin.write(_HEADER.pack(0, len(data)) + data)
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> tuple[int, bytes]:
        assert self._process and self._process.stdout
        failed, size = _HEADER.unpack(_exactly(self._process.stdout, _HEADER.size))
        return failed, _exactly(self._process.stdout, size)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.communicate()


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """What the process does: an answer to each call that comes in, until no more come."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    try:
        _answer_calls(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
    except BrokenPipeError:
        os._exit(1)


def _answer_calls(make: str, seconds: float, memory: int) -> None:
    import resource

    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not look like an answer
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = make.partition(":")
    function: Callable[[bytes], bytes] = getattr(import_module(module), name)()
    sink.write(_HEADER.pack(0, 0))
    sink.flush()
    while header := source.read(_HEADER.size):
        data = source.read(_HEADER.unpack(header)[1])
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles SIGPROF, so it ends this process, in C code too
        try:
            failed, answer = 0, function(data)
        except Exception as error:  # whatever a parser makes of bad input is a reason
            failed, answer = 1, f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(_HEADER.pack(failed, len(answer)) + answer)
        sink.flush()
