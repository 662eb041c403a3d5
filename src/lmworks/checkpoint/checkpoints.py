"""The checkpoints of one run: saved aside, verified, named, pruned; the newest good one found again."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.checkpoint import listing, manifest, retention
from lmworks.checkpoint.loading import as_json, load
from lmworks.checkpoint.mirror import Mirror
from lmworks.checkpoint.team import new_team
from lmworks.errors import UserError
from lmworks.files import sync_directory
from lmworks.recipe.training import Checkpoints as Options

if TYPE_CHECKING:
    from lmworks.checkpoint.parts import Part
    from lmworks.checkpoint.state import Staging, State


def _ignore(event: str, **fields: object) -> None:
    """Where nobody keeps a ledger."""


class Checkpoints:
    """The owner of a directory of checkpoints; one per run, under the run's lock. Others look at it with `listing`.

    directory: gets `step-00000100/` and so on.
    identity: JSON things that say which model this is; saved, and compared on loading.
    report: called as `report(event, **fields)`, also from other threads: `Ledger.write` fits.
    total_tokens: of the run, needed where `keep_every` is a percentage.

    With an initialised process group all ranks make one and call it alike; rank 0 names, prunes and decides.
    """

    def __init__(
        self, directory: Path, options: Options, identity: dict[str, Any], *,
        report: Callable[..., None] = _ignore, total_tokens: int | None = None,
    ) -> None:
        self.directory, self.options, self.identity = Path(directory), options, identity
        self.report, self.total_tokens = report, total_tokens
        self.refused: list[tuple[Path, str]] = []
        self._verified: set[Path] = set()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._staging: Staging | None = None
        self._team = new_team()
        self._mirror = Mirror(options.copy_to, report) if options.copy_to and self._team.is_first else None
        if self._team.is_first:
            self._clean()

    def save(
        self, step: int, state: State, meta: dict[str, Any], *, metric: float | None = None, permanent: bool = False, wait: bool = False
    ) -> None:
        """Save `state` (nested dicts of tensors, and of plain values that fit JSON) after `step` steps.

        meta: JSON things that come back from `load`; `tokens` in it counts for `keep_every`. metric: lower is better, for `keep_best`.
        Asynchronous by the options: when this returns the state has been copied and may be changed; `wait` (or `self.wait()`) waits
        until it is on the disk. Raises `UserError` if this save, or the one before it, failed; earlier checkpoints stay as they are.
        """
        from lmworks.checkpoint.parts import parts_to_write
        from lmworks.checkpoint.state import Staging, split

        self.wait()
        begin = time.monotonic()
        tensors, values = split(state)
        parts = parts_to_write(tensors, self._team)
        document = as_json(
            {"format": 1, "step": step, "metric": metric, "permanent": permanent, "identity": self.identity, "meta": meta, "values": values}
        )
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
            if self._mirror is not None:
                self._mirror.close()
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
        for path in self._team.agree(listing.directories(self.directory)[::-1] if self._team.is_first else []):
            if at_most is not None and listing.step_of(path) > at_most:
                continue
            reasons = self._team.all(manifest.problem(path, share=(self._team.rank, self._team.size)))
            reason = next((one for one in reasons if one), None)
            if reason is None and undone is not None and undone(listing.step_of(path), listing.read_meta(path)["meta"]):
                self._team.all(None)  # nobody renames what another still reads
                if self._team.is_first:
                    self.report("checkpoint_undone", path=str(path), renamed=str(set_aside(path, "undone")))
                continue
            if reason is None:
                self._verified.add(path)
                return path
            self.refused.append((path, reason))
            if self._team.is_first:
                aside = set_aside(path, "bad")
                self.report("checkpoint_refused", path=str(path), reason=reason, renamed=str(aside))
        return None

    def load(self, path: Path, state: State) -> dict[str, Any]:
        """Fill the tensors of `state` in place from a checkpoint, replace its plain values, and return the meta that was saved.

        Raises `UserError` if the checkpoint is damaged or of another model.
        """
        return load(path, state, self.identity, verified=path in self._verified, team=self._team)

    def load_latest(self, state: State, undone: Callable[[int, dict[str, Any]], bool] | None = None) -> dict[str, Any] | None:
        """`load` of `latest_good`; None if there is none."""
        path = self.latest_good(undone=undone)
        return None if path is None else self.load(path, state)

    def _in_background(self, step: int, parts: list[Part], document: dict[str, Any], begin: float) -> None:
        try:
            self._write(step, parts, document, begin)
        except BaseException as error:
            self._failure = error

    def _write(self, step: int, parts: list[Part], document: dict[str, Any], begin: float) -> None:
        final = self.directory / listing.name_of(step)
        aside = listing.aside_name(final)
        try:
            self._write_aside(aside, parts, document)
            self._team.together(partial(publish, aside, final) if self._team.is_first else _nothing)
        except OSError as error:
            raise self._explain(step, error) from error
        finally:
            if self._team.is_first:
                shutil.rmtree(aside, ignore_errors=True)
        if not self._team.is_first:
            return
        self._verified.discard(final)
        size = sum(entry.bytes for entry in manifest.entries(final).values())
        seconds = round(time.monotonic() - begin, 3)
        self.report("checkpoint", step=step, path=str(final), bytes=size, metric=document["metric"], seconds=seconds)
        if self._mirror is not None:
            self._mirror.add(final)
        self._prune(step)

    def _write_aside(self, aside: Path, parts: list[Part], document: dict[str, Any]) -> None:
        from lmworks.checkpoint.storage import documents, seal, write_parts

        needed = sum(self._team.all(sum(part.bytes for part in parts)))
        self._team.together(partial(_make_room, aside, needed) if self._team.is_first else _nothing)
        written = self._team.collect(lambda: write_parts(aside, self._team.rank, parts))
        if self._team.is_first:
            seal(aside, documents(written, {listing.META: document}))

    def _prune(self, newest: int) -> None:
        protected = self._mirror.protected() if self._mirror else set()
        for step in prune(self.directory, self.options, newest, self.total_tokens, protected):
            self.report("checkpoint_pruned", step=step)

    def _clean(self) -> None:
        """Remove what killed saves and prunings left; bring back a checkpoint that was about to be replaced by another of its step."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            match = re.fullmatch(r"\.(step-\d+)\.(part|gone|replaced)", path.name)
            if match and match[2] == "replaced" and not (self.directory / match[1]).exists():
                os.replace(path, self.directory / match[1])
            elif match:
                shutil.rmtree(path, ignore_errors=True)

    def _explain(self, step: int, error: OSError) -> UserError:
        before = listing.directories(self.directory)
        intact = f"the checkpoint before it, {before[-1].name}, is intact" if before else "there is no earlier checkpoint"
        what, mend = f"{error.strerror or error} in {self.directory}", "mend that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.directory if self.directory.exists() else self.directory.parent).free
            what, mend = f"the disk of {self.directory} is full ({free / 1e6:,.1f} MB free)", "free some space"
        return UserError(f"the checkpoint of step {step} was not saved: {what}; {intact}; {mend} and run the same command again")


def publish(aside: Path, final: Path) -> None:
    """Give a finished checkpoint its name; one that has it already is whole until then."""
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        os.replace(final, replaced)
    os.replace(aside, final)
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint to `step-00000100.WHY-1` (or -2 and so on), where no reader looks; returns the new path."""
    aside = listing.free_name(path, why)
    os.replace(path, aside)
    sync_directory(path.parent)
    return aside


def prune(
    directory: Path, options: Options, newest: int, total_tokens: int | None = None, protected: Collection[Path] = (), *, dry: bool = False
) -> list[int]:
    """Remove the checkpoints that the options do not keep, or with `dry` only say which; returns their steps.

    newest: the step that always stays. protected: what must not go yet.
    """
    found = listing.saved(directory)
    kept = retention.keep(found, options, newest, total_tokens)
    leaving = [one for one in found if one.step not in kept and one.path not in protected]
    for one in () if dry else leaving:
        gone = directory / f".{one.path.name}.gone"
        os.replace(one.path, gone)
        shutil.rmtree(gone, ignore_errors=True)
    return [one.step for one in leaving]


def _make_room(aside: Path, needed: int) -> None:
    """The folder of a save of so many bytes; `OSError` where its disk has less, before anything is written."""
    aside.mkdir(parents=True)
    if shutil.disk_usage(aside).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _nothing() -> None:
    """What the others do while the first does something."""
