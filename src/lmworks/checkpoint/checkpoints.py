"""The checkpoints of one run: saved aside, verified, named, pruned; the newest good one found again."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks import machine
from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.communicator import new_communicator
from lmworks.checkpoint.copy_to import BackgroundCopier
from lmworks.checkpoint.loading import as_json, load, local_slices
from lmworks.checkpoint.local_disk import LocalDisk
from lmworks.checkpoint.priority import yield_to_training
from lmworks.checkpoint.publish import clean, do_nothing, prune, publish, set_aside
from lmworks.checkpoint.run_bundle import RunFiles, no_run_files
from lmworks.errors import UserError
from lmworks.progress import console
from lmworks.recipe.schema.checkpoints import Checkpoints as Options

if TYPE_CHECKING:
    from lmworks.checkpoint.save_plan import TensorSlice
    from lmworks.checkpoint.state import Staging, State


def _ignore(event: str, **fields: object) -> None:
    """Where nobody keeps a ledger."""


class Checkpoints:
    """The owner of a directory of checkpoints; one per run, under the run's lock. Others look at it with `listing`.

    directory: gets `step-00000100/` and so on.
    identity: JSON things that say which model this is; saved, and compared on loading.
    report: called as `report(event, **fields)`, also from other threads: `Ledger.write` fits.
    total_tokens: of the run, needed where `keep_every` is a percentage.
    recipe: the resolved recipe as plain values, without credentials; saved in each checkpoint, so that one alone says how it was trained.
    run_files: files of the run, by name, that go with the copies in other storage.

    With an initialised process group all ranks make one and call it alike; rank 0 names, prunes and decides.
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
        # Where saves go first, and whether this rank makes the directories there.
        self._place = self._local_disk.place if self._local_disk else self.directory
        self._makes = self._local_disk.is_first if self._local_disk else self._communicator.is_first
        start_copier = partial(self._start_copier, options.copy_to, run_files) if options.copy_to and self._makes else do_nothing
        self._communicator.run_on_all(start_copier)
        if self._makes:
            clean(self._place)
        if self._communicator.is_first:
            clean(self.directory)

    def _start_copier(self, target: str, run_files: RunFiles) -> None:
        self._copier = BackgroundCopier(target, self.report, self._local_disk.copying if self._local_disk else None, run_files)

    def save(
        self, step: int, state: State, meta: dict[str, Any], *, metric: float | None = None, permanent: bool = False, wait: bool = False
    ) -> None:
        """Save `state` (nested dicts of tensors, and of plain values that fit JSON) after `step` steps.

        meta: JSON things that come back from `load`; `tokens` in it counts for `keep_every`. metric: lower is better, for `keep_best`.
        Asynchronous by the options: when this returns the state has been copied and may be changed; `wait` (or `self.wait()`) waits
        until it is on the disk. Raises `UserError` if this save, or the one before it, failed; earlier checkpoints stay as they are.
        """
        from lmworks.checkpoint.save_plan import slices_to_write
        from lmworks.checkpoint.state import Staging, split

        self.wait()
        begin = time.monotonic()
        tensors, values = split(state)
        parts = slices_to_write(tensors, self._communicator)
        about = {"format": 1, "step": step, "metric": metric, "permanent": permanent, "identity": self.identity, "meta": meta}
        document = as_json(about | {"recipe": self.recipe, "values": values})
        if not self.options.asynchronous:
            self._write(step, parts, document, begin)
            return
        self._staging = self._staging or Staging()
        job = partial(self._in_background, step, self._staging.copy(parts), document, begin)
        self._thread = threading.Thread(target=job, name="checkpoint-save")
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way; raises what went wrong with it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def failed(self) -> bool:
        """Whether the save in the background has failed on this rank already; `wait` raises how."""
        return self._failure is not None

    def close(self) -> None:
        """Wait for the save and the copies under way; raises what went wrong with the save."""
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

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except UserError:
            if error is None:
                raise

    def latest_good(self, at_most: int | None = None, undone: Callable[[int, dict[str, Any]], bool] | None = None) -> Path | None:
        """The newest checkpoint of which every byte verifies, or None. Bad ones are renamed aside (`step-00000100.bad-1`), reported,
        and added to `refused`; so are those whose step and meta `undone` denies (`step-00000100.undone-1`). With `at_most`, those of later
        steps are passed over."""
        self.wait()
        self._settle()
        for path in self._communicator.broadcast(listing.directories(self.directory)[::-1] if self._communicator.is_first else []):
            if at_most is not None and listing.step_of(path) > at_most:
                continue
            reasons = self._communicator.all_gather(manifest.problem(path, share=(self._communicator.rank, self._communicator.size)))
            reason = next((one for one in reasons if one), None)
            if reason is None and undone is not None and undone(listing.step_of(path), listing.read_meta(path)["meta"]):
                self._communicator.all_gather(None)  # nobody renames what another still reads
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

    def load(self, path: Path, state: State) -> dict[str, Any]:
        """Fill the tensors of `state` in place from a checkpoint, replace its plain values, and return the meta that was saved.

        Raises `UserError` if the checkpoint is damaged or of another model.
        """
        return load(path, state, self.identity, verified=path in self._verified, communicator=self._communicator)

    def load_latest(self, state: State, undone: Callable[[int, dict[str, Any]], bool] | None = None) -> dict[str, Any] | None:
        """`load` of `latest_good`, as far as possible from the machines' own disks; None if there is none."""
        self.wait()
        self._settle()
        if self._local_disk is not None:
            newest = self._communicator.broadcast(listing.directories(self.directory)[-1:] if self._communicator.is_first else [])
            taken_back = newest and undone and undone(listing.step_of(newest[0]), listing.read_meta(newest[0])["meta"])
            if newest and not taken_back and (local_files := self._local_disk.files(newest[0], local_slices(state))) is not None:
                self._copy_on(newest[0])
                return load(newest[0], state, self.identity, verified=True, communicator=self._communicator, local_files=local_files)
        path = self.latest_good(undone=undone)
        if path is None:
            return None
        self._copy_on(path)
        return self.load(path, state)

    def _settle(self) -> None:
        """Let everything arrive in the run's directory that is on its way there, from this process or from one that was killed."""
        if self._local_disk is not None:
            self._local_disk.settle()
            self._local_disk.finish()

    def _in_background(self, step: int, parts: list[TensorSlice], document: dict[str, Any], begin: float) -> None:
        try:
            yield_to_training()
            self._write(step, parts, document, begin)
        except BaseException as error:
            self._failure = error

    def _write(self, step: int, parts: list[TensorSlice], document: dict[str, Any], begin: float) -> None:
        from lmworks.checkpoint.tensor_files import write_metadata

        final = self._place / listing.name_of(step)
        aside = listing.aside_name(final)

        def finish() -> None:
            write_metadata(aside, made)
            publish(aside, final)

        try:
            made = self._write_aside(aside, parts, document)
            self._communicator.run_on_all(finish if self._makes else do_nothing)
            if self._local_disk is not None:
                self._communicator.run_on_all(partial(self._local_disk.announce, final.name) if self._communicator.is_first else do_nothing)
        except OSError as error:
            raise self._explain(step, error) from error
        finally:
            if self._makes:
                shutil.rmtree(aside, ignore_errors=True)
        if self._communicator.is_first:
            self._verified.discard(self.directory / final.name)
            self._told(step, final, document["metric"], time.monotonic() - begin)
        if self._local_disk is not None:
            if self._makes:
                self._local_disk.add(final.name)
        elif self._communicator.is_first:
            self._arrived(final)

    def _told(self, step: int, final: Path, metric: float | None, seconds: float) -> None:
        with _saved_anyway(f"the checkpoint of step {step} is saved, but the ledger does not say so"):
            size = sum(entry.bytes for entry in manifest.entries(final).values())
            self.report("checkpoint", step=step, path=str(final), bytes=size, metric=metric, seconds=round(seconds, 3))

    def _write_aside(self, aside: Path, parts: list[TensorSlice], document: dict[str, Any]) -> dict[str, bytes]:
        """Write the data; returns the documents that make a checkpoint of it, at the ranks that write them."""
        from lmworks.checkpoint.tensor_files import metadata_files, write_slices

        bytes_of_ranks = self._communicator.all_gather(sum(part.bytes for part in parts))
        needed = sum(bytes_of_ranks) if self._local_disk is None else self._local_disk.of_this_machine(bytes_of_ranks)
        self._communicator.run_on_all(partial(_begin, aside, needed) if self._makes else do_nothing)
        written = self._communicator.run_and_gather(lambda: write_slices(aside, self._communicator.rank, parts))
        made = metadata_files(written, {listing.META: document}) if self._communicator.is_first else {}
        return made if self._local_disk is None else self._local_disk.share(made)

    def _arrived(self, path: Path) -> None:
        """A checkpoint is whole in the run's directory: copy it on from `path`, where this rank has it, and see which may go."""
        if self._copier is not None:
            self._copier.add(path)
        if self._communicator.is_first:
            with _saved_anyway(f"{path.name} is saved, but older checkpoints could not be removed"):
                for step in prune(self.directory, self.options, listing.step_of(path), self.total_tokens, self._protected()):
                    self.report("checkpoint_pruned", step=step)

    def _copy_on(self, path: Path) -> None:
        """If the run was killed before the copy of its last checkpoint was whole."""
        if self._copier is not None:
            self._copier.add(self._place / path.name)

    def _protected(self) -> set[Path]:
        return self._copier.protected() if self._copier else set()

    def _explain(self, step: int, error: OSError) -> UserError:
        before = listing.directories(self.directory)
        intact = f"the checkpoint before it, {before[-1].name}, is intact" if before else "there is no earlier checkpoint"
        what, mend = f"{error.strerror or error} in {self._place}", "mend that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = machine.free_disk(self._place if self._place.exists() else self._place.parent)
            what, mend = f"the disk of {self._place} is full ({free / 1e6:,.1f} MB free)", "free some space"
        return UserError(f"the checkpoint of step {step} was not saved: {what}; {intact}; {mend} and run the same command again")


@contextmanager
def _saved_anyway(what: str) -> Iterator[None]:
    """What one rank does alone once a checkpoint has its name. If it fails, the save has not: to this rank no more than to the others, with
    whom it has to agree on whether the next save is a second try."""
    try:
        yield
    except (OSError, ValueError) as error:
        console.print(f"{what}: {error}", style="yellow")


def _begin(aside: Path, needed: int) -> None:
    """The folder of a save of so many bytes; `OSError` where its disk has less, before anything is written."""
    aside.mkdir(parents=True)
    if machine.free_disk(aside) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
