"""Copies of finished checkpoints on other storage, made in the background and verified there."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.priority import yield_to_training
from lmworks.checkpoint.publish import nothing, publish
from lmworks.checkpoint.team import Team
from lmworks.checkpoint.travelling import BUNDLE, Documents, no_documents, pack
from lmworks.files import atomic_path, sync_directory
from lmworks.storage import filesystem, make_directory, require_writable

_BLOCK = 1 << 22
_WHAT = "checkpoints.copy_to"


class Mirror:
    """Copies checkpoints one after the other in a thread. A failed copy is reported and tried again with the next one and at the
    end; it never stops the run, whose own checkpoints are whole.

    team: who copies together, each what it has; all call `add` and `close` alike. documents: files of the run that go with each copy.
    Raises `UserError` for a URL that cannot be written.
    """

    def __init__(
        self, target: str, report: Callable[..., None], team: Team | None = None, documents: Documents = no_documents
    ) -> None:
        self.target, self.report, self._team, self._documents = target, report, team or Team(), documents
        self.failed: dict[Path, str] = {}
        self._queue: queue.Queue[Path | None] = queue.Queue()
        self._waiting: set[Path] = set()
        self._thread: threading.Thread | None = None
        if "://" in target and self._team.is_first:
            require_writable(target, _WHAT)

    def add(self, path: Path) -> None:
        """Copy `path`, and what failed before, when its turn comes; until then `protected` names it."""
        for one in (*list(self.failed), path):
            self.failed.pop(one, None)
            if one not in self._waiting:
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
            self._copy(path)

    def _run(self) -> None:
        yield_to_training()
        while (path := self._queue.get()) is not None:
            self._copy(path)
            self._waiting.discard(path)

    def _copy(self, path: Path) -> None:
        self.failed.pop(path, None)
        if not all(self._team.all(path.exists())):  # pruned since its copy failed
            return
        begin = time.monotonic()
        try:
            copied = copy_checkpoint(path, self.target, self._team, self._documents)
        except Exception as error:
            self.failed[path] = str(error)
            if self._team.is_first:
                self.report("checkpoint_copy_failed", path=str(path), to=self.target, reason=str(error))
        else:
            if copied and self._team.is_first:
                to = f"{self.target.rstrip('/')}/{path.name}"
                self.report("checkpoint_copied", path=str(path), to=to, seconds=round(time.monotonic() - begin, 3))


def copy_checkpoint(source: Path, target: str, team: Team | None = None, documents: Documents = no_documents) -> bool:
    """Copy a checkpoint below `target` (a directory or an fsspec URL), the manifest last; returns False if it is there and whole already.
    The `documents` of the run, where there are any, come right before the manifest: a checkpoint that counts has what belongs to it.

    Each member of `team` copies the data that it has in its `source` and compares what arrived with the manifest; the first adds the
    documents and seals. Raises OSError, on all members, if the copy differs.
    """
    team = team or Team()
    place = _Url(target, source.name) if "://" in target else _Directory(target, source.name)
    files = team.together(lambda: manifest.entries(source))
    if all(team.all(place.holds(source, files, (team.rank, team.size)))):
        return False
    mine = {name: files[name] for name in files if (source / name).exists() and (name.startswith("data-") or team.is_first)}
    try:
        team.together(place.begin if team.is_first else nothing)
        team.together(lambda: place.bring(source, mine))
        brought = {name for names in team.gather(sorted(mine)) for name in names}
        team.together(partial(_seal, place, source, sorted(files.keys() - brought), documents) if team.is_first else nothing)
    finally:
        if team.is_first:
            place.clear()
    return True


def _seal(place: _Directory | _Url, source: Path, absent: list[str], documents: Documents) -> None:
    if absent:
        raise OSError(f"{absent[0]} of {source} is on no machine")
    if files := documents():
        with pack(files) as packed:
            place.put_beside(packed)
    place.seal(source)


class _Directory:
    """A checkpoint below a directory; it is made aside."""

    def __init__(self, target: str, name: str) -> None:
        self.final = Path(target) / name
        self._aside = listing.aside_name(self.final)

    def holds(self, source: Path, files: dict[str, manifest.Entry], share: tuple[int, int]) -> bool:
        """Whether the copy is there, and this member's share of it as it should be."""
        try:
            return manifest.entries(self.final) == files and manifest.problem(self.final, share) is None
        except (ValueError, OSError):
            return False

    def begin(self) -> None:
        self.clear()
        self._aside.mkdir(parents=True)

    def bring(self, source: Path, files: dict[str, manifest.Entry]) -> None:
        copy_files(source, self._aside, files)
        if (reason := manifest.differing(self._aside, files)) is not None:
            raise OSError(f"the copy of {source} in {self.final.parent} is bad: {reason}")

    def put_beside(self, packed: Path) -> None:
        with atomic_path(self.final.parent / BUNDLE) as aside:
            shutil.copyfile(packed, aside)

    def seal(self, source: Path) -> None:
        copy_files(source, self._aside, [manifest.NAME])
        sync_directory(self._aside)
        publish(self._aside, self.final)

    def clear(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)


class _Url:
    """A checkpoint below an fsspec URL. An object store has no rename of directories: without its manifest the copy does not count, so
    that goes first and comes last."""

    def __init__(self, target: str, name: str) -> None:
        self._filesystem, root = filesystem(target, _WHAT)
        self._target, self._root, self._final = target, root, f"{root}/{name}"

    def holds(self, source: Path, files: dict[str, manifest.Entry], share: tuple[int, int]) -> bool:
        """Whether the copy has been sealed; each file was compared before that."""
        seal = f"{self._final}/{manifest.NAME}"
        return bool(self._filesystem.exists(seal) and self._filesystem.cat_file(seal) == manifest.read_document(source / manifest.NAME))

    def begin(self) -> None:
        make_directory(self._filesystem, self._final)
        if self._filesystem.exists(f"{self._final}/{manifest.NAME}"):
            self._filesystem.rm_file(f"{self._final}/{manifest.NAME}")

    def bring(self, source: Path, files: dict[str, manifest.Entry]) -> None:
        for name, entry in files.items():
            self._filesystem.put_file(str(source / name), f"{self._final}/{name}")
            with self._filesystem.open(f"{self._final}/{name}", "rb") as handle:
                arrived = manifest.hash_of(handle)
            if arrived != entry.blake3:
                raise OSError(f"{self._target}: the copy of {name} differs from {source / name}")

    def put_beside(self, packed: Path) -> None:
        self._filesystem.put_file(str(packed), f"{self._root}/{BUNDLE}")

    def seal(self, source: Path) -> None:
        self._filesystem.put_file(str(source / manifest.NAME), f"{self._final}/{manifest.NAME}")

    def clear(self) -> None:
        """What is not sealed does not count."""


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files between directories, synced. What arrived is for the caller to compare; nothing of it is left in memory, so that
    comparing asks the disk."""
    for name in names:
        with manifest.open_regular(source / name) as reader, open(target / name, "xb") as writer:
            shutil.copyfileobj(reader, writer, _BLOCK)
            writer.flush()
            os.fsync(writer.fileno())
            os.posix_fadvise(writer.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
