"""Files behind URLs, such as s3://bucket/folder: opened by fsspec, with errors of one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmworks.credentials import reveal
from lmworks.errors import UserError
from lmworks.masking import mask

# Where a directory at the top is a bucket, which is a person's to make, and those below it are nothing but the names of objects.
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2")
_PROBE = ".lmworks-can-write"


def fsspec(what: str) -> Any:
    """The package that opens URLs; `what` needs it."""
    try:
        import fsspec as module
    except ImportError:
        raise UserError(f"{what} needs fsspec: pip install 'lmworks[data]'") from None
    return module


def filesystem(url: str, what: str) -> tuple[Any, str]:
    """The file system of a directory or URL, and the path in it. `UserError` that begins with `what` for a URL that nothing here opens."""
    core = fsspec(what).core
    try:
        system, path = core.url_to_fs(reveal(url))
    except (ValueError, ImportError) as error:
        raise UserError(f"{what}: cannot use {mask(url)} ({_line(error)})") from None
    return system, str(path).rstrip("/")


def make_directory(system: Any, path: str) -> None:
    """A directory with those above it, where there are any. A bucket whose name was misspelled is not made."""
    protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    if not set(protocols) & set(_BUCKETS):
        system.makedirs(path, exist_ok=True)


def require_writable(url: str, what: str) -> None:
    """Raise `UserError` if nothing can be written below a URL. A storage that does not answer today may do so later: no error."""
    system, path = filesystem(url, what)
    with explain_storage_errors(url, what, definite=True):
        make_directory(system, path)
        system.pipe_file(f"{path}/{_PROBE}", b"lmworks tried here whether it can write\n")


def connection_errors() -> tuple[type[Exception], ...]:
    """What a connection that is lost raises, with the network packages that are in use."""
    names = (("aiohttp", "ClientError"), ("httpx", "HTTPError"), ("requests", "RequestException"), ("botocore.exceptions", "BotoCoreError"))
    found = tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)
    return (ConnectionError, TimeoutError, FileNotFoundError, PermissionError, *found)


@contextmanager
def explain_storage_errors(url: str, what: str, definite: bool = False) -> Iterator[None]:
    """Turn what a storage raises into a `UserError` of one line that begins with `what`; with `definite` only what no waiting will mend."""
    url = mask(url)
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{what}: there is no {url}; see that the bucket or folder exists") from None
    except Exception as error:  # the packages' own are known once they are in use
        if not isinstance(error, (OSError, *connection_errors())):
            raise
        if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
            mend = "see which key or password is used, and what it may do"
            raise UserError(f"{what}: {url} refuses access ({_line(error)}); {mend}") from None
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            raise UserError(f"{what}: {url} needs a key, and there is none ({_line(error)})") from None
        if definite:
            return
        raise UserError(f"{what}: {url} does not answer ({_line(error)}); run the same command again") from None


def _line(error: Exception) -> str:
    return mask(" ".join(f"{error or type(error).__name__}".split())[:300])
