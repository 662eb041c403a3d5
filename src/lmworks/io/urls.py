"""Files at URLs, such as s3://bucket/folder, opened by fsspec, with errors of one line.

The credentials of URLs in a recipe, stored separately from the URLs.

A recipe contains masked URLs only (`hide`, called when a node is created), so everything that is written or printed from it (stamps,
reports, origins of documents, ledgers) is masked. Code that opens a URL gets the real one with `reveal`. If other processes or later
commands need the credentials, they are stored in a file that only its owner can read (`save`, `load`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json
from lmworks.io.masking import MASK, USER, map_strings, mask, mask_values

NAME = "url_credentials.json"
_MASKED_USER = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://{re.escape(MASK)}@[^\s/?#\"]*")
_MASKED_VALUE = re.compile(rf"[?&;][^=&;?#\s\"]+={re.escape(MASK)}")
_USER_AND_HOST = re.compile(USER.pattern + r"[^\s/?#\"]*")

# Masked text to real text: scheme, user and host, which covers all URLs of a host, and whole URLs with a secret query.
_known: dict[str, str] = {}


def found(text: str) -> dict[str, str]:
    """The secrets that `mask` removes from a text: masked text to real text."""
    masked = mask(text)
    if masked == text:
        return {}
    taken = {mask(real): real for real in (one[0] for one in _USER_AND_HOST.finditer(text)) if mask(real) != real}
    return taken | ({masked: text} if mask_values(text) != text else {})


def hide(value: Any) -> Any:
    """Mask a string, or all strings in lists and maps; the secrets are remembered for `reveal`."""

    def change(text: str) -> str:
        if "://" not in text:  # nearly all of a recipe
            return text
        _known.update(found(text))
        return mask(text)

    return map_strings(value, change)


def refuse_conflicting(value: Any) -> None:
    """Raise `UserError` if two strings in `value` differ only in their credentials, because masked they would be equal."""
    seen: dict[str, str] = {}

    def look(text: str) -> str:
        for masked, real in found(text).items():
            if seen.setdefault(masked, real) != real:
                raise UserError(f"{masked} is written with two different credentials; a recipe can have one for each host")
        return text

    map_strings(value, look)


def reveal(value: Any) -> Any:
    """The inverse of `hide`. Raises `UserError` for a URL whose credentials are not known here."""
    return map_strings(value, _reveal)


def _reveal(text: str) -> str:
    if text in _known:
        return _known[text]
    real = _MASKED_USER.sub(lambda one: _known.get(one[0], one[0]), text)
    if _MASKED_USER.search(real) or ("://" in real and _MASKED_VALUE.search(real)):
        raise UserError(f"the credentials of {text} are not known here: write them into the recipe, or give them with --set")
    return real


def save(folder: Path, value: Any) -> None:
    """Write the credentials that the strings of `value` need to a file in `folder` that only its owner can read; no file if they need
    none.
    """
    text = json.dumps(value, ensure_ascii=False)
    needed = {masked: real for masked, real in _known.items() if masked in text}
    if needed:
        write_json(folder / NAME, needed, private=True)
    else:
        (folder / NAME).unlink(missing_ok=True)


def load(folder: Path) -> None:
    """Load credentials that `save` wrote in `folder`, if any. Credentials of the current recipe take precedence."""
    path = folder / NAME
    if os.path.exists(path):  # os.path.exists returns False for invalid paths
        kept = read_json(path)
        if not isinstance(kept, dict) or not all(isinstance(real, str) for real in kept.values()):
            raise UserError(f"{path} is not what lmworks wrote; delete it and run the recipe again")
        for masked, real in kept.items():
            _known.setdefault(masked, real)


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
