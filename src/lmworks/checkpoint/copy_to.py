"""Copies of checkpoints in other storage (`checkpoints.copy_to`), made in the background and verified there.

Threads that hash and write checkpoints yield to training: they have a lower priority.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import Communicator
from lmworks.checkpoint.publish import do_nothing, publish
from lmworks.checkpoint.run_bundle import BUNDLE, RunFiles, no_run_files, pack
from lmworks.io.files import atomic_path, sync_directory
from lmworks.io.store import Store
from lmworks.io.urls import require_writable

_NICE = 10  # a tenth of the weight of training where they compete; at 19 a busy machine would never finish a save


def yield_to_training() -> None:
    """Lower the priority of the calling thread and of those that it will start. Linux gives each thread its own."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(_NICE, os.getpriority(os.PRIO_PROCESS, own)))


_BLOCK = 1 << 22
_WHAT = "checkpoints.copy_to"


class BackgroundCopier:
    """Copies checkpoints one after the other in a thread. A failed copy is reported, and retried with the next copy and at the end. It
    never stops the run, whose own checkpoints are complete.

    communicator: the ranks that copy together, each the files that it has; all call `add` and `close` alike. run_files: files of the run
    that go with each copy.
    Raises `UserError` for a URL that cannot be written.
    """

    def __init__(
        self, target: str, report: Callable[..., None], communicator: Communicator | None = None, run_files: RunFiles = no_run_files
    ) -> None:
        self.target, self.report, self._communicator, self._run_files = target, report, communicator or Communicator(), run_files
        self.failed: dict[Path, str] = {}
        self._queue: queue.Queue[Path | None] = queue.Queue()
        self._waiting: set[Path] = set()
        self._thread: threading.Thread | None = None
        if "://" in target and self._communicator.is_first:
            require_writable(target, _WHAT)

    def add(self, path: Path) -> None:
        """Queue a copy of `path` and of checkpoints whose copy failed. Until it is made, `protected` contains the path."""
        for one in (*list(self.failed), path):
            self.failed.pop(one, None)
            if one not in self._waiting:
                self._waiting.add(one)
                self._queue.put(one)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
            self._thread.start()

    def protected(self) -> set[Path]:
        """Paths that must not be pruned yet."""
        return set(self._waiting)

    def close(self) -> None:
        """Wait for the copies, and retry failed ones once."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        for path in list(self.failed):
            self._copy(path)

    def _run(self) -> None:
        yield_to_training()
        while (path := self._queue.get()) is not None:
            self._copy(path)
            self._waiting.discard(path)

    def _copy(self, path: Path) -> None:
        self.failed.pop(path, None)
        if not all(self._communicator.all_gather(path.exists())):  # pruned since its copy failed
            return
        begin = time.monotonic()
        try:
            copied = copy_checkpoint(path, self.target, self._communicator, self._run_files)
        except Exception as error:
            self.failed[path] = str(error)
            if self._communicator.is_first:
                self.report("checkpoint_copy_failed", path=str(path), to=self.target, reason=str(error))
        else:
            if copied and self._communicator.is_first:
                to = f"{self.target.rstrip('/')}/{path.name}"
                self.report("checkpoint_copied", path=str(path), to=to, seconds=round(time.monotonic() - begin, 3))


def copy_checkpoint(source: Path, target: str, communicator: Communicator | None = None, run_files: RunFiles = no_run_files) -> bool:
    """Copy a checkpoint below `target` (a directory or an fsspec URL). Returns False if a complete copy is there already.

    The manifest is copied last: without it a copy does not count. The `run_files`, if any, are copied right before it.

    Each rank of `communicator` copies the data files that it has in its `source` and compares the copies with the manifest. Rank 0 adds
    the run files and, last, the manifest. Raises OSError, on all ranks, if a copy differs.
    """
    communicator = communicator or Communicator()
    place = _Url(target, source.name) if "://" in target else _Directory(target, source.name)
    files = communicator.run_on_all(lambda: manifest.entries(source))
    if all(communicator.all_gather(place.is_copied(source, files, (communicator.rank, communicator.size)))):
        return False
    mine = {name: files[name] for name in files if (source / name).exists() and (name.startswith("data-") or communicator.is_first)}
    try:
        communicator.run_on_all(place.prepare if communicator.is_first else do_nothing)
        communicator.run_on_all(lambda: place.put_files(source, mine))
        copied = {name for names in communicator.gather(sorted(mine)) for name in names}
        missing = sorted(files.keys() - copied)
        communicator.run_on_all(partial(_finish, place, source, missing, run_files) if communicator.is_first else do_nothing)
    finally:
        if communicator.is_first:
            place.clear()
    return True


def _finish(place: _Directory | _Url, source: Path, absent: list[str], run_files: RunFiles) -> None:
    if absent:
        raise OSError(f"{absent[0]} of {source} is on no machine")
    if files := run_files():
        with pack(files) as packed:
            place.put_run_files(packed)
    place.put_manifest(source)


class _Directory:
    """A copy below a directory: written aside, then renamed."""

    def __init__(self, target: str, name: str) -> None:
        self.final = Path(target) / name
        self._aside = listing.aside_name(self.final)

    def is_copied(self, source: Path, files: dict[str, manifest.Entry], share: tuple[int, int]) -> bool:
        """Whether the copy exists and this rank's share of its files matches the manifest."""
        try:
            return manifest.entries(self.final) == files and manifest.problem(self.final, share) is None
        except (ValueError, OSError):
            return False

    def prepare(self) -> None:
        self.clear()
        self._aside.mkdir(parents=True)

    def put_files(self, source: Path, files: dict[str, manifest.Entry]) -> None:
        copy_files(source, self._aside, files)
        if (reason := manifest.differing(self._aside, files)) is not None:
            raise OSError(f"the copy of {source} in {self.final.parent} is bad: {reason}")

    def put_run_files(self, packed: Path) -> None:
        with atomic_path(self.final.parent / BUNDLE) as aside:
            shutil.copyfile(packed, aside)

    def put_manifest(self, source: Path) -> None:
        copy_files(source, self._aside, [manifest.NAME])
        sync_directory(self._aside)
        publish(self._aside, self.final)

    def clear(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)


class _Url:
    """A copy below an fsspec URL. Object stores cannot rename directories. A copy without a manifest does not count, so the old manifest is
    removed first and the new one is written last."""

    def __init__(self, target: str, name: str) -> None:
        self._store, self._name = Store(target, _WHAT), name

    def is_copied(self, source: Path, files: dict[str, manifest.Entry], share: tuple[int, int]) -> bool:
        """Whether the copy has its manifest, which is written after all other files were verified."""
        there = self._store.document(f"{self._name}/{manifest.NAME}", manifest.MOST_DOCUMENT)
        return there == manifest.read_document(source / manifest.NAME)

    def prepare(self) -> None:
        self._store.remove(f"{self._name}/{manifest.NAME}")

    def put_files(self, source: Path, files: dict[str, manifest.Entry]) -> None:
        for name, entry in files.items():
            self._store.put(source / name, f"{self._name}/{name}", entry)

    def put_run_files(self, packed: Path) -> None:
        self._store.upload(packed, BUNDLE)

    def put_manifest(self, source: Path) -> None:
        self._store.upload(source / manifest.NAME, f"{self._name}/{manifest.NAME}")

    def clear(self) -> None:
        """Nothing to do: a copy without a manifest does not count."""


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy and sync files between directories. The caller verifies the copies; they are dropped from the page cache, so that reading them
    back reads the disk."""
    for name in names:
        with manifest.open_regular(source / name) as reader, open(target / name, "xb") as writer:
            shutil.copyfileobj(reader, writer, _BLOCK)
            writer.flush()
            os.fsync(writer.fileno())
            os.posix_fadvise(writer.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
