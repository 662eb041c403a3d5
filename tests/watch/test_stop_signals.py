"""The first signal asks, a second Ctrl-C insists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lmworks.watch import graceful_stop
from lmworks.watch.stop_signals import Stop
from patience import PATIENCE

_RUN = """
import signal, sys, time
from lmworks.watch import graceful_stop
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which has all below it ignore the signal
with graceful_stop() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print(stop.message(12, "lmworks run r.yaml"), flush=True)
    sys.stdin.read()  # the save, which takes as long as the test wants
"""


def start() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _RUN], stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_the_first_signal_lets_the_run_end_well(number):
    process = start()
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert out == f"stopped by {number.name} and saved at step 12; resume with: lmworks run r.yaml\n"
    more = "; press Ctrl-C again to stop at once, without saving" if number == signal.SIGINT else ""
    assert err == f"\nstopping after this step{more}\n"


def test_the_second_ctrl_c_ends_it_at_once():
    process = start()
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert "stopped by" in process.stdout.readline()
    time.sleep(1.1)  # within a second it counts as the same
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("numbers", "apart"), [((signal.SIGINT, signal.SIGINT), 0.05), ((signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM), 1.1)]
)
def test_one_request_that_comes_twice_does_not_cut_the_save_short(numbers, apart):
    """A launcher and a terminal both pass Ctrl-C on; Slurm warns with SIGUSR1 and ends with SIGTERM, and torchrun passes that on."""
    process = start()
    assert process.stdout is not None
    for number in numbers:
        process.send_signal(number)
        time.sleep(apart)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


@pytest.mark.parametrize(("number", "preempted"), [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGUSR1, True)])
def test_who_asked(number, preempted):
    with graceful_stop() as stop:
        assert not stop.preempted
        os.kill(os.getpid(), number)
        assert stop.preempted is preempted


def test_the_meaning_of_signals_comes_back_after_the_block():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with graceful_stop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert stop.signal is signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with graceful_stop() as again:
        assert not again.requested


def test_outside_the_main_thread_it_does_nothing():
    seen = []

    def run() -> None:
        with graceful_stop() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [False]


def test_the_line_of_a_stopped_run_names_a_checkpoint_only_if_there_is_one() -> None:
    assert Stop().message(12, "lmworks run r.yaml") == "stopped by request and saved at step 12; resume with: lmworks run r.yaml"
    for step in (0, -1):
        assert Stop().message(step, "lmworks run r.yaml") == "stopped by request; nothing was saved; resume with: lmworks run r.yaml"


_ON_A_TERMINAL = """
import fcntl, signal, sys, termios, time
from pathlib import Path
from lmworks.ui.terminal import bar, console
from lmworks.watch import graceful_stop
ignored, folder = sys.argv[1] == "ignored", Path(sys.argv[2])
signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
with graceful_stop() as stop, bar("training") as shown:
    (folder / "ready").touch()
    while not stop.requested and not (folder / "closed").exists():
        time.sleep(0.01)
    shown.advance()
    console.print("saving")
print("saving", flush=True)
(folder / "saved").write_text(stop.signal.name if stop.signal else "")
"""


@pytest.mark.parametrize(("hangup", "by"), [("default", "SIGHUP"), ("ignored", "")])
def test_a_run_whose_terminal_is_closed_saves(tmp_path, hangup, by):
    """Nothing can be printed from then on. Under nohup it is not even asked to stop."""
    leader, terminal = os.openpty()
    command = [sys.executable, "-c", _ON_A_TERMINAL, hangup, str(tmp_path)]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.close(leader)
    if hangup == "ignored":
        (tmp_path / "closed").touch()
    process.wait(PATIENCE)
    assert (tmp_path / "saved").read_text() == by
