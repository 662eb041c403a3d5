"""Runs tests against changed sources, in a private copy of the working tree and in a fork of a process that has imported torch already."""

from __future__ import annotations

import compileall
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

PRELOADED = ("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "transformers", "hypothesis",
             "pydantic", "typer", "rich.console", "tokenizers", "pyarrow", "scipy.stats", "sympy", "httpx")  # fmt: skip
_SUBREAPER = 36  # of prctl: processes whose parent has died become children of this one


@dataclass(frozen=True)
class Outcome:
    """What the tests said. `test` is the first that failed, or the file that could not be imported."""

    outcome: str  # passed, failed, timed out
    test: str
    why: str
    seconds: float


class Workspace:
    """A copy of the files of the working tree, without those that git ignores."""

    def __init__(self, root: Path, to: Path) -> None:
        self.path = to
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, check=True
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (to / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, to / name)
        for folder in ("src", "tests"):
            compileall.compile_dir(to / folder, quiet=2)
        for name in PRELOADED:
            import_module(name)
        assert "lmworks" not in sys.modules, "a fork would have the sources without the mistake"
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)

    @contextmanager
    def changed(self, files: Mapping[str, str]) -> Iterator[None]:
        """Within the block, files of the copy, named from its root, have other contents."""
        before = {name: ((self.path / name).read_bytes(), (self.path / name).stat()) for name in files}
        try:
            for name, text in files.items():
                (self.path / name).write_text(text, encoding="utf-8")
                later = before[name][1].st_mtime + 1000  # compiled modules are recognized by size and second
                os.utime(self.path / name, (later, later))
            yield
        finally:
            for name, (content, about) in before.items():
                (self.path / name).write_bytes(content)
                os.utime(self.path / name, ns=(about.st_atime_ns, about.st_mtime_ns))

    def run(self, tests: Sequence[str], seconds: float) -> Outcome:
        """Run fast tests until one fails."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            result = Path(folder) / "result.json"
            child = os.fork()
            if child == 0:
                _in_child(self.path, Path(folder), result, tests, seconds / 4)
            process = psutil.Process(child)
            try:
                process.wait(timeout=seconds)
                died = ["failed", tests[0], "the process of the tests died"]
                done = json.loads(result.read_text(encoding="utf-8")) if result.exists() else died
            except psutil.TimeoutExpired:
                done = ["timed out", "", f"no answer in {seconds:.0f} s"]
            finally:
                _end_children()
        if done[0] == "not run":
            raise RuntimeError(f"the tests could not be run: {done[2]}")
        return Outcome(*done, round(time.monotonic() - began, 1))


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


class _FirstFailure:
    def __init__(self) -> None:
        self.test, self.why = "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: Any) -> None:
        if report.failed and not self.test:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.test = report.nodeid
            self.why = " ".join((crash.message if crash else str(report.longrepr)[-300:]).split())[:200]


def _in_child(root: Path, folder: Path, result: Path, tests: Sequence[str], patience: float) -> None:
    """The rest of the life of a forked process. The tests of the copy, with the packages that are imported already. `patience` is how long
    a test waits for what must come."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in what it starts in the background
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(root)
        own = {str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")}
        sys.path[:] = [str(root / "src"), str(root / "tests"), str(root), *(one for one in sys.path if one not in own)]
        for name, module in [*sys.modules.items()]:  # of the working tree's tests
            if name != "__main__" and (getattr(module, "__file__", None) or "").startswith(str(Path(__file__).parents[1])):
                del sys.modules[name]
        del sys.modules["__main__"].__file__  # processes that tests spawn would import it
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder)}
        os.environ["LMWORKS_PATIENCE"] = str(patience)
        tempfile.tempdir = None
        watch = _FirstFailure()
        hangs = f"--timeout={2 * patience}"  # a test that a mistake makes wait for ever has found it
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", hangs, f"--rootdir={root}", *tests], plugins=[watch])
        ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        said = "failed" if watch.test else "passed" if code in ended else "not run"
        said_all = (folder / "log").read_text(encoding="utf-8", errors="replace")
        why = f"{code!r}: {said_all[-2000:]}" if said == "not run" else watch.why
        result.write_text(json.dumps([said, watch.test, why]), encoding="utf-8")
    except BaseException:
        result.write_text(json.dumps(["not run", "", traceback.format_exc()]), encoding="utf-8")
    finally:
        os._exit(0)
