"""Errors while a file is read: a damaged file loses its remaining rows; a lost connection stops the run."""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache

from lmworks.corpus.readers.items import Item, printable, quarantined
from lmworks.corpus.readers.opening import DecompressionBomb
from lmworks.errors import UserError
from lmworks.masking import mask
from lmworks.storage import connection_errors


@lru_cache(maxsize=1)
def damage_errors() -> tuple[type[Exception], ...]:
    """What a damaged file raises where it is read."""
    import pyarrow as pa

    known: tuple[type[Exception], ...]
    # raised by zipfile and tarfile for unknown compression, invalid offsets and numbers
    known = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, NotImplementedError, pa.ArrowException)
    try:
        import zstandard
    except ImportError:
        return known
    return (*known, zstandard.ZstdError)


def quarantine_errors(rows: Iterator[Item], path: str) -> Iterator[Item]:
    """Yield rows; if the file is damaged, yield a quarantined item and stop. Raises UserError if a remote file cannot be read."""
    try:
        yield from rows
    except DecompressionBomb as error:
        yield quarantined("bomb", printable(path), str(error))
    except (*damage_errors(), *connection_errors()) as error:
        if "://" in path and (isinstance(error, connection_errors()) or getattr(error, "errno", None) is not None):
            raise UserError(f"cannot continue reading {path}: {str(error) or type(error).__name__}; run the same command again") from None
        yield quarantined("damaged_file", printable(path), mask(str(error)))
