"""Chat templates as programs: compiled and run here for those that lmworks ships, in a process with limits for all others.

Run as a script it is that process. It imports the standard library and jinja2 only.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import datetime
from typing import Any

SECONDS, MEMORY = 10.0, 1 << 30  # of processor time for one conversation; of address space
Render = Callable[..., str]


class Refused(Exception):
    """Why a template is none, or made nothing of a conversation."""


def compiled(source: str) -> Render:
    """A template as a function of its variables, which raises `Refused`. Nothing but jinja2's sandbox keeps it in bounds."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    template = _told(environment.from_string, source)
    return lambda **variables: _told(template.render, **variables)


def _told(call: Callable[..., Any], *arguments: Any, **variables: Any) -> Any:
    try:
        return call(*arguments, **variables)
    except Exception as error:  # a program of any origin may raise anything
        raise Refused(" ".join(str(error).split()) or type(error).__name__) from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Apart:
    """A template in a process of its own, which ends when it takes too much time or memory, or when this one ends.

    Called as what `compiled` gives. Threads take turns; after a fork, and after it has ended, the process is started again.
    """

    def __init__(self, source: str) -> None:
        self._source, self._lock, self._owner = source, threading.Lock(), 0
        with self._lock:
            self._begin()

    def __call__(self, **variables: Any) -> str:
        with self._lock:
            if self._owner != os.getpid() or self._process.poll() is not None:
                self._begin()
            return self._ask(variables)

    def _begin(self) -> None:
        command = [sys.executable, "-P", __file__, str(SECONDS), str(MEMORY)]
        self._process, self._owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE), os.getpid()
        weakref.finalize(self, _end, self._process, self._owner)
        self._ask(self._source)

    def _ask(self, what: Any) -> str:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            self._process.wait()
            raise Refused(f"it takes more than {SECONDS:g} s or {MEMORY >> 20} MB")
        said: dict[str, str] = json.loads(answer)
        if "refused" in said:
            raise Refused(said["refused"])
        return said["text"]


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
    if owner == os.getpid():
        process.kill()
        process.wait()


def _serve(seconds: float, memory: int) -> None:
    """A template comes first, then the variables of each conversation."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import jinja2.ext  # noqa: F401  before there is a limit
    import jinja2.sandbox  # noqa: F401

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    render: Render | None = None
    for line in source:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles SIGPROF, so it ends this process, in C code too
        try:
            what = json.loads(line)
            if render is None:
                render, text = compiled(what), ""
            else:
                text = render(**what)
            answer = json.dumps({"text": text})
        except Exception as reason:  # also of memory, when the text is too long to be said
            answer = json.dumps({"refused": str(reason) or type(reason).__name__})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(answer.encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    _serve(float(sys.argv[1]), int(sys.argv[2]))
