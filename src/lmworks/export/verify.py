"""What passed the comparison is what is used: a report holds size and SHA-256 of every file, and readers verify the files against it.

`parity.json` lies in each folder of an export, so a copied folder keeps it, and once more above them with the records of all. A folder
without a report is somebody else's and is taken as it is.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lmworks import machine
from lmworks.errors import UserError
from lmworks.files import explain_damage, read_json, sha256_file

REPORT = "parity.json"
PASSED, REFUSED = "passed", "refused"
_PROSE = ("README.md",)  # for people: may be edited
_WEIGHTS = (".safetensors", ".gguf")  # an engine reads all of them that it finds


def file_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Size in bytes and SHA-256 of every file below `folder` by its relative path, except reports and prose."""
    names = [name for name in _names(folder) if Path(name).name not in (REPORT, *_PROSE)]
    with ThreadPoolExecutor(machine.threads()) as pool:  # hashing releases the interpreter's lock
        hashes = list(pool.map(lambda name: sha256_file(folder / name), names))
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": found} for name, found in zip(names, hashes, strict=True)}


def verify_export(path: Path) -> None:
    """Verify a folder, or one file of it, against the report beside the files. Does nothing where there is no report.

    Raises `UserError` that names the first file that is missing, of another size, changed, or of weights that the report does not know;
    and for a folder whose comparison was refused. Reads every byte: about a second for each GB and core.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else path
    report = folder / REPORT
    if not report.is_file():
        return
    with explain_damage(report, "export the model again"):
        found = read_json(report)
        if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
            return  # another program's, or of a version that kept no hashes
        if found.get("verdict") != PASSED:
            raise UserError(f"{folder} was refused by the export: {found.get('reason', 'no reason given')}; see {report}")
        records = {str(name): (int(one["bytes"]), str(one["sha256"])) for name, one in found["files"].items()}
    only = None if path == folder else path.name
    verify_files(folder, records, report, only)


def verify_files(folder: Path, records: dict[str, tuple[int, str]], report: Path, only: str | None = None) -> None:
    """Raise `UserError` unless each file of `folder` (or `only` that one) has the size and SHA-256 that `report` has for it."""
    for name in records:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise UserError(f"{report} names the file {name[:100]!r}, which is not in {folder}; export the model again")
    places = {Path(name).parent for name in records}
    weights = (name for name in _names(folder) if name.endswith(_WEIGHTS) and Path(name).parent in places and only in (None, name))
    strange = next((name for name in weights if name not in records), None)
    if strange is not None:
        raise UserError(f"{folder / strange} has no entry in {report}: it was never compared; remove it, or export the model again")
    wanted = {name: record for name, record in records.items() if only in (None, name)}
    for name, (size, _) in wanted.items():  # before all is read
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing; {report} names it among the files that passed: export the model again")
        if (is_now := file.stat().st_size) != size:
            raise _changed(file, report, f"{is_now:,} bytes instead of {size:,}")
    with ThreadPoolExecutor(machine.threads()) as pool:
        hashes = pool.map(lambda name: sha256_file(folder / name), wanted)
        for (name, (_, digest)), found in zip(wanted.items(), hashes, strict=True):
            if found != digest:
                raise _changed(folder / name, report, f"SHA-256 {found[:12]}... instead of {digest[:12]}...")


def _changed(file: Path, report: Path, how: str) -> UserError:
    return UserError(
        f"{file} is not the file that passed ({how}): it is damaged or was changed; put a good copy there or export the model again, or, "
        f"if the change is meant, delete {report}, and nothing is promised of it"
    )


def _names(folder: Path) -> list[str]:
    """Relative paths of all files below `folder`, in order."""
    found = []
    for at, directories, files in os.walk(folder):
        directories[:] = [one for one in directories if not one.startswith(".")]
        found += [str((Path(at) / name).relative_to(folder)) for name in files if not name.startswith(".") and (Path(at) / name).is_file()]
    return sorted(found)
