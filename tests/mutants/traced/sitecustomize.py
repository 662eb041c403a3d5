"""Writes which lines of some files run, in this process and in every interpreter that it starts with this folder in PYTHONPATH.

The folder in `LMWORKS_TRACED` contains `files`, their names; `now`, the number of what runs, which one process sets for all; and `lines`,
to which every process appends "NUMBER FILE LINE" when it runs a line for the first time under a number.
"""

import mmap
import os
import sys
import threading
from types import FrameType
from typing import Any


class Tracer:
    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, "files"), encoding="utf-8") as file:
            self.files = {name: number for number, name in enumerate(file.read().split("\n"))}
        self.now = mmap.mmap(os.open(os.path.join(folder, "now"), os.O_RDWR), 4)
        self.to = os.open(os.path.join(folder, "lines"), os.O_WRONLY | os.O_APPEND)
        self.seen: set[tuple[bytes, str, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename in self.files else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        one = (self.now[:4], frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and one not in self.seen:
            try:
                os.write(self.to, f"{int.from_bytes(one[0], 'little')} {self.files[one[1]]} {one[2]}\n".encode())
            except OSError:  # a test that limits the size of files: raised here, it would end the tracing of this thread for all tests
                return self.line
            self.seen.add(one)
        return self.line


tracer = Tracer(os.environ["LMWORKS_TRACED"]) if "LMWORKS_TRACED" in os.environ else None
if tracer is not None:
    threading.settrace(tracer)
    sys.settrace(tracer)
