"""The ledger survives kills, threads and full disks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lmworks.errors import UserError
from lmworks.watch import Ledger, read_ledger


def test_lines_come_back_in_order_with_their_time(tmp_path):
    begin = time.time() - 0.001
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("start", fingerprint="abc", step=0)
        ledger.write("bad_step", step=3, loss=float("nan"), path=tmp_path)
        lines = ledger.read()
    assert [line["event"] for line in lines] == ["start", "bad_step"]
    assert lines[1]["loss"] is None
    assert lines[1]["path"] == str(tmp_path)
    assert lines[0]["fingerprint"] == "abc"
    assert begin <= lines[0]["time"] <= lines[1]["time"] <= time.time() + 0.001
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.write("resume")
    assert [line["event"] for line in read_ledger(tmp_path / "ledger.jsonl")] == ["start", "bad_step", "resume"]


def test_each_line_is_synced_before_write_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for number in range(3):
            ledger.write("event", number=number)
            assert synced[-1] == os.path.getsize(tmp_path / "ledger.jsonl")
            assert len(synced) == number + 1


def test_threads_share_a_ledger(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        def write() -> None:
            for _ in range(20):
                ledger.write("e", pad="x" * 3000)

        threads = [threading.Thread(target=write) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ledger.read()) == 100


def test_a_killed_writer_loses_no_line_that_it_told_of(tmp_path):
    code = f"""
from lmworks.watch import Ledger
from pathlib import Path
ledger = Ledger(Path({str(tmp_path / "ledger.jsonl")!r}))
number = len(ledger.read())
while True:
    ledger.write("e", number=number, pad="x" * 20000)
    print(number, flush=True)
    number += 1
"""
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, encoding="utf-8")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        told = process.stdout.read().split()
        process.stdout.close()
        process.wait()
        numbers = [line["number"] for line in read_ledger(tmp_path / "ledger.jsonl")]
        assert numbers == list(range(len(numbers)))
        assert not told or numbers[-1] >= int(told[-1])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_full_disk_is_a_clear_error(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, ledger._fd)
    os.close(full)
    with pytest.raises(UserError, match="is full"):
        ledger.write("event")
    ledger.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_a_patient_ledger_waits_for_room(tmp_path):
    """Lines that wait are read with the others, in their order."""
    ledger = Ledger(tmp_path / "ledger.jsonl", patient=True)
    ledger.write("start")
    own = os.dup(ledger._fd)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, ledger._fd)
    os.close(full)
    ledger.write("phase", name="a")
    with pytest.raises(UserError, match="is full"):
        ledger.flush()
    assert [line["event"] for line in ledger.read()] == ["start", "phase"]
    os.dup2(own, ledger._fd)
    ledger.write("finish")
    ledger.close()
    assert [line["event"] for line in read_ledger(tmp_path / "ledger.jsonl")] == ["start", "phase", "finish"]
