"""Files at URLs, such as s3://bucket/folder, opened by fsspec, with errors of one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmworks.credentials import reveal
from lmworks.errors import UserError
from lmworks.masking import mask

# Object stores: the top directory is a bucket, which the user must create; other directories are only prefixes of object names.
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "r2")
_PROBE = ".lmworks-can-write"


def fsspec(what: str) -> Any:
    """The module fsspec; `what` is named in the error if it is not installed."""
    try:
        import fsspec as module
    except ImportError:
        raise UserError(f"{what} needs fsspec: pip install 'lmworks[data]'") from None
    return module


def filesystem(url: str, what: str) -> tuple[Any, str]:
    """The file system of a directory or URL, and the path in it. A `UserError` that begins with `what` for an unsupported URL."""
    core = fsspec(what).core
    try:
        system, path = core.url_to_fs(reveal(url))
    except (ValueError, ImportError) as error:
        raise UserError(f"{what}: cannot use {mask(url)} ({_line(error)})") from None
    return system, str(path).rstrip("/")


def make_directory(system: Any, path: str) -> None:
    """Create a directory and its parents, where the file system has directories. Buckets are not created, in case their name is
    misspelled.
    """
    protocols = (system.protocol,) if isinstance(system.protocol, str) else system.protocol
    if not set(protocols) & set(_BUCKETS):
        system.makedirs(path, exist_ok=True)


def require_writable(url: str, what: str) -> None:
    """Raise `UserError` if nothing can be written below a URL. A storage that does not answer now may answer later: no error."""
    system, path = filesystem(url, what)
    with explain_storage_errors(url, what, definite=True):
        make_directory(system, path)
        system.pipe_file(f"{path}/{_PROBE}", b"lmworks tested that it can write here\n")


def connection_errors() -> tuple[type[Exception], ...]:
    """The exceptions that a lost connection raises, including those of imported network packages."""
    names = (("aiohttp", "ClientError"), ("httpx", "HTTPError"), ("requests", "RequestException"), ("botocore.exceptions", "BotoCoreError"))
    found = tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)
    return (ConnectionError, TimeoutError, FileNotFoundError, PermissionError, *found)


@contextmanager
def explain_storage_errors(url: str, what: str, definite: bool = False) -> Iterator[None]:
    """Convert errors of a storage to a `UserError` that begins with `what`; with `definite` only errors that waiting does not resolve."""
    url = mask(url)
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{what}: {url} does not exist; check the bucket or folder") from None
    except Exception as error:  # the exceptions of a package are known once it is imported
        if not isinstance(error, (OSError, *connection_errors())):
            raise
        if isinstance(error, PermissionError) or getattr(error, "status", None) in (401, 403):
            mend = "check the key or password and its permissions"
            raise UserError(f"{what}: {url} denies access ({_line(error)}); {mend}") from None
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            raise UserError(f"{what}: {url} needs credentials, and none were found ({_line(error)})") from None
        if definite:
            return
        raise UserError(f"{what}: {url} does not answer ({_line(error)}); run the same command again") from None


def _line(error: Exception) -> str:
    return mask(" ".join(f"{error or type(error).__name__}".split())[:300])
