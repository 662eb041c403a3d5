"""The checkpoints of one run: saved aside, verified, named, pruned; the newest good one found again."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.checkpoint import listing, manifest, retention
from lmworks.checkpoint.mirror import Mirror
from lmworks.errors import UserError
from lmworks.files import sync_directory
from lmworks.recipe.training import Checkpoints as Options

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

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
        self._group, self._rank, self._ranks = _own_group()
        self._mirror = Mirror(options.copy_to, report) if options.copy_to and self._rank == 0 else None
        if self._rank == 0:
            self._clean()

    def save(
        self, step: int, state: State, meta: dict[str, Any], *, metric: float | None = None, permanent: bool = False, wait: bool = False
    ) -> None:
        """Save `state` (nested dicts of tensors, and of plain values that fit JSON) after `step` steps.

        meta: JSON things that come back from `load`; `tokens` in it counts for `keep_every`. metric: lower is better, for `keep_best`.
        Asynchronous by the options: when this returns the state has been copied and may be changed; `wait` (or `self.wait()`) waits
        until it is on the disk. Raises `UserError` if this save, or the one before it, failed; earlier checkpoints stay as they are.
        """
        from lmworks.checkpoint.state import Staging, split

        self.wait()
        begin = time.monotonic()
        tensors, values = split(state)
        document = _as_json(
            {"format": 1, "step": step, "metric": metric, "permanent": permanent, "identity": self.identity, "meta": meta, "values": values}
        )
        if not self.options.asynchronous:
            self._write(step, tensors, document, begin)
            return
        self._staging = self._staging or Staging()
        job = partial(self._in_background, step, self._staging.copy(tensors), document, begin)
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

    def latest_good(self) -> Path | None:
        """The newest checkpoint of which every byte verifies, or None. Bad ones are renamed aside (`step-00000100.bad-1`), reported,
        and added to `refused`."""
        self.wait()
        for path in reversed(self._agree(listing.directories(self.directory))):
            reasons = self._gather(manifest.problem(path, share=(self._rank, self._ranks)))
            reason = next((one for one in reasons if one), None)
            if reason is None:
                self._verified.add(path)
                return path
            self.refused.append((path, reason))
            if self._rank == 0:
                aside = self._set_aside(path)
                self.report("checkpoint_refused", path=str(path), reason=reason, renamed=str(aside))
        return None

    def load(self, path: Path, state: State) -> dict[str, Any]:
        """Fill the tensors of `state` in place from a checkpoint, replace its plain values, and return the meta that was saved.

        Raises `UserError` if the checkpoint is damaged or of another model.
        """
        return load(path, state, self.identity, verified=path in self._verified, group=self._group)

    def load_latest(self, state: State) -> dict[str, Any] | None:
        """`load` of `latest_good`; None if there is none."""
        path = self.latest_good()
        return None if path is None else self.load(path, state)

    def _in_background(self, step: int, tensors: dict[str, torch.Tensor], document: dict[str, Any], begin: float) -> None:
        try:
            self._write(step, tensors, document, begin)
        except BaseException as error:
            self._failure = error

    def _write(self, step: int, tensors: dict[str, torch.Tensor], document: dict[str, Any], begin: float) -> None:
        final = self.directory / listing.name_of(step)
        aside = self.directory / f".{final.name}.part"
        try:
            self._write_aside(aside, tensors, document)
            if self._rank == 0:
                self._publish(aside, final)
        except OSError as error:
            raise self._explain(step, error) from error
        finally:
            if self._rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
        if self._rank != 0:
            return
        self._verified.discard(final)
        size = sum(entry.bytes for entry in manifest.entries(final).values())
        seconds = round(time.monotonic() - begin, 3)
        self.report("checkpoint", step=step, path=str(final), bytes=size, metric=document["metric"], seconds=seconds)
        if self._mirror is not None:
            self._mirror.add(final)
        self._prune(step)

    def _write_aside(self, aside: Path, tensors: dict[str, torch.Tensor], document: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from lmworks.checkpoint.storage import Writer

        try:
            dcp.save(
                tensors, storage_writer=Writer(aside, {listing.META: document}),
                planner=dcp.DefaultSavePlanner(flatten_state_dict=False), process_group=self._group,
            )
        except CheckpointException as error:
            raise _first_failure(error) from error

    def _publish(self, aside: Path, final: Path) -> None:
        replaced = self.directory / f".{final.name}.replaced"
        if final.exists():
            os.replace(final, replaced)
        os.replace(aside, final)
        sync_directory(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        found = listing.saved(self.directory)
        kept = retention.keep(found, self.options, newest, self.total_tokens)
        protected = self._mirror.protected() if self._mirror else set()
        for one in found:
            if one.step not in kept and one.path not in protected:
                gone = self.directory / f".{one.path.name}.gone"
                os.replace(one.path, gone)
                shutil.rmtree(gone, ignore_errors=True)
                self.report("checkpoint_pruned", step=one.step)

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

    def _set_aside(self, path: Path) -> Path:
        number = 1
        while (aside := path.with_name(f"{path.name}.bad-{number}")).exists():
            number += 1
        os.replace(path, aside)
        sync_directory(self.directory)
        return aside

    def _explain(self, step: int, error: OSError) -> UserError:
        before = listing.directories(self.directory)
        intact = f"the checkpoint before it, {before[-1].name}, is intact" if before else "there is no earlier checkpoint"
        what, mend = f"{error.strerror or error} in {self.directory}", "mend that"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.directory if self.directory.exists() else self.directory.parent).free
            what, mend = f"the disk of {self.directory} is full ({free / 1e6:,.1f} MB free)", "free some space"
        return UserError(f"the checkpoint of step {step} was not saved: {what}; {intact}; {mend} and run the same command again")

    def _agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return self._gather(value)[0]

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self._ranks
        dist.all_gather_object(values, value, group=self._group)
        return values


def load(
    path: Path, state: State, identity: dict[str, Any] | None = None, *, verified: bool = False, group: ProcessGroup | None = None
) -> dict[str, Any]:
    """Fill the tensors of `state` in place from the checkpoint at `path`, replace its plain values, and return the meta saved with it.

    Only the top-level parts that `state` has are read: `{"model": model.state_dict()}` leaves the optimizer alone. The layout of
    DTensors may differ from that of the save. `verified` skips the hashing. Raises `UserError` if the checkpoint is damaged, or of
    another model (`identity`, where given, or names, shapes or types differ).
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from lmworks.checkpoint import state as states
    from lmworks.checkpoint.storage import Reader, read_table

    path = Path(path)
    if not verified and (reason := manifest.problem(path)) is not None:
        raise UserError(f"{path} is damaged: {reason}; use another checkpoint (lmworks ckpt verify shows the good ones)")
    document, table = listing.read_meta(path), read_table(path)
    if identity is not None:
        states.refuse_other_identity(str(path), _as_json(identity), document["identity"])
    states.refuse_other_tensors(str(path), state, table, document["values"])
    tensors, _ = states.split(state)
    try:
        dcp.load(tensors, storage_reader=Reader(path), planner=dcp.DefaultLoadPlanner(flatten_state_dict=False), process_group=group)
    except CheckpointException as error:
        raise _first_failure(error) from error
    states.put_values(state, document["values"])
    return dict(document["meta"])


def _as_json(value: Any) -> Any:
    """What `value` will be once read back from JSON; a copy that later changes do not reach."""
    return json.loads(json.dumps(value))


def _first_failure(error: Any) -> BaseException:
    """What a rank met, without the collective's wrapping."""
    failures: dict[int, Any] = error.failures
    first: BaseException = failures[min(failures)][0]
    return first


def _own_group() -> tuple[ProcessGroup | None, int, int]:
    """A gloo group for the thread that saves, since it must not mix its messages with those of training; (None, 0, 1) alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None, 0, 1
    group = dist.new_group(backend="gloo")
    return group, dist.get_rank(group), dist.get_world_size(group)
