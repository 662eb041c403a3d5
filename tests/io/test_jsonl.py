"""Append-only lines: torn tails, cutting, odd values."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from lmworks.errors import UserError
from lmworks.io import jsonl


def write(path: Path, records: list[dict]) -> None:
    fd = jsonl.open_append(path)
    for record in records:
        jsonl.append(fd, record)
    os.close(fd)


def test_a_line_torn_at_any_byte_is_left_out_and_mended(tmp_path):
    path = tmp_path / "x.jsonl"
    records = [{"n": n, "text": "ü" * n} for n in range(4)]
    write(path, records)
    data = path.read_bytes()
    ends = [position + 1 for position, byte in enumerate(data) if byte == 10]
    for length in range(len(data)):
        path.write_bytes(data[:length])
        whole = sum(end <= length for end in ends)
        assert jsonl.read(path) == records[:whole], "a reader leaves a torn line out"
        assert jsonl.last(path) == (records[whole - 1] if whole else {})
        write(path, [{"n": "next"}])
        assert jsonl.read(path) == [*records[:whole], {"n": "next"}]


def test_a_line_that_finds_no_room_leaves_nothing_behind(tmp_path):
    """The file may not grow in the middle of a line, as on a full disk, and then has room again for the same process."""
    fd, handler = jsonl.open_append(tmp_path / "x.jsonl"), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    jsonl.append(fd, {"n": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(fd).st_size + 10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            jsonl.append(fd, {"n": 2, "text": "x" * 50})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    jsonl.append(fd, {"n": 3})
    os.close(fd)
    assert jsonl.read(tmp_path / "x.jsonl") == [{"n": 1}, {"n": 3}]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path = tmp_path / "x.jsonl"
    write(path, [{"a": float("nan"), "b": [float("inf"), np.float32(1.5)], "c": {"d": np.int64(3)}, "e": (1, True), "f": Path("a/b")}])
    assert jsonl.read(path) == [{"a": None, "b": [None, 1.5], "c": {"d": 3}, "e": [1, True], "f": "a/b"}]


def test_a_broken_line_before_the_last_is_said_with_its_number(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    with pytest.raises(UserError, match="line 2 is not JSON; delete that line"):
        jsonl.read(path)


def test_the_tail_is_cut_without_reading_the_rest(tmp_path, monkeypatch):
    path = tmp_path / "x.jsonl"
    write(path, [{"step": step, "pad": "x" * 500} for step in range(5000)])
    fd, pread, read = os.open(path, os.O_RDWR), os.pread, [0]

    def counted(fd: int, size: int, offset: int) -> bytes:
        data = pread(fd, size, offset)
        read[0] += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    assert jsonl.cut_tail(fd, lambda record: record["step"] >= 4990) == 10
    os.close(fd)
    assert read[0] < path.stat().st_size / 2
    assert [record["step"] for record in jsonl.read(path)] == list(range(4990))


@pytest.mark.parametrize(("first", "left"), [(0, 0), (1, 1), (3, 3), (7, 3)])
def test_cutting_at_the_edges(tmp_path, first, left):
    path = tmp_path / "x.jsonl"
    write(path, [{"step": step} for step in range(3)])
    fd = jsonl.open_append(path)
    assert jsonl.cut_tail(fd, lambda record: record["step"] >= first) == 3 - left
    jsonl.append(fd, {"step": "new"})
    os.close(fd)
    assert len(jsonl.read(path)) == left + 1


def test_a_file_that_is_not_there_has_no_records(tmp_path):
    assert jsonl.read(tmp_path / "none.jsonl") == []
