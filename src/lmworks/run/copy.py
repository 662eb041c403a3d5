"""Copies runs to object storage or another directory, and restores runs from such copies.

A copy has the same folders as the run. A folder counts as copied once the list of its files with their hashes is there, which is written
last: a checkpoint's manifest, and `copied.json` in the folder of a stage. The run's small files are in `run.gz` beside its checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lmworks.checkpoint import listing, manifest
from lmworks.checkpoint.copy_to import copy_checkpoint
from lmworks.checkpoint.manifest import Entry
from lmworks.checkpoint.run_bundle import BUNDLE, run_files_of, unpack
from lmworks.errors import UserError
from lmworks.io.files import explain_os_errors, sync_directory
from lmworks.io.run_layout import MODEL_STAGES, ModelStage, ewc_folder, final_checkpoint_of
from lmworks.io.store import Store
from lmworks.io.urls import explain_storage_errors, require_writable
from lmworks.run.run_dir import read_stamp, require_run
from lmworks.run.stages import STAGES, STAMP, Stage
from lmworks.ui.terminal import bar
from lmworks.watch import ledger
from lmworks.watch.ledger import LEDGER, RunLock, read_ledger

SEAL = "copied.json"
_DATA = [stage for stage in STAGES if stage.name in ("corpus", "shards")]  # the tokenizer is in `run.gz`
_NAME = re.compile(r"(?!.*(?:^|/)\.)[^\0\n]{1,1000}")
_THREADS = 8
_LARGEST = 1 << 31  # bytes of a packed bundle: the metrics of a million steps have some 100 MB

Report = Callable[[str], None]


def copy_run(run_dir: Path, url: str, report: Report) -> None:
    """Copy a run that is not running: corpus and shards if they are done, and its newest and final checkpoints with the run's small
    files.

    Files that are already there and equal are not sent again, so an interrupted copy resumes.
    """
    require_run(run_dir)
    require_writable(url, "copy")
    remote = Store(url, "copy")
    with RunLock(run_dir), explain_storage_errors(url, "copy"):
        for stage in _DATA:
            if (read_stamp(run_dir / stage.folder) or {}).get("done"):
                report(f"{stage.name}: {_copy_stage(run_dir, remote, stage)}")
        for trained in MODEL_STAGES:
            place = run_dir / trained.checkpoints
            newest, _ = listing.newest_good(place)
            if newest is not None:
                to = f"{remote.url}/{place.relative_to(run_dir)}"
                final = final_checkpoint_of(newest, listing.read_meta(newest)["meta"])
                if (estimate := listing.newest_good(place / ewc_folder(str(_phase_of(newest))))[0]) is not None:
                    copy_checkpoint(estimate, f"{to}/{estimate.parent.name}")
                for one in (*([final] if final != newest and manifest.problem(final) is None else []), newest):
                    copied = copy_checkpoint(one, to, run_files=partial(run_files_of, run_dir, place))
                    report(f"{trained.stage}: {one.name} {'copied' if copied else 'already there'}")


def _steps(remote: Store, folder: str) -> list[str]:
    """Names of the checkpoints in a folder, newest first."""
    return sorted(filter(listing.is_name, remote.names(folder)), key=lambda name: listing.step_of(Path(name)), reverse=True)


def _copy_stage(run_dir: Path, remote: Store, stage: Stage) -> str:
    paths = {STAMP: run_dir / stage.folder / STAMP}
    for name in (read_stamp(run_dir / stage.folder) or {}).get("outputs", {}):
        paths[name] = run_dir / stage.folder / name
    files = {name: Entry(path.stat().st_size, manifest.hash_file(path)) for name, path in paths.items()}
    seal = _seal_bytes(files)
    if remote.document(f"{stage.folder}/{SEAL}", manifest.MOST_DOCUMENT) == seal:
        return "already there"
    remote.remove(f"{stage.folder}/{SEAL}")
    with bar(f"copying {stage.name}", sum(entry.bytes for entry in files.values())) as progress:

        def put(name: str) -> None:
            remote.put(paths[name], f"{stage.folder}/{name}", files[name])
            progress.advance(files[name].bytes)

        manifest.parallel(put, sorted(files), _THREADS)
    remote.write(f"{stage.folder}/{SEAL}", seal)
    return "copied"


def _seal_bytes(files: Mapping[str, Entry]) -> bytes:
    return json.dumps({name: asdict(files[name]) for name in sorted(files)}, indent=1).encode() + b"\n"


def restore_run(url: str, run_dir: Path, report: Report) -> None:
    """Restore a run directory from a copy: the newest good checkpoints, the run's small files, and corpus and shards if they were copied.

    The next `lmworks run` makes what is missing and resumes. Raises `UserError` if `run_dir` is not empty or the copy has
    no good checkpoint.
    """
    if run_dir.is_symlink() or (run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir()))):
        raise UserError(f"{run_dir} is not empty; restore into a new directory")
    remote, aside = Store(url, "restore"), run_dir.with_name(f".{run_dir.name}.restored")
    with explain_os_errors(run_dir), explain_storage_errors(url, "restore"):
        shutil.rmtree(aside, ignore_errors=True)
        try:
            found = [_restore_checkpoint(remote, aside, trained, report) for trained in MODEL_STAGES]
            if not any(found):
                raise UserError(f"{remote.url} has no complete checkpoint of a run, so nothing is restored")
            for stage in _DATA:
                _restore_stage(remote, aside, stage, report)
            if run_dir.is_dir():
                run_dir.rmdir()
            os.replace(aside, run_dir)
            sync_directory(run_dir.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _restore_checkpoint(remote: Store, to: Path, trained: ModelStage, report: Report) -> bool:
    """Restore the newest checkpoint that is good and was not rolled back, and the files of the run; False if there is none."""
    place, name, stage = to / trained.checkpoints, trained.checkpoints, trained.stage
    steps = _steps(remote, name)
    if not steps:
        return False
    packed = to / BUNDLE
    try:
        remote.fetch(f"{name}/{BUNDLE}", packed, _LARGEST)
    except FileNotFoundError:
        raise UserError(f"{remote.url}/{name} has no {BUNDLE}, so it is not a copy of a run") from None
    except ValueError as error:
        raise UserError(f"{remote.url}/{name} is not a copy of a run: {error}") from None
    files = to / "files"
    unpack(packed, files)
    packed.unlink()
    # files saved with the checkpoints of a later stage are newer
    shutil.copytree(files, to, copy_function=os.replace, dirs_exist_ok=True)
    shutil.rmtree(files)
    history = ledger.rollbacks(read_ledger(to / LEDGER), stage)
    for step in steps:
        reason = _fetch_checkpoint(remote, f"{name}/{step}", place / step, history)
        if reason is None:
            report(f"{stage}: {step}")
            _restore_final(remote, place / step, steps, history, trained, report)
            _restore_ewc(remote, place / step, trained, report)
            return True
        report(f"{stage}: {step} is not used: {reason}")
        shutil.rmtree(place / step, ignore_errors=True)
    return False


def _restore_final(
    remote: Store, newest: Path, steps: list[str], history: list[ledger.Rollback], trained: ModelStage, report: Report
) -> None:
    """Restore the checkpoint with the weights of the stage, if it is not the newest."""
    final = final_checkpoint_of(newest, listing.read_meta(newest)["meta"])
    if final == newest:
        return
    reason = "it is not in the copy"
    if final.name in steps and (reason := _fetch_checkpoint(remote, f"{trained.checkpoints}/{final.name}", final, history) or "") == "":
        report(f"{trained.stage}: {final.name}, whose weights are those of the stage")
        return
    report(f"{trained.stage}: {final.name}, whose weights are those of the stage, is not used: {reason}")
    shutil.rmtree(final, ignore_errors=True)


def _phase_of(checkpoint: Path) -> Any:
    """The phase of training that a checkpoint belongs to, as its meta says."""
    return listing.read_meta(checkpoint)["meta"].get("phase")


def _restore_ewc(remote: Store, newest: Path, trained: ModelStage, report: Report) -> None:
    """Restore what elastic weight consolidation estimated when the phase of the newest checkpoint began."""
    folder = ewc_folder(str(_phase_of(newest)))
    for step in _steps(remote, f"{trained.checkpoints}/{folder}")[:1] if _NAME.fullmatch(folder) and "/" not in folder else ():
        to = newest.parent / folder / step
        reason = _fetch_checkpoint(remote, f"{trained.checkpoints}/{folder}/{step}", to, [])
        report(f"{trained.stage}: {folder}" + (f" is not used: {reason}" if reason else ""))
        if reason is not None:
            shutil.rmtree(to, ignore_errors=True)


def _fetch_checkpoint(remote: Store, name: str, to: Path, history: list[ledger.Rollback]) -> str | None:
    """Download a checkpoint into `to`; returns why it cannot be used, or None if it is good."""
    try:
        remote.fetch(f"{name}/{manifest.NAME}", to / manifest.NAME, manifest.MOST_DOCUMENT)
        files = manifest.entries(to)
        remote.fetch(f"{name}/{listing.META}", to / listing.META, files[listing.META].bytes)
        if (reason := manifest.differing(to, {listing.META: files[listing.META]})) is not None:
            return reason
        if ledger.undone(listing.step_of(to), len(listing.read_meta(to)["meta"].get("rollbacks", [])), history):
            return "it was rolled back"
        _fetch_all(remote, name, to, {one: entry for one, entry in files.items() if one != listing.META})
    except FileNotFoundError as error:
        return f"it is not complete ({Path(str(error.filename or error)).name} is missing)"
    except (ValueError, KeyError) as error:
        return str(error)
    reason = manifest.problem(to)
    sync_directory(to)
    return reason


def _restore_stage(remote: Store, to: Path, stage: Stage, report: Report) -> None:
    data = remote.document(f"{stage.folder}/{SEAL}", manifest.MOST_DOCUMENT)
    if data is None:
        report(f"{stage.name}: not in the copy; the next run will make it again")
        return
    try:
        files = {name: Entry(int(entry["bytes"]), str(entry["blake3"])) for name, entry in json.loads(data).items()}
        if _seal_bytes(files) != data or any(not _NAME.fullmatch(name) or name.startswith("/") for name in files):
            raise ValueError(f"{SEAL} has been changed")
        _fetch_all(remote, stage.folder, to / stage.folder, files)
        reason = manifest.differing(to / stage.folder, files)
    except FileNotFoundError as error:
        reason = f"{Path(str(error.filename or error)).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error)
    if reason is None:
        report(f"{stage.name}: {len(files)} files")
        return
    report(f"{stage.name}: the copy is damaged ({reason}); the next run will make it again")
    shutil.rmtree(to / stage.folder, ignore_errors=True)


def _fetch_all(remote: Store, name: str, to: Path, files: Mapping[str, Entry]) -> None:
    with bar(f"fetching {name}", sum(entry.bytes for entry in files.values())) as progress:

        def fetch(one: str) -> None:
            remote.fetch(f"{name}/{one}", to / one, files[one].bytes)
            progress.advance(files[one].bytes)

        manifest.parallel(fetch, sorted(files), _THREADS)
