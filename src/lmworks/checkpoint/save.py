"""How a checkpoint is saved, step by step, and what happens when the disk is full. `CheckpointWriter.write` is steps 4 to 9.

**A save of step 100.** All ranks call `Checkpoints.save`; in training, `lmworks.train.saving` does.

1. `Checkpoints.wait` waits for the previous save and raises its error.
2. `save_plan.slices_to_write` computes on each rank which slices of which tensors it writes.
3. `state.Staging.copy` copies these slices to CPU memory, and `Checkpoints.save` returns. The other steps run in the thread
   `checkpoint-save`; with `checkpoints.asynchronous: false` they run before it returns, and nothing is copied.
4. `create_directory` makes `.step-00000100.part` in `checkpoints/` (with `checkpoints.local`: on the disk of each machine) and fails at
   once if the disk has less free space than the data needs.
5. `tensor_files.write_slices` writes `data-RANK-NUMBER.bin` on each rank. Each file is hashed while it is written, synced (fsync), dropped
   from the page cache, read back from the disk, and compared with memory.
6. `tensor_files.metadata_files` makes, on rank 0, `meta.json`, the table of tensors, and `manifest.json` with the size and the BLAKE3 hash
   of every file.
7. `tensor_files.write_metadata` writes and syncs these three, the manifest last, and then syncs the directory.
8. `publish.publish` renames `.step-00000100.part` to `step-00000100` and syncs `checkpoints/`. **Here the checkpoint gets its name.** All
   of its bytes were synced before. A checkpoint of the same step stays in place until this rename, and is then removed.
9. With `checkpoints.local`, `LocalDisk.announce` leaves a marker in the shared directory, and `LocalDisk.add` queues the copy to it, which
   gets its name in the same way (`copy_to.copy_checkpoint`).
10. `Checkpoints` writes the event `checkpoint` into the ledger, queues the copy to `checkpoints.copy_to` (`BackgroundCopier.add`), and
    removes the checkpoints that need not be kept (`publish.prune`, by `listing.keep`). A failure here, such as a full disk under
    the ledger, prints a warning; the checkpoint is saved all the same.

A process that is killed before step 8 leaves `.step-00000100.part`, which no reader looks at and the next start removes
(`publish.clean`).

**The disk is full** (ENOSPC or EDQUOT; other errors of the file system take the same way).

1. A write in step 4, 5, 7, 8 or 9 raises `OSError` on one rank. `Communicator.run_on_all` and `run_and_gather` raise it on all ranks.
2. `CheckpointWriter.write` removes `.step-00000100.part` and raises a `UserError` that names the disk, its free space, and the newest
   checkpoint (`_explain`). Earlier checkpoints are intact, because step 10 was not reached.
3. In the background thread, `Checkpoints` keeps the error: `Checkpoints.failed` becomes true. The trainer's ranks exchange this flag at
   each step; all then call `Checkpoints.wait`, which raises the error.
4. The trainer catches it (`wait` in `lmworks.train.saving`) and calls `save_failed` of its fault handler (`lmworks.train.fault_handler`),
   which writes the event `save_failed` into the ledger and prints a warning. Training goes on.
5. `lmworks.watch.monitors.FailedSaves` schedules the next attempt: after half of the interval between saves, then after a quarter,
   and so on.
   A save that succeeds resets it. After `stability.max_failed_saves` failures in a row it raises the error, which ends the run.
6. Metrics and events that find no room wait in memory (`jsonl.Waiting`). Each save writes them first, on rank 0; where that fails, the save
   has failed on all ranks, as above.
7. The save at the end of a run is retried in the same way, after the time that the steps until then would have taken. The save on a
   signal is not retried: its error ends the command with exit code 2. The same command resumes from the newest good checkpoint.
8. What `ewc` estimates when a phase begins is saved once, beside the checkpoints. Where that fails, training goes on with the estimate in
   memory, and each save of the phase writes it first: a checkpoint inside the phase cannot be resumed from without it.
"""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.checkpoint import listing
from lmworks.checkpoint.communicator import Communicator
from lmworks.checkpoint.local_disk import LocalDisk
from lmworks.checkpoint.publish import do_nothing, publish
from lmworks.errors import UserError
from lmworks.host import machine

if TYPE_CHECKING:
    from lmworks.checkpoint.save_plan import TensorSlice


class CheckpointWriter:
    """Writes checkpoints into `place`: `directory` itself or, with a `local_disk`, this machine's disk. All ranks call it together.

    makes_directories: whether this rank makes the directories in `place` and the metadata files in them.
    """

    def __init__(self, directory: Path, communicator: Communicator, local_disk: LocalDisk | None) -> None:
        self.directory, self._communicator, self._local_disk = directory, communicator, local_disk
        self.place = local_disk.place if local_disk else directory
        self._inside = next(one for one in (directory, *directory.absolute().parents) if one.exists())
        self.makes_directories = local_disk.is_first if local_disk else communicator.is_first

    def write(self, step: int, slices: list[TensorSlice], document: dict[str, Any]) -> Path:
        """Write a checkpoint (steps 4 to 9 above) and return its path in `place`. `document` becomes its meta.json.

        Raises `UserError`, on all ranks, if any rank fails.
        """
        final = self.place / listing.name_of(step)
        aside = listing.aside_name(final)
        try:
            metadata = self._write_data(aside, slices, document)
            self._communicator.run_on_all(partial(_finish, aside, final, metadata) if self.makes_directories else do_nothing)
            if self._local_disk is not None:
                announce = partial(self._local_disk.announce, final.name)
                self._communicator.run_on_all(announce if self._communicator.is_first else do_nothing)
        except OSError as error:
            raise self._explain(step, error) from error
        finally:
            if self.makes_directories:
                shutil.rmtree(aside, ignore_errors=True)
        return final

    def _write_data(self, aside: Path, slices: list[TensorSlice], document: dict[str, Any]) -> dict[str, bytes]:
        """Write this rank's data files into `aside`. Returns the metadata files by name, on the ranks that write them."""
        from lmworks.checkpoint.tensor_files import metadata_files, write_slices

        bytes_of_ranks = self._communicator.all_gather(sum(one.bytes for one in slices))
        needed = sum(bytes_of_ranks) if self._local_disk is None else self._local_disk.bytes_on_this_machine(bytes_of_ranks)
        create = partial(create_directory, aside, needed, self._inside)
        self._communicator.run_on_all(create if self.makes_directories else do_nothing)
        written = self._communicator.run_and_gather(lambda: write_slices(aside, self._communicator.rank, slices))
        metadata = metadata_files(written, {listing.META: document}) if self._communicator.is_first else {}
        return metadata if self._local_disk is None else self._local_disk.send_to_machines(metadata)

    def _explain(self, step: int, error: OSError) -> UserError:
        earlier = listing.directories(self.directory)
        intact = f"the checkpoint before it, {earlier[-1].name}, is intact" if earlier else "there is no earlier checkpoint"
        reason, remedy = f"{error.strerror or error} in {self.place}", "repair that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = machine.free_disk(self.place if self.place.exists() else self.place.parent)
            reason, remedy = f"the disk of {self.place} is full ({free / 1e6:,.1f} MB free)", "free some space"
        return UserError(f"the checkpoint of step {step} was not saved: {reason}; {intact}; {remedy} and run the same command again")


def create_directory(aside: Path, needed: int, inside: Path) -> None:
    """Make the directory of a save of `needed` bytes. Raises `OSError` before anything is written: if the directory `inside`, which was
    there when training began, no longer is, or if the disk has less free space."""
    inside.stat()
    aside.mkdir(parents=True)
    if machine.free_disk(aside) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _finish(aside: Path, final: Path, metadata: dict[str, bytes]) -> None:
    from lmworks.checkpoint.tensor_files import write_metadata

    write_metadata(aside, metadata)
    publish(aside, final)
