"""Copies of finished checkpoints on other storage, made in the background and verified there (SPEC CKP3)."""

from __future__ import annotations

import hashlib
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lmworks.checkpoint import manifest
from lmworks.checkpoint.priority import yield_to_training
from lmworks.errors import UserError
from lmworks.files import sync_directory

_BLOCK = 1 << 22


class Mirror:
    """Copies checkpoints one after the other in a thread. A failed copy is reported and tried again with the next one and at the
    end; it never stops the run, whose own checkpoints are whole."""

    def __init__(self, target: str, report: Callable[..., None]) -> None:
        self.target, self.report = target, report
        self.failed: dict[Path, str] = {}
        self._queue: queue.Queue[Path | None] = queue.Queue()
        self._waiting: set[Path] = set()
        self._thread: threading.Thread | None = None
        if "://" in target:
            _filesystem(target)

    def add(self, path: Path) -> None:
        """Copy `path`, and what failed before, when its turn comes; until then `protected` names it."""
        for one in (*list(self.failed), path):
            self.failed.pop(one, None)
            if one.exists() and one not in self._waiting:
                self._waiting.add(one)
                self._queue.put(one)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
            self._thread.start()

    def protected(self) -> set[Path]:
        """What must not be pruned yet."""
        return set(self._waiting)

    def close(self) -> None:
        """Wait for the copies, and try once more what failed."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        for path in list(self.failed):
            if path.exists():
                self._copy(path)

    def _run(self) -> None:
        yield_to_training()
        while (path := self._queue.get()) is not None:
            self._copy(path)
            self._waiting.discard(path)

    def _copy(self, path: Path) -> None:
        begin = time.monotonic()
        try:
            where = copy_checkpoint(path, self.target)
        except Exception as error:
            self.failed[path] = str(error)
            self.report("checkpoint_copy_failed", path=str(path), to=self.target, reason=str(error))
        else:
            self.failed.pop(path, None)
            self.report("checkpoint_copied", path=str(path), to=where, seconds=round(time.monotonic() - begin, 3))


def copy_checkpoint(source: Path, target: str) -> str:
    """Copy a checkpoint below `target` (a directory or an fsspec URL), the manifest last, and verify it there; returns where it is.

    A copy that is already there and whole is left alone. Raises OSError if the copy differs.
    """
    files = manifest.entries(source)
    return _copy_to_url(source, target, files) if "://" in target else _copy_to_directory(source, Path(target), files)


def _copy_to_directory(source: Path, target: Path, files: dict[str, manifest.Entry]) -> str:
    final, aside = target / source.name, target / f".{source.name}.part"
    if final.exists() and manifest.problem(final) is None and manifest.entries(final) == files:
        return str(final)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        copy_files(source, aside, (*files, manifest.NAME))
        sync_directory(aside)
        if (reason := manifest.problem(aside)) is not None:
            raise OSError(f"the copy of {source} in {target} is bad: {reason}")
        if final.exists():
            shutil.rmtree(final)
        os.replace(aside, final)
        sync_directory(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return str(final)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files between directories, synced. What arrived is for the caller to compare; nothing of it is left in memory, so that
    comparing asks the disk."""
    for name in names:
        with open(source / name, "rb") as reader, open(target / name, "xb") as writer:
            shutil.copyfileobj(reader, writer, _BLOCK)
            writer.flush()
            os.fsync(writer.fileno())
            os.posix_fadvise(writer.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copy_to_url(source: Path, target: str, files: dict[str, manifest.Entry]) -> str:
    filesystem, root = _filesystem(target)
    final = f"{root.rstrip('/')}/{source.name}"
    filesystem.makedirs(final, exist_ok=True)
    # An object store has no rename of directories: without its manifest the copy does not count, so that goes first and comes last.
    if filesystem.exists(f"{final}/{manifest.NAME}"):
        filesystem.rm_file(f"{final}/{manifest.NAME}")
    for name, entry in files.items():
        filesystem.put_file(str(source / name), f"{final}/{name}")
        hasher = hashlib.sha256()
        with filesystem.open(f"{final}/{name}", "rb") as handle:
            while block := handle.read(_BLOCK):
                hasher.update(block)
        if hasher.hexdigest() != entry.sha256:
            raise OSError(f"{target}: the copy of {name} differs from {source / name}")
    filesystem.put_file(str(source / manifest.NAME), f"{final}/{manifest.NAME}")
    return f"{target.rstrip('/')}/{source.name}"


def _filesystem(target: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise UserError("checkpoints.copy_to with a URL needs fsspec: pip install 'lmworks[data]'") from None
    try:
        filesystem, root = fsspec.core.url_to_fs(target)
    except (ValueError, ImportError) as error:
        raise UserError(f"checkpoints.copy_to: cannot use {target} ({error})") from None
    return filesystem, str(root)
