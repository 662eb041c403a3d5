"""What may go wrong while a file is read, and is the file's fault."""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache

from lmworks.corpus.items import Item, broken, shown
from lmworks.corpus.opening import Bomb
from lmworks.errors import UserError


@lru_cache(maxsize=1)
def _damages() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    known: tuple[type[Exception], ...]
    known = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, pa.ArrowException)
    try:
        import zstandard
    except ImportError:
        return known
    return (*known, zstandard.ZstdError)


def guarded(rows: Iterator[Item], path: str) -> Iterator[Item]:
    """Rows until the file breaks off. A damaged file costs its rest, which is counted; a lost connection stops the run."""
    try:
        yield from rows
    except Bomb as error:
        yield broken("bomb", shown(path), str(error))
    except _damages() as error:
        if "://" in path and isinstance(error, OSError) and type(error).__name__ != "BadGzipFile":
            raise UserError(f"cannot go on reading {path}: {str(error) or type(error).__name__}; run the same command again") from None
        yield broken("damaged_file", shown(path), str(error))
