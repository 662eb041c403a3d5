"""Machine code that `torch.compile` keeps for later processes (`TORCHINDUCTOR_CACHE_DIR`).

The C++ compiler writes a library under its final name. If the process, the machine or the disk gives out while it does, a part of a library
is left, and every later process that needs it ends: with "file too short" if it is empty, by SIGBUS if it has its header.
"""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from pathlib import Path

_WRITTEN = 600.0  # seconds since its last change after which no compiler still writes a file
_HEADER = 64  # bytes of an ELF header of 64 bits


def remove_partial_libraries(folder: Path) -> list[Path]:
    """Remove libraries that were written in part, so that they are compiled again; returns them."""
    found = []
    for path in folder.glob("*/*.so"):
        with suppress(OSError):  # another process has removed it, or may and this one may not
            about = path.stat()
            if time.time() - about.st_mtime > _WRITTEN and _is_partial(path, about.st_size):
                path.unlink()
                found.append(path)
    return found


def _is_partial(path: Path, size: int) -> bool:
    """Whether a file is empty, or an ELF file of 64 bits that ends before its last part, the table of sections."""
    if size == 0:
        return True
    with path.open("rb") as file:
        header = file.read(_HEADER)
    if header[:5] != b"\x7fELF\x02":
        return False
    if len(header) < _HEADER:
        return True
    (table,), (entry, entries) = struct.unpack_from("<Q", header, 0x28), struct.unpack_from("<HH", header, 0x3A)
    return bool(table + entry * entries > size)
