"""A process that has collected some tests and runs those that are asked for, each time in a fork of itself and until one fails.

A mistake inside functions is planted there by another code object in each function, which whoever imported it calls, too. Any other mistake
needs a process of its own, which imports the changed sources.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import psutil
import pytest

from mutants.tracing import Traced, Tracing

_SUBREAPER = 36  # of prctl: processes whose parent has died become children of this one
_DEATH_SIGNAL = 1  # of prctl: sent to this process when its parent dies
_PATIENCE = 60.0  # seconds that a test waits for what must come
_WALL = 4.0  # times the processor seconds that a run may take, and a minute more: a test that waits for ever uses no processor


@dataclass(frozen=True)
class Outcome:
    """What the tests said. `test` is the first that failed; none if the tests could not be imported."""

    outcome: str  # passed, failed, timed out, not planted
    test: str
    why: str
    seconds: float = 0.0

    @property
    def found(self) -> bool:
        return self.outcome in ("failed", "timed out")


@contextmanager
def temporary_folder(prefix: str, inside: Path | None = None) -> Iterator[Path]:
    """A folder that this process removes; each fork that ends as usual removes a `tempfile.TemporaryDirectory`, too."""
    owner, path = os.getpid(), Path(tempfile.mkdtemp(prefix=prefix, dir=inside))
    try:
        yield path
    finally:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)


class Held:
    """The process of the tests in the files `tests` below `root`. Of the modules `traced` it tells which lines run.
    `keep_compiled` is whether what it imports is compiled for others, too."""

    def __init__(self, root: Path, tests: Sequence[str], traced: Sequence[str] = (), keep_compiled: bool = False) -> None:
        self._asked = root, tests, traced, keep_compiled
        self._start()

    def _start(self) -> None:
        root, tests, traced, keep_compiled = self._asked
        self._folder = Path(tempfile.mkdtemp(prefix="held-"))
        self._pipe, there = mp.Pipe()
        sys.stdout.flush()
        self._process = os.fork()
        if self._process == 0:
            self._pipe.close()
            _serve(root, self._folder, there, tests, traced, keep_compiled)
        there.close()
        self.tests: list[str] = []
        with suppress(EOFError):  # then the tests cannot be imported, which the first request tells
            self.tests = self._pipe.recv()  # all is imported: a change of the sources before that would stay in this process

    def run(self, tests: Mapping[str, float], changed: Mapping[str, tuple[str, str]] | None = None) -> Outcome:
        """Run these tests, in this order, until one fails or takes more than its seconds of a processor. `changed` names modules, with
        their contents before and after a mistake; the outcome is "not planted" if it is not inside functions."""
        began = time.monotonic()
        answer = self._ask("run", dict(tests), dict(changed or {}))
        if answer is None and self.tests:  # what had imported all does not end because of a mistake: those are in forks of it
            print(f"    the process of the tests has ended and is started again: {self._log()}", flush=True)
            self.close()
            self._start()
            if (answer := self._ask("run", dict(tests), dict(changed or {}))) is None:
                raise RuntimeError(f"the process of the tests ends whatever it is asked: {self._log()}")
        return Outcome(*(answer or ["failed", "", f"the tests cannot be imported: {self._log()}"]), round(time.monotonic() - began, 2))

    def trace(self) -> tuple[dict[str, list[int]], dict[str, Traced]]:
        """The lines that run before any test does, and what each test that passes runs."""
        answer = self._ask("trace")
        if answer is None:
            raise RuntimeError(f"the tests could not be run: {self._log()}")
        return answer[0], {name: Traced(**one) for name, one in answer[1].items()}

    def _ask(self, *what: Any) -> Any:
        """None if the process has ended."""
        try:
            self._pipe.send(what)
            return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return None

    def _log(self) -> str:
        return " ".join((self._folder / "log").read_text(encoding="utf-8", errors="replace")[-1500:].split())

    def close(self) -> None:
        self._pipe.close()
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGTERM)
        os.waitpid(self._process, 0)
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(root: Path, folder: Path, pipe: Connection, tests: Sequence[str], traced: Sequence[str], keep_compiled: bool) -> None:
    """The rest of the life of the forked process."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what runs below it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in what it starts in the background
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(root)
        own = {str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")}
        sys.path[:] = [str(root / "src"), str(root / "tests"), str(root), *(one for one in sys.path if one not in own)]
        for name, module in [*sys.modules.items()]:  # of the working tree's tests
            if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(str(Path(__file__).parents[1])):
                del sys.modules[name]
        with suppress(AttributeError):
            del sys.modules["__main__"].__file__  # processes that tests spawn would import it
        sys.dont_write_bytecode = not keep_compiled
        os.environ |= {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1", "LMWORKS_PATIENCE": str(_PATIENCE)}
        tracing = Tracing(root, folder, traced) if traced else None
        session = _Session(root, folder, pipe, tracing)
        plugins = [session, *([tracing] if tracing else [])]
        pytest.main(["-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0", f"--rootdir={root}", *tests], plugins=plugins)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        _end_children()
        os._exit(0)


class _Session:
    """A plugin of pytest: after the tests have been collected, answers requests instead of running them all."""

    def __init__(self, root: Path, folder: Path, pipe: Connection, tracing: Tracing | None) -> None:
        self.root, self.folder, self.pipe, self.tracing = root, folder, pipe, tracing
        self.failure: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: Any) -> None:
        if report.failed and not self.failure:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failure = [report.nodeid, " ".join((crash.message if crash else str(report.longrepr)[-300:]).split())[:200]]

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.dont_write_bytecode = True  # from here on, sources are changed and changed back
        self.items = {item.nodeid: item for item in session.items}
        gc.unfreeze()  # or the functions would not be found
        self.functions = [one for one in gc.get_objects() if type(one) is FunctionType and "/lmworks/" in one.__code__.co_filename]
        gc.freeze()
        with suppress(EOFError, BrokenPipeError):
            self.pipe.send([*self.items])
            while True:
                what, *arguments = self.pipe.recv()
                self.pipe.send(self._trace() if what == "trace" else self._run(*arguments))
        return True

    def _run(self, tests: Mapping[str, float], changed: Mapping[str, tuple[str, str]]) -> list[str]:
        if self.failure:
            return ["failed", *self.failure]
        planted = [one for name, texts in changed.items() for one in self._codes(name, *texts)]
        if bool(changed) != bool(planted):
            return ["not planted", "", ""]

        def play() -> list[str]:
            try:
                for function, code in planted:
                    function.__code__ = code
            except ValueError:  # it needs other variables of the functions around it
                return ["not planted", "", ""]
            if missing := [name for name in tests if name not in self.items]:
                return ["failed", missing[0], "it was not collected"]
            return ["failed", *self.failure] if self._play(tests) else ["passed", "", ""]

        return self._in_fork(play, sum(tests.values())) or ["failed", "", "the process of the tests died"]

    def _trace(self) -> Any:
        assert self.tracing is not None
        tracing, tests = self.tracing, [*self.items]

        def play() -> Any:
            for name in tests:
                self.failure = []
                with tracing.test(self.items[name]) as traced:
                    self._play({name: 0.0})
                    traced.passed = not self.failure
            return tracing.result()

        return self._in_fork(play, float("inf"))

    def _play(self, tests: Mapping[str, float]) -> list[str]:
        """Run tests until one fails. Each may use so many seconds of the processor, and a minute more if it waits; with 0, any number."""
        items = [self.items[name] for name in tests]
        for item, after in zip(items, [*items[1:], None], strict=True):
            seconds = tests[item.nodeid]
            for number, clock, limit in ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, 60 + seconds)):
                signal.signal(number, functools.partial(self._late, item.nodeid))
                signal.setitimer(clock, limit if seconds else 0)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failure:
                break
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return self.failure

    def _late(self, test: str, *_: Any) -> None:
        self.result.write_text(json.dumps(["timed out", test, ""]), encoding="utf-8")
        os._exit(0)

    def _in_fork(self, play: Callable[[], Any], seconds: float) -> Any:
        """None if the process ends without a result."""
        with temporary_folder("fork-", self.folder) as folder:
            self.result = result = folder / "result.json"
            child = os.fork()
            if child == 0:
                try:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.setpgid(0, 0)
                    os.environ["TMPDIR"] = str(folder)
                    tempfile.tempdir = None
                    result.write_text(json.dumps(play()), encoding="utf-8")
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                finally:
                    os._exit(0)
            try:
                if (late := _wait(psutil.Process(child), seconds)) is not None:
                    return ["timed out", "", late]
                return json.loads(result.read_text(encoding="utf-8")) if result.exists() else None
            finally:
                _end_children()

    def _codes(self, name: str, before: str, after: str) -> list[tuple[FunctionType, CodeType]]:
        """The functions of a module whose code a change is in, with their code after it; none if it is not in functions alone."""
        path = str(self.root / name)
        old, new = ([*_code_objects(compile(text, path, "exec", dont_inherit=True))] for text in (before, after))
        if [one.co_qualname for one in old] != [one.co_qualname for one in new]:
            return []
        pairs = [*zip(old, new, strict=True)]
        live = {one.__code__ for one in self.functions if one.__code__.co_filename == path}
        of_calls = {part for code in live for part in _code_objects(code)}
        if any(_content(one) != _content(other) for one, other in pairs if one not in of_calls):
            return []  # in what runs when the module is imported
        changed = {one: other for one, other in pairs if [*map(_content, _code_objects(one))] != [*map(_content, _code_objects(other))]}
        return [(one, changed[one.__code__]) for one in self.functions if one.__code__.co_filename == path and one.__code__ in changed]


def _code_objects(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _code_objects(one)


def _content(code: CodeType) -> list[Any]:
    """What a code object does, without the lines that it is in and the code objects in it."""
    constants = [repr(one) for one in code.co_consts if not isinstance(one, CodeType)]
    names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    return [code.co_code, code.co_exceptiontable, code.co_flags, code.co_argcount, code.co_kwonlyargcount, *names, *constants]


def _wait(process: psutil.Process, seconds: float) -> str | None:
    """Wait until a process ends. Otherwise why it should be ended."""
    began = time.monotonic()
    while True:
        with suppress(psutil.TimeoutExpired):
            process.wait(timeout=0.5)
            return None
        if (spent := processor_seconds()) > seconds:
            return f"{spent:.0f} s of a processor"
        if (spent := time.monotonic() - began) > _WALL * seconds + 60:
            return f"no answer in {spent:.0f} s"


def processor_seconds() -> float:
    """What the processes below this one have spent."""
    spent = 0.0
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            spent += sum(one.cpu_times()[:4])
    return spent


def _end_children() -> None:
    """Whatever tests have started, or left over."""
    for _ in range(100):
        children = psutil.Process().children(recursive=True)
        for process in children:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        if not children:
            return
        time.sleep(0.02)
