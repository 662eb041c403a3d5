"""The checkpoints of one run: save, load, find the newest good one. `lmworks.checkpoint.save` explains a save step by step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import new_communicator
from lmworks.checkpoint.copy_to import BackgroundCopier, yield_to_training
from lmworks.checkpoint.local_disk import LocalDisk
from lmworks.checkpoint.publish import clean, do_nothing, prune, set_aside
from lmworks.checkpoint.run_bundle import RunFiles, no_run_files
from lmworks.checkpoint.save import CheckpointWriter
from lmworks.checkpoint.state import as_json, load, local_slices
from lmworks.io.jsonl import ClosesAtEnd
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.ui.terminal import console

if TYPE_CHECKING:
    from lmworks.checkpoint.save_plan import TensorSlice
    from lmworks.checkpoint.state import Staging, State


def _ignore(event: str, **fields: object) -> None:
    """The default `report`, for callers without a ledger."""


class Checkpoints(ClosesAtEnd):
    """Saves and loads the checkpoints in a directory. Each run has one, under the run's lock; readers without the lock use `listing`.

    directory: holds `step-00000100/` and so on.
    identity: JSON values that identify the model; they are saved, and compared on loading.
    report: called as `report(event, **fields)`, also from other threads, such as `Ledger.write`.
    total_tokens: tokens of the run; needed if `keep_every` is a percentage.
    recipe: the resolved recipe as plain values, without credentials; saved in each checkpoint.
    run_files: the files of the run, by name, that are added to the copies in other storage.

    With an initialized process group all ranks make one and call its methods in the same order; rank 0 names and prunes.
    """

    def __init__(
        self, directory: Path, options: Options, identity: dict[str, Any], *,
        report: Callable[..., None] = _ignore, total_tokens: int | None = None, recipe: dict[str, Any] | None = None,
        run_files: RunFiles = no_run_files,
    ) -> None:
        self.directory, self.options, self.identity, self.recipe = Path(directory), options, identity, recipe
        self.report, self.total_tokens = report, total_tokens
        self.refused: list[tuple[Path, str]] = []
        self._verified: set[Path] = set()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._staging: Staging | None = None
        self._communicator = new_communicator()
        self._copier: BackgroundCopier | None = None
        self._local_disk: LocalDisk | None = None
        if options.local:
            own = (options.keep_last, options.copy_to is not None)
            self._local_disk = LocalDisk(options.local, self.directory, self._communicator, report, self._arrived, self._protected, *own)
        self._writer = CheckpointWriter(self.directory, self._communicator, self._local_disk)
        copies = options.copy_to is not None and self._writer.makes_directories
        self._communicator.run_on_all(partial(self._start_copier, str(options.copy_to), run_files) if copies else do_nothing)
        if self._writer.makes_directories:
            clean(self._writer.place)
        if self._communicator.is_first:
            clean(self.directory)

    def _start_copier(self, target: str, run_files: RunFiles) -> None:
        self._copier = BackgroundCopier(target, self.report, self._local_disk.copy_to_communicator if self._local_disk else None, run_files)

    def save(
        self, step: int, state: State, meta: dict[str, Any], *, metric: float | None = None, permanent: bool = False, wait: bool = False
    ) -> None:
        """Save `state` (nested dicts of tensors, and of plain values that fit JSON) after `step` steps.

        meta: JSON values that `load` returns; its `tokens` count for `keep_every`. metric: lower is better, for `keep_best`.
        With `checkpoints.asynchronous` the state has been copied and may be changed when this returns; `wait` (or `self.wait()`) waits
        until it is on the disk. Raises `UserError` if this save or the previous one failed; earlier checkpoints stay as they are.
        See `lmworks.checkpoint.save` for all steps.
        """
        from lmworks.checkpoint.save_plan import slices_to_write
        from lmworks.checkpoint.state import Staging, split

        self.wait()
        begin = time.monotonic()
        tensors, values = split(state)
        slices = slices_to_write(tensors, self._communicator)
        about = {"format": 1, "step": step, "metric": metric, "permanent": permanent, "identity": self.identity, "meta": meta}
        document = as_json(about | {"recipe": self.recipe, "values": values})
        if not self.options.asynchronous:
            self._write(step, slices, document, begin)
            return
        self._staging = self._staging or Staging()
        job = partial(self._in_background, step, self._staging.copy(slices), document, begin)
        self._thread = threading.Thread(target=job, name="checkpoint-save")
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress. Raises its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def failed(self) -> bool:
        """Whether the background save has failed on this rank; `wait` raises its error."""
        return self._failure is not None

    def close(self) -> None:
        """Wait for the save and the copies in progress. Raises the error of the save."""
        try:
            self.wait()
        finally:
            if self._local_disk is not None:
                self._local_disk.close()
            if self._copier is not None:
                self._copier.close()
            if self._staging is not None:
                self._staging.close()
                self._staging = None

    def latest_good(self, at_most: int | None = None, undone: Callable[[int, dict[str, Any]], bool] | None = None) -> Path | None:
        """The newest checkpoint whose files all match their hashes, or None.

        Damaged checkpoints are renamed to `step-00000100.bad-1`, reported, and added to `refused`. Checkpoints for which
        `undone(step, meta)` is true were undone by a rollback; they are renamed to `step-00000100.undone-1` and reported. With
        `at_most`, checkpoints of later steps are skipped."""
        self.wait()
        self._finish_local_copies()
        for path in self._communicator.broadcast(listing.directories(self.directory)[::-1] if self._communicator.is_first else []):
            if at_most is not None and listing.step_of(path) > at_most:
                continue
            reasons = self._communicator.all_gather(manifest.problem(path, share=(self._communicator.rank, self._communicator.size)))
            reason = next((one for one in reasons if one), None)
            if reason is None and undone is not None and undone(listing.step_of(path), listing.read_meta(path)["meta"]):
                self._communicator.all_gather(None)  # no rank renames a checkpoint that another rank still reads
                if self._communicator.is_first:
                    self.report("checkpoint_undone", path=str(path), renamed=str(set_aside(path, "undone")))
                continue
            if reason is None:
                self._verified.add(path)
                return path
            self.refused.append((path, reason))
            if self._communicator.is_first:
                aside = set_aside(path, "bad")
                self.report("checkpoint_refused", path=str(path), reason=reason, renamed=str(aside))
        return None

    def load(self, path: Path, state: State, optional: Collection[str] = ()) -> dict[str, Any]:
        """Fill the tensors of `state` in place from a checkpoint, replace its plain values, and return the meta that was saved.

        Raises `UserError` if the checkpoint is damaged or of another model.
        """
        known = path in self._verified
        return load(path, state, self.identity, optional=optional, verified=known, communicator=self._communicator)

    def load_latest(
        self, state: State, undone: Callable[[int, dict[str, Any]], bool] | None = None, optional: Collection[str] = ()
    ) -> dict[str, Any] | None:
        """`load` the newest good checkpoint, from the machines' own disks where they have it. None if there is no checkpoint. `optional`
        as in `lmworks.checkpoint.state.load`."""
        self.wait()
        self._finish_local_copies()
        if self._local_disk is not None:
            newest = self._communicator.broadcast(listing.directories(self.directory)[-1:] if self._communicator.is_first else [])
            taken_back = newest and undone and undone(listing.step_of(newest[0]), listing.read_meta(newest[0])["meta"])
            if newest and not taken_back and (local_files := self._local_disk.files(newest[0], local_slices(state))) is not None:
                self._resume_copy(newest[0])
                return load(
                    newest[0], state, self.identity, optional=optional, verified=True, communicator=self._communicator,
                    local_files=local_files,
                )  # fmt: skip
        path = self.latest_good(undone=undone)
        if path is None:
            return None
        self._resume_copy(path)
        return self.load(path, state, optional)

    def _finish_local_copies(self) -> None:
        """Finish the copies from local disks to the run's directory, those of a killed process included."""
        if self._local_disk is not None:
            self._local_disk.wait()
            self._local_disk.finish_copies()

    def _in_background(self, step: int, slices: list[TensorSlice], document: dict[str, Any], begin: float) -> None:
        try:
            yield_to_training()
            self._write(step, slices, document, begin)
        except BaseException as error:
            self._failure = error

    def _write(self, step: int, slices: list[TensorSlice], document: dict[str, Any], begin: float) -> None:
        final = self._writer.write(step, slices, document)
        if self._communicator.is_first:
            self._verified.discard(self.directory / final.name)
            self._report_saved(step, final, document["metric"], time.monotonic() - begin)
        if self._local_disk is not None:
            if self._writer.makes_directories:
                self._local_disk.add(final.name)
        elif self._communicator.is_first:
            self._arrived(final)

    def _report_saved(self, step: int, final: Path, metric: float | None, seconds: float) -> None:
        with _warn_only(f"the checkpoint of step {step} is saved, but the ledger does not record it"):
            size = sum(entry.bytes for entry in manifest.entries(final).values())
            self.report("checkpoint", step=step, path=str(final), bytes=size, metric=metric, seconds=round(seconds, 3))

    def _arrived(self, path: Path) -> None:
        """Called when a checkpoint is complete in the run's directory: queue its copy (from `path` on this machine) and prune."""
        if self._copier is not None:
            self._copier.add(path)
        if self._communicator.is_first:
            with _warn_only(f"{path.name} is saved, but older checkpoints could not be removed"):
                for step in prune(self.directory, self.options, listing.step_of(path), self.total_tokens, self._protected()):
                    self.report("checkpoint_pruned", step=step)

    def _resume_copy(self, path: Path) -> None:
        """Queue the copy to `copy_to` again: the run may have been killed before it was complete."""
        if self._copier is not None:
            self._copier.add(self._writer.place / path.name)

    def _protected(self) -> set[Path]:
        return self._copier.protected() if self._copier else set()


@contextmanager
def _warn_only(what: str) -> Iterator[None]:
    """Turn an error into a warning. For work that one rank does alone after a checkpoint has its name: the save has succeeded, and all
    ranks must agree on that, since it decides when the next save is due."""
    try:
        yield
    except (OSError, ValueError) as error:
        console.print(f"{what}: {error}", style="yellow")
