"""Verified files: a report beside files holds size and SHA-256 of each, and readers check the files against it before they use them.

Reports are `parity.json` of an export, which lies in each folder of it, so that a copied folder keeps it, and `certificate.json` of a
quantized model. A folder without a report was made by others and is taken as it is.

A hash is remembered as long as a file stays the same: with device, inode, size and both times of the file. The time of the last change of
an inode cannot be set by programs, so that a file which was written to and given its old time is read again. Corruption on the disk changes
no time: remove the folder of remembered hashes to read everything again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.files import cache_directory, explain_damage, read_json, write_text
from lmworks.ui.terminal import bar

_WORTH = 64 << 20  # bytes: what takes less to read than some hundredths of a second is read again
_SETTLED = 1.0  # seconds: a file that changed later could change once more within the resolution of its times
_BLOCK = 1 << 22


def hash_files(paths: Iterable[Path]) -> dict[Path, str]:
    """Hex SHA-256 of each file. Files that were hashed before and are unchanged since are not read; the others show progress.

    Raises `OSError` for a file that cannot be read.
    """
    found, unknown = {}, []
    for path in paths:
        known = _remembered(path)
        if known is None:
            unknown.append(path)
        else:
            found[path] = known
    total = sum(path.stat().st_size for path in unknown)
    with bar("verify files (MB)", total / 1e6) as progress, ThreadPoolExecutor(machine.threads()) as pool:  # hashing releases the lock

        def work(path: Path) -> str:
            digest, before, block = hashlib.sha256(), _identity(path), memoryview(bytearray(_BLOCK))
            with open(path, "rb", buffering=0) as handle:
                while count := handle.readinto(block):
                    digest.update(block[:count])
                    progress.advance(count / 1e6)
            _remember(path, before, digest.hexdigest())
            return digest.hexdigest()

        found |= dict(zip(unknown, pool.map(work, unknown), strict=True))
    return found


def directory() -> Path:
    """The folder of remembered hashes: $LMWORKS_CACHE/hashes, otherwise ~/.cache/lmworks/hashes."""
    return cache_directory("hashes")


def _identity(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _place(path: Path) -> Path:
    return directory() / (hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32] + ".json")


def _remembered(path: Path) -> str | None:
    try:
        known = json.loads(_place(path).read_text(encoding="utf-8"))
        return str(known["sha256"]) if known["identity"] == _identity(path) else None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # none, damaged, or no home
        return None


def _remember(path: Path, before: list[int], digest: str) -> None:
    """Without effect if the file has changed while it was read or just before, or if there is no place for it."""
    try:
        if before[2] >= _WORTH and _identity(path) == before and time.time_ns() - max(before[3:]) > _SETTLED * 1e9:
            write_text(_place(path), json.dumps({"identity": before, "sha256": digest}))
    except Exception:  # remembering saves time and nothing else
        return


REPORT, CERTIFICATE = "parity.json", "certificate.json"
PASSED, REFUSED = "passed", "refused"
_PROSE = ("README.md",)  # for people: may be edited
_ABOUT = ("tensors.json",)  # beside a certificate
_WEIGHTS = (".safetensors", ".gguf")  # an engine reads all of them that it finds
_AGAIN = {REPORT: "export the model again", CERTIFICATE: "quantize the model again"}
Records = dict[str, tuple[int, str]]
"""Size in bytes and SHA-256 by relative path."""


def file_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file below `folder` by its relative path, except reports and prose."""
    files = [folder / name for name in _names(folder) if Path(name).name not in (REPORT, CERTIFICATE, *_ABOUT, *_PROSE)]
    hashes = hash_files(files)
    return {str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": hashes[file]} for file in files}


def recorded(folder: Path) -> tuple[Path, Records] | None:
    """The report in `folder` and its records; None without a report, or for one without records, which another program wrote.

    Raises `UserError` for an export that was refused, or if the report is damaged.
    """
    for name, again in _AGAIN.items():
        report = folder / name
        if not report.is_file():
            continue
        with explain_damage(report, again):
            found = read_json(report)
            if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
                continue
            if name == REPORT and found.get("verdict") != PASSED:
                raise UserError(f"{folder} was refused by the export: {found.get('reason', 'no reason given')}; see {report}")
            return report, {str(file): (int(one["bytes"]), str(one["sha256"])) for file, one in found["files"].items()}
    return None


def verify_export(path: Path) -> None:
    """Verify a folder, or one file of it, against the report beside the files. Does nothing where there is no report.

    Raises `UserError` that names the first file that is missing, of another size, changed, or of weights that the report does not know;
    and for a folder whose comparison was refused. Reads every byte that was not read before (`file_hashes`): about a second for each GB
    and core.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else path
    if (found := recorded(folder)) is not None:
        verify_files(folder, found[1], found[0], None if path == folder else path.name)


def verify_files(folder: Path, records: Records, report: Path, only: str | None = None) -> None:
    """Raise `UserError` unless each file of `folder` (or `only` that one) has the size and SHA-256 that `report` has for it."""
    again = _AGAIN[report.name]
    for name in records:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise UserError(f"{report} names the file {name[:100]!r}, which is not in {folder}; {again}")
    places = {Path(name).parent for name in records}
    weights = (name for name in _names(folder) if name.endswith(_WEIGHTS) and Path(name).parent in places and only in (None, name))
    strange = next((name for name in weights if name not in records), None)
    if strange is not None:
        raise UserError(f"{folder / strange} has no entry in {report}: it was never compared; remove it, or {again}")
    wanted = {folder / name: record for name, record in records.items() if only in (None, name)}
    for file, (size, _) in wanted.items():  # before all is read
        if not file.is_file():
            raise UserError(f"{file} is missing; {report} names it among the files that passed: {again}")
        if (is_now := file.stat().st_size) != size:
            raise _changed(file, report, f"{is_now:,} bytes instead of {size:,}")
    for file, digest in hash_files(wanted).items():
        if digest != wanted[file][1]:
            raise _changed(file, report, f"SHA-256 {digest[:12]}... instead of {wanted[file][1][:12]}...")


def _changed(file: Path, report: Path, how: str) -> UserError:
    return UserError(
        f"{file} is not the file that passed ({how}): it is damaged or was changed; put a good copy there or {_AGAIN[report.name]}, or, "
        f"if the change is meant, delete {report}, and nothing is promised of it"
    )


def _names(folder: Path) -> list[str]:
    """Relative paths of all files below `folder`, in order."""
    found = []
    for at, directories, files in os.walk(folder):
        directories[:] = [one for one in directories if not one.startswith(".")]
        found += [str((Path(at) / name).relative_to(folder)) for name in files if not name.startswith(".") and (Path(at) / name).is_file()]
    return sorted(found)
