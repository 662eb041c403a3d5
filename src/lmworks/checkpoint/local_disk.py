"""Checkpoints that are saved on each machine's own disk first (`checkpoints.local`), and then copied to the run's directory.

Each rank writes its files to the disk of its machine. Then the first rank of each machine copies that machine's files to the shared
directory, and rank 0 writes the manifest there and gives the checkpoint its name: the shared checkpoint is complete or absent like any
other. Until then a marker in the shared directory, `.step-00000100.local`, records that the copy is not complete, so that the next start
can finish it. The copies in other storage (`copy_to`) are made from the machines' disks in the same way.
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

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import Communicator, new_communicator
from lmworks.checkpoint.copy_to import copy_checkpoint, yield_to_training
from lmworks.io.files import sync_directory
from lmworks.ui import terminal

if TYPE_CHECKING:
    from lmworks.checkpoint.save_plan import TensorSlice


class LocalDisk:
    """The directory `place` on this machine's disk, below `root`, for the run whose checkpoints belong into `shared`.

    on_copied: called on the first rank of each machine with the local path of a checkpoint that was copied to `shared`.
    protected: returns local paths that must not be removed.
    keep: how many copied checkpoints stay on the local disk.
    copy_to: whether checkpoints are also copied from here to other storage, by the ranks of `copy_to_communicator`.

    All ranks of `communicator` make one. Ranks with the same directory on the same machine share it.
    """

    def __init__(
        self, root: str, shared: Path, communicator: Communicator, report: Callable[..., None], on_copied: Callable[[Path], None],
        protected: Callable[[], set[Path]], keep: int, copy_to: bool,
    ) -> None:
        resolved = str(shared.resolve())
        self.place = Path(root) / f"{shared.resolve().parent.name}-{hashlib.sha256(resolved.encode()).hexdigest()[:12]}"
        self.shared, self.report, self.on_copied, self.protected, self.keep = shared, report, on_copied, protected, keep
        self._all = communicator
        machines = communicator.all_gather(f"{socket.gethostname()} {self.place.resolve()}")
        self._on_this_machine = [machine == machines[communicator.rank] for machine in machines]
        firsts = [rank for rank, machine in enumerate(machines) if machine not in machines[:rank]]
        self.is_first = communicator.rank in firsts
        self._save_communicator, self._copy_communicator = new_communicator(firsts), new_communicator(firsts)
        # One communicator per thread: messages of different threads must not interleave.
        self.copy_to_communicator = new_communicator(firsts) if copy_to else Communicator()
        # One checkpoint may wait while another is copied. A third save blocks, or the local disk would fill.
        self._queue: queue.Queue[str | None] = queue.Queue(maxsize=1)
        self._failed: list[str] = []
        self._thread: threading.Thread | None = None

    def send_to_machines(self, metadata: dict[str, bytes]) -> dict[str, bytes]:
        """Broadcast the metadata files of a checkpoint from rank 0 to the first rank of each machine. Empty on the other ranks."""
        return self._save_communicator.broadcast(metadata) if self.is_first else {}

    def bytes_on_this_machine(self, bytes_of_ranks: Sequence[int]) -> int:
        """The sum over the ranks that write to this machine's disk."""
        return sum(count for count, is_local in zip(bytes_of_ranks, self._on_this_machine, strict=True) if is_local)

    def announce(self, name: str) -> None:
        """Write the marker of a checkpoint that is complete on the machines' disks and not yet in the shared directory."""
        self.shared.mkdir(parents=True, exist_ok=True)
        listing.marker(self.shared / name).touch()
        sync_directory(self.shared)

    def add(self, name: str) -> None:
        """Copy a checkpoint, and those whose copy failed, in the background. Called on the first rank of each machine."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-copy", daemon=True)
            self._thread.start()
        for one in (*self._failed, name):
            self._queue.put(one)
        self._failed.clear()

    def wait(self) -> None:
        """Wait for the copies in progress on all machines."""
        self._queue.join()
        self._all.all_gather(None)

    def close(self) -> None:
        """Wait for the copies, and retry failed ones once."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, []
        for name in failed:
            self._copy(name)

    def finish_copies(self) -> None:
        """Finish the copies that a killed process has left. A checkpoint that is not complete on all machines is given up."""
        names = self._all.broadcast([path.name for path in listing.pending(self.shared)] if self._all.is_first else [])
        for name in names:
            hashes = self._all.all_gather(_manifest_hash(self.place / name) if self.is_first else None)
            found = {one for one in hashes if one is not None}
            if self.is_first and len(found) == 1 and "" not in found:
                self._copy(name)
            if self._all.is_first and listing.marker(self.shared / name).exists():
                listing.marker(self.shared / name).unlink()
                self.report("checkpoint_given_up", path=str(self.place / name), reason="not complete on every machine")
        self._failed.clear()
        self._all.all_gather(None)

    def files(self, final: Path, slices: Sequence[TensorSlice]) -> dict[str, Path] | None:
        """The path of each file that `slices` are read from: the local copy if this machine has it, else the one in `final`.

        All of these files have been verified. None, on all ranks, if a file is damaged, or if a rank has none of its files on its local
        disk, as after a change of the mesh layout; the ranks then verify `final` together.
        """
        expected = self._all.broadcast(_manifest_hash(final) if self._all.is_first else "")
        source = self.place / final.name
        found = _find(source, final, slices) if expected and _manifest_hash(source) == expected else None
        return found if all(self._all.all_gather(found is not None)) else None

    def _run(self) -> None:
        yield_to_training()
        while (name := self._queue.get()) is not None:
            try:
                self._copy(name)
            except Exception as error:  # on this machine only, after the copy; other machines must not hang
                terminal.console.print(f"after the copy of {name}: {error}", style="yellow")
            self._queue.task_done()
        self._queue.task_done()

    def _copy(self, name: str) -> None:
        """Called on the first rank of each machine. They succeed or fail together."""
        begin, final, is_first = time.monotonic(), self.shared / name, self._copy_communicator.is_first
        try:
            copy_checkpoint(self.place / name, str(self.shared), self._copy_communicator)
        except Exception as error:
            self._failed.append(name)
            if is_first:
                self.report("checkpoint_copy_failed", path=str(self.place / name), to=str(self.shared), reason=str(error))
            return
        if is_first:
            listing.marker(final).unlink(missing_ok=True)
            self.report("checkpoint_copied", path=str(self.place / name), to=str(final), seconds=round(time.monotonic() - begin, 3))
        self.on_copied(self.place / name)
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove copied checkpoints but the newest `keep`, by modification time: after a rollback a newer one may have a smaller step."""
        local = [path for path in listing.directories(self.place) if (path / manifest.NAME).exists()]
        local.sort(key=lambda path: (path / manifest.NAME).stat().st_mtime_ns, reverse=True)
        for path in local[self.keep:]:
            if path not in self.protected() and not listing.marker(self.shared / path.name).exists():
                shutil.rmtree(path, ignore_errors=True)


def _manifest_hash(path: Path) -> str:
    """Hex SHA-256 of the manifest; empty if it is missing or damaged."""
    try:
        manifest.entries(path)
        return hashlib.sha256(manifest.read_document(path / manifest.NAME)).hexdigest()
    except (OSError, ValueError):
        return ""


def _find(source: Path, final: Path, slices: Sequence[TensorSlice]) -> dict[str, Path] | None:
    from lmworks.checkpoint.tensor_files import TABLE, Reader

    try:
        entries = manifest.entries(source)
        if manifest.differing(source, {name: entries[name] for name in (listing.META, TABLE)}):
            return None
        needed = {name: entries[name] for name in Reader(source).files(slices)}
    except (OSError, ValueError, KeyError):
        return None
    local = {name: one for name, one in needed.items() if (source / name).exists()}
    if needed and not local:
        return None
    shared = {name: one for name, one in needed.items() if name not in local}
    if manifest.differing(source, local) or manifest.differing(final, shared):
        return None
    return {name: (source if name in local else final) / name for name in needed}
