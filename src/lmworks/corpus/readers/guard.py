"""Errors while a file is read: damage loses the rest of the file, a lost connection stops the run."""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache

from lmworks.corpus.readers.items import Item, broken, shown
from lmworks.corpus.readers.opening import Bomb
from lmworks.errors import UserError
from lmworks.masking import mask
from lmworks.storage import connection_errors


@lru_cache(maxsize=1)
def _damage() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    known: tuple[type[Exception], ...]
    # of zipfile and tarfile: unknown compression, impossible offsets and numbers
    known = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, NotImplementedError, pa.ArrowException)
    try:
        import zstandard
    except ImportError:
        return known
    return (*known, zstandard.ZstdError)


def guarded(rows: Iterator[Item], path: str) -> Iterator[Item]:
    """Rows until the file breaks off. Raises UserError when a URL does, which is nobody's data."""
    try:
        yield from rows
    except Bomb as error:
        yield broken("bomb", shown(path), str(error))
    except (*_damage(), *connection_errors()) as error:
        if "://" in path and (isinstance(error, connection_errors()) or getattr(error, "errno", None) is not None):
            raise UserError(f"cannot go on reading {path}: {str(error) or type(error).__name__}; run the same command again") from None
        yield broken("damaged_file", shown(path), mask(str(error)))
