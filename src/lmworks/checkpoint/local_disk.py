"""Checkpoints on each machine's own disk first, and their way from there to the run's directory.

Every rank writes its files to its own machine. Then the first rank of each machine copies that machine's files to the shared
directory, and the first of all seals it there: the shared checkpoint is whole or absent like any other. Until then a marker in
the shared directory, `.step-00000100.local`, says that one is on its way, so that the next start can finish the copy. Copies on other
storage (`mirror`) are made from the machines' disks in the same way.
"""

from __future__ import annotations

import hashlib
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmworks import progress
from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import Communicator, new_communicator
from lmworks.checkpoint.copy_to import copy_checkpoint
from lmworks.checkpoint.priority import yield_to_training
from lmworks.files import sync_directory

if TYPE_CHECKING:
    from lmworks.checkpoint.save_plan import TensorSlice


class LocalDisk:
    """The directory of this machine below `root` for the run whose checkpoints belong into `shared`.

    finished: called at the first rank of each machine with the path here of a checkpoint that has arrived. protected: paths here that
    must stay. keep: copied checkpoints that stay here. further: they are copied on from here, by the communicator `mirroring`. All ranks of
    `communicator` make one; ranks of one machine (or rather, of one directory on one machine) share it.
    """

    def __init__(
        self, root: str, shared: Path, communicator: Communicator, report: Callable[..., None], finished: Callable[[Path], None],
        protected: Callable[[], set[Path]], keep: int, further: bool,
    ) -> None:
        whole = str(shared.resolve())
        self.place = Path(root) / f"{shared.resolve().parent.name}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
        self.shared, self.report, self.finished, self.protected, self.keep = shared, report, finished, protected, keep
        self._all = communicator
        machines = communicator.all_gather(f"{socket.gethostname()} {self.place.resolve()}")
        self._here = [machine == machines[communicator.rank] for machine in machines]
        firsts = [rank for rank, machine in enumerate(machines) if machine not in machines[:rank]]
        self.is_first = communicator.rank in firsts
        self._saving, self._copying = new_communicator(firsts), new_communicator(firsts)
        self.copying = new_communicator(firsts) if further else Communicator()  # its threads must not mix their messages with these
        # One may wait while another is copied. A third save waits for that: the disk here would otherwise fill.
        self._queue: queue.Queue[str | None] = queue.Queue(maxsize=1)
        self._failed: list[str] = []
        self._thread: threading.Thread | None = None

    def send_to_machines(self, metadata: dict[str, bytes]) -> dict[str, bytes]:
        """Broadcast the metadata files of a checkpoint from rank 0 to the first rank of each machine. Empty on the other ranks."""
        return self._saving.broadcast(metadata) if self.is_first else {}

    def bytes_on_this_machine(self, bytes_of_ranks: Sequence[int]) -> int:
        """The sum over the ranks that write to this machine's disk."""
        return sum(count for count, here in zip(bytes_of_ranks, self._here, strict=True) if here)

    def announce(self, name: str) -> None:
        """Leave the marker that says that a checkpoint is whole on the machines."""
        self.shared.mkdir(parents=True, exist_ok=True)
        listing.marker(self.shared / name).touch()
        sync_directory(self.shared)

    def add(self, name: str) -> None:
        """Copy a checkpoint, and what failed before, in the background; called by the first rank of each machine."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-copy", daemon=True)
            self._thread.start()
        for one in (*self._failed, name):
            self._queue.put(one)
        self._failed.clear()

    def settle(self) -> None:
        """Wait for the copies under way, everywhere."""
        self._queue.join()
        self._all.all_gather(None)

    def close(self) -> None:
        """Wait for the copies, and try once more what failed."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, []
        for name in failed:
            self._copy(name)

    def finish(self) -> None:
        """Copy what a run that was killed left on the machines; what is not whole on all of them any more is given up."""
        names = self._all.broadcast([path.name for path in listing.announced(self.shared)] if self._all.is_first else [])
        for name in names:
            seals = self._all.all_gather(_seal_of(self.place / name) if self.is_first else None)
            here = {seal for seal in seals if seal is not None}
            if self.is_first and len(here) == 1 and "" not in here:
                self._copy(name)
            if self._all.is_first and listing.marker(self.shared / name).exists():
                listing.marker(self.shared / name).unlink()
                self.report("checkpoint_given_up", path=str(self.place / name), reason="not whole on every machine")
        self._failed.clear()
        self._all.all_gather(None)

    def files(self, final: Path, parts: Sequence[TensorSlice]) -> dict[str, Path] | None:
        """By name, where to read the files that `parts` are filled from: here where this machine has them, else in `final`.

        All that is named has been hashed. None, on all ranks, if a file is damaged or there is a rank that has none of its files here,
        as when the layout has changed: then the ranks had better verify `final` together, each a share of it.
        """
        seal = self._all.broadcast(_seal_of(final) if self._all.is_first else "")
        source = self.place / final.name
        found = _find(source, final, parts) if seal and _seal_of(source) == seal else None
        return found if all(self._all.all_gather(found is not None)) else None

    def _run(self) -> None:
        yield_to_training()
        while (name := self._queue.get()) is not None:
            try:
                self._copy(name)
            except Exception as error:  # on this machine alone, after the copy: the others, and who waits for us, must not hang
                progress.console.print(f"after the copy of {name}: {error}", style="yellow")
            self._queue.task_done()
        self._queue.task_done()

    def _copy(self, name: str) -> None:
        """Called by the first rank of each machine; they succeed or fail together."""
        begin, final, is_first = time.monotonic(), self.shared / name, self._copying.is_first
        try:
            copy_checkpoint(self.place / name, str(self.shared), self._copying)
        except Exception as error:
            self._failed.append(name)
            if is_first:
                self.report("checkpoint_copy_failed", path=str(self.place / name), to=str(self.shared), reason=str(error))
            return
        if is_first:
            listing.marker(final).unlink(missing_ok=True)
            self.report("checkpoint_copied", path=str(self.place / name), to=str(final), seconds=round(time.monotonic() - begin, 3))
        self.finished(self.place / name)
        self._forget_old()

    def _forget_old(self) -> None:
        """Of the copied ones the newest stay; by their time, since after a rollback a later one may have a smaller number."""
        here = [path for path in listing.directories(self.place) if (path / manifest.NAME).exists()]
        here.sort(key=lambda path: (path / manifest.NAME).stat().st_mtime_ns, reverse=True)
        for path in here[self.keep:]:
            if path not in self.protected() and not listing.marker(self.shared / path.name).exists():
                shutil.rmtree(path, ignore_errors=True)


def _seal_of(path: Path) -> str:
    """A hash of the manifest; empty if there is none that is whole."""
    try:
        manifest.entries(path)
        return hashlib.sha256(manifest.read_document(path / manifest.NAME)).hexdigest()
    except (OSError, ValueError):
        return ""


def _find(source: Path, final: Path, parts: Sequence[TensorSlice]) -> dict[str, Path] | None:
    from lmworks.checkpoint.tensor_files import TABLE, Reader

    try:
        entries = manifest.entries(source)
        if manifest.differing(source, {name: entries[name] for name in (listing.META, TABLE)}):
            return None
        needed = {name: entries[name] for name in Reader(source).files(parts)}
    except (OSError, ValueError, KeyError):
        return None
    here = {name: one for name, one in needed.items() if (source / name).exists()}
    if needed and not here:
        return None
    elsewhere = {name: one for name, one in needed.items() if name not in here}
    if manifest.differing(source, here) or manifest.differing(final, elsewhere):
        return None
    return {name: (source if name in here else final) / name for name in needed}
