"""A function in a process with limits: what it returns, raises, and does not survive."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied
from patience import PATIENCE

_FUNCTION = """
import os, time

def make():
    def call(data):
        exec(data.decode())
        return str(os.getpid()).encode()
    return call
"""


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LimitedProcess]]:
    (tmp_path / "limited_function.py").write_text(_FUNCTION)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))  # none empty: the directory
    made: list[LimitedProcess] = []

    def make(seconds: float = PATIENCE, memory: int = 1 << 30, name: str = "make") -> LimitedProcess:
        made.append(LimitedProcess(f"limited_function:{name}", seconds, memory, wall_seconds=PATIENCE))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_one_process_answers_until_it_ends(called: Callable[..., LimitedProcess]) -> None:
    limited = called()
    first = limited(b"pass")
    assert limited(b"print('not an answer')") == first and int(first) != os.getpid()
    with pytest.raises(CallFailed, match="ValueError: this"):
        limited(b"raise ValueError('this')")
    with pytest.raises(CallFailed, match="MemoryError"):
        limited(b"bytes(2 << 30)")
    assert limited(b"pass") == first
    with pytest.raises(ProcessDied) as ended:
        limited(b"os._exit(0)")
    assert not ended.value.hangs
    assert limited(b"pass") != first


def test_a_fork_of_the_process_does_not_answer_and_nothing_reads_the_calls(called: Callable[..., LimitedProcess]) -> None:
    """An answer of the child would be taken for that of the next call, as the reward of another reply."""
    limited = called()
    first = limited(b"os.fork(), time.sleep(0.05)")
    assert limited(b"import sys; assert sys.stdin.read() == ''") == first
    with pytest.raises(CallFailed, match="ValueError: third"):
        limited(b"raise ValueError('third')")


def test_a_call_that_takes_too_much_time_ends_its_process(called: Callable[..., LimitedProcess]) -> None:
    limited, began = called(seconds=0.2), time.monotonic()
    with pytest.raises(ProcessDied) as ended:
        limited(b"while True: pass")
    assert ended.value.hangs and time.monotonic() - began < PATIENCE, "by the kernel, not by the wall time"
    limited(b"time.sleep(0.3)")  # only processor time counts


@pytest.mark.parametrize("escape", ["", "os.setsid(); "], ids=["same session", "own session"])
@pytest.mark.parametrize("ending", ["os._exit(0)", "while True: pass"])
def test_what_the_process_starts_ends_with_it(called: Callable[..., LimitedProcess], tmp_path: Path, escape: str, ending: str) -> None:
    """A descendant that holds the pipe of the answers does not delay the end, and does not survive it."""
    limited = called(seconds=0.2)
    pid = tmp_path / "pid"
    fork = f"if os.fork() == 0: {escape}open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep({PATIENCE})"
    wait = f"while not os.path.exists({str(pid)!r}) or not open({str(pid)!r}).read(): time.sleep(0.01)"
    began = time.monotonic()
    with pytest.raises(ProcessDied):
        limited(f"{fork}\n{wait}\n{ending}".encode())
    assert time.monotonic() - began < PATIENCE / 2
    descendant = Path("/proc") / pid.read_text()
    while descendant.exists() and descendant.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - began < PATIENCE, "it lives on"
        time.sleep(0.01)


def test_an_answer_is_as_large_as_the_call_allows(called: Callable[..., LimitedProcess]) -> None:
    limited = called(memory=1 << 30)
    assert limited(b"pass", most=100)
    with pytest.raises(CallFailed, match=r"the answer has .* bytes, and at most 1 are read"):
        limited(b"pass", most=1)
    assert limited(b"pass"), "a new process"


def test_what_does_not_start_says_so(called: Callable[..., LimitedProcess]) -> None:
    with pytest.raises(OSError, match="the process of limited_function:nothing does not start"):
        called(name="nothing")(b"pass")


def test_files_in_the_directory_are_no_modules(
    called: Callable[..., LimitedProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("json", "struct", "signal", "resource"):
        (tmp_path / "data" / f"{name}.py").write_text("raise SystemExit('untrusted')")
    monkeypatch.chdir(tmp_path / "data")
    assert called()(b"import resource")


def test_threads_take_turns(called: Callable[..., LimitedProcess]) -> None:
    limited, found = called(), set()
    threads = [threading.Thread(target=lambda: found.add(limited(b"time.sleep(0.01)"))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
