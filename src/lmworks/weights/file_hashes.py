"""SHA-256 of files, remembered as long as a file stays the same.

A hash is remembered with device, inode, size and both times of the file. The time of the last change of an inode cannot be set by
programs, so that a file which was written to and given its old time is read again. What a disk loses by itself changes no time: remove the
folder of remembered hashes to read everything again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmworks import machine
from lmworks.files import write_text
from lmworks.progress import bar

_WORTH = 64 << 20  # bytes: what takes less to read than some hundredths of a second is read again
_SETTLED = 1.0  # seconds: a file that changed later could change once more within the resolution of its times
_BLOCK = 1 << 22


def hash_files(paths: Iterable[Path]) -> dict[Path, str]:
    """Hex SHA-256 of each file. Files that were hashed before and are unchanged since are not read; the others show progress.

    Raises `OSError` for a file that cannot be read.
    """
    found, unknown = {}, []
    for path in paths:
        known = _remembered(path)
        if known is None:
            unknown.append(path)
        else:
            found[path] = known
    total = sum(path.stat().st_size for path in unknown)
    with bar("verify files (MB)", total / 1e6) as progress, ThreadPoolExecutor(machine.threads()) as pool:  # hashing releases the lock

        def work(path: Path) -> str:
            digest, before, block = hashlib.sha256(), _identity(path), memoryview(bytearray(_BLOCK))
            with open(path, "rb", buffering=0) as handle:
                while count := handle.readinto(block):
                    digest.update(block[:count])
                    progress.advance(count / 1e6)
            _remember(path, before, digest.hexdigest())
            return digest.hexdigest()

        found |= dict(zip(unknown, pool.map(work, unknown), strict=True))
    return found


def directory() -> Path:
    """The folder of remembered hashes: $LMWORKS_CACHE/hashes, otherwise ~/.cache/lmworks/hashes."""
    base = os.environ.get("LMWORKS_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "lmworks") / "hashes"


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _place(path: Path) -> Path:
    return directory() / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32] + ".json")


def _remembered(path: Path) -> str | None:
    try:
        known = json.loads(_place(path).read_text(encoding="utf-8"))
        return str(known["sha256"]) if known["identity"] == _identity(path) else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # none, damaged, or no home
        return None


def _remember(path: Path, before: list[int], digest: str) -> None:
    """Without effect if the file has changed while it was read or just before, or if there is no place for it."""
    try:
        if before[2] >= _WORTH and _identity(path) == before and time.time_ns() - max(before[3:]) > _SETTLED * 1e9:
            write_text(_place(path), json.dumps({"identity": before, "sha256": digest}))
    except Exception:  # remembering saves time and nothing else
        return
