"""Calls a function in a separate process with limits, because hostile input makes parsers hang, crash or exhaust memory.

The limit of a call is CPU time, so it does not depend on how busy the machine is. When it is reached, the kernel ends the process, and the
next call starts a new one. The process ends when its input is closed. It imports little, so that it starts quickly.

What the process has started ends with it: all of its session, and what has left the session but kept its environment. An answer ends with
the process too, though a descendant may still hold its pipe, and its size is limited before a byte of it is read.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

_REQUEST = struct.Struct("<dQ")  # seconds of CPU time, bytes that follow
_HEADER = struct.Struct("<BQ")  # whether it failed, bytes that follow
_LOOK = 200  # milliseconds between looks at whether the process is still there
_BLOCK = 1 << 20
_MARK = "LMWORKS_LIMITED_PROCESS"  # in the environment of the process and of all that it starts


class CallFailed(Exception):
    """The function raised an exception; the message has its type and text."""


class ProcessDied(Exception):
    """The process died before it answered; `hangs` is true if it reached its time limit. The text says how, after "it": takes too much
    time, ended its process, crashed. An allocation beyond the limit is a MemoryError, or a crash of code that does not check for it."""

    def __init__(self, hangs: bool, code: int) -> None:
        super().__init__("takes too much time" if hangs else _how(code))
        self.hangs = hangs


def _how(code: int) -> str:
    if code >= 0:
        return f"ended its own process with exit code {code}, as os._exit does"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"was killed ({name}), as the kernel does when memory runs out"
    return f"crashed ({name}): a fault of compiled code, or too much memory"


class LimitedProcess:
    """Calls a function from bytes to bytes in a process. `make`, as MODULE:NAME, returns the function; the first call starts the process.

    A call may take `seconds` of CPU time, and the process `memory` bytes of address space; with `wall_seconds` a call that waits for
    something else ends too. An answer has at most `memory` bytes, or `most` of a call. Calls from several threads are serialized.
    """

    def __init__(self, make: str, seconds: float, memory: int, wall_seconds: float | None = None) -> None:
        self._make, self._seconds, self._memory, self._wall_seconds = make, seconds, memory, wall_seconds
        self._late = False
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._lock, self._owner = threading.Lock(), 0

    def __call__(self, data: bytes, times: int = 1, most: int | None = None) -> bytes:
        """Call the function, which may take so many times the limits of time, and answer at most `most` bytes. Raises `CallFailed` and
        `ProcessDied`, and `OSError` if the process does not start."""
        with self._lock:
            try:
                if self._process is None or self._owner != os.getpid():
                    self._start()
                failed, answer = self._ask_in_time(data, times, self._memory if most is None else most)
            except (BrokenPipeError, EOFError):
                assert self._process is not None
                self._end()
                code, self._process = self._process.returncode, None
                raise ProcessDied(self._late or code == -signal.SIGPROF, code) from None
            except BaseException:  # a late answer must not be taken as the answer to the next call
                self.close()
                raise
        if failed:
            raise CallFailed(answer.decode("utf-8", "replace"))
        return answer

    def close(self) -> None:
        """End the process. Another call starts a new one."""
        self._end()
        self._process = None

    def _start(self) -> None:
        code = "from lmworks.untrusted.limited_process import serve; serve()"
        command = [sys.executable, "-P", "-c", code, self._make, str(self._memory)]
        mark = f"{_MARK}={secrets.token_hex(16)}"
        settings = {**os.environ, "PYTHONHASHSEED": "0", _MARK: mark.partition("=")[2]}  # the order of sets must not depend on the process
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=null, env=settings, bufsize=0, start_new_session=True)
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, self._owner, mark)
        try:
            self._answer(self._memory)
        except EOFError:
            self.close()
            raise OSError(f"the process of {self._make} does not start") from None

    def _ask_in_time(self, data: bytes, times: int, most: int) -> tuple[int, bytes]:
        """Ask, and kill the process once the wall time is over."""
        assert self._process is not None
        self._late, process = False, self._process

        def end() -> None:
            self._late = True
            process.kill()

        timer = None if self._wall_seconds is None else threading.Timer(self._wall_seconds * times, end)
        if timer is None:
            return self._ask(data, times, most)
        timer.daemon = True
        timer.start()
        try:
            return self._ask(data, times, most)
        finally:
            timer.cancel()

    def _ask(self, data: bytes, times: int, most: int) -> tuple[int, bytes]:
        assert self._process and self._process.stdin
        request = memoryview(_REQUEST.pack(self._seconds * times, len(data)) + data)
        while request:
            request = request[self._process.stdin.write(request) :]
        return self._answer(most)

    def _answer(self, most: int) -> tuple[int, bytes]:
        assert self._process
        failed, size = _HEADER.unpack(_exactly(self._process, _HEADER.size))
        if size > most:
            self.close()
            raise CallFailed(f"the answer has {size:,} bytes, and at most {most:,} are read")
        return failed, _exactly(self._process, size)


def _end(process: subprocess.Popen[bytes], owner: int, mark: str) -> None:
    """Kill the process and all that it has started."""
    if owner != os.getpid():
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    wanted = mark.encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of others, or gone
            if wanted in place.read_bytes().split(b"\0"):
                os.kill(int(place.parent.name), signal.SIGKILL)


def _exactly(process: subprocess.Popen[bytes], size: int) -> bytes:
    """So many bytes from the process. Raises `EOFError` if it ends before, whoever else holds the pipe."""
    assert process.stdout is not None
    data, poll = bytearray(), select.poll()
    poll.register(process.stdout, select.POLLIN)
    while len(data) < size:
        if not poll.poll(_LOOK):
            if process.poll() is not None:
                raise EOFError
            continue
        some = os.read(process.stdout.fileno(), min(size - len(data), _BLOCK))
        if not some:
            raise EOFError
        data += some
    return bytes(data)


def serve() -> None:
    """Main function of the process: answer calls until the input is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    try:
        _answer_calls(sys.argv[1], int(sys.argv[2]))
    except BrokenPipeError:
        os._exit(1)


def _answer_calls(make: str, memory: int) -> None:
    import resource

    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what a library reads must not be a call
    os.dup2(2, 1)  # what it prints must not look like an answer
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process = os.getpid()
    module, _, name = make.partition(":")
    function: Callable[[bytes], bytes] = getattr(import_module(module), name)()
    sink.write(_HEADER.pack(0, 0))
    sink.flush()
    while header := source.read(_REQUEST.size):
        seconds, size = _REQUEST.unpack(header)
        data = source.read(size)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF is not handled, so it ends this process even inside C code
        try:
            failed, answer = 0, function(data)
        except (Exception, SystemExit) as error:  # parsers raise anything on bad input
            failed, answer = 1, f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        if os.getpid() != process:  # the function has forked: its child must not answer too
            os._exit(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(_HEADER.pack(failed, len(answer)) + answer)
        sink.flush()
