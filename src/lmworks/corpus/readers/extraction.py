"""Extraction of text from HTML and LaTeX, in a process with limits."""

from __future__ import annotations

from importlib.util import find_spec
from types import TracebackType

from lmworks.corpus.readers.items import Item, quarantined
from lmworks.errors import UserError
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied

_SECONDS = 20
_MEMORY = 4 << 30
_PACKAGES = {"html": "trafilatura", "latex": "pylatexenc"}


def require(name: str) -> None:
    """Raise UserError if the parser of this kind of markup is not installed."""
    if name in _PACKAGES and find_spec(_PACKAGES[name]) is None:
        raise UserError(f"reading {name} needs {_PACKAGES[name]}: pip install 'lmworks[web]'")


class Extractor:
    """A context manager whose `text` may be called any number of times. Raises UserError if the packages (extra `web`) are not
    installed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._convert = LimitedProcess(f"lmworks.corpus.markup.{name}:extractor", _SECONDS, _MEMORY)

    def __enter__(self) -> Extractor:
        require(self._name)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._convert.close()

    def text(self, data: bytes, origin: str, consumed: int) -> Item:
        """The text in `data`, or a quarantined item: `no_text`, `hangs_parser`, `kills_parser`."""
        try:
            text = self._convert(data).decode()
        except CallFailed as error:
            return quarantined("no_text", origin, str(error), consumed)
        except ProcessDied as error:
            return quarantined("hangs_parser" if error.hangs else "kills_parser", origin, data, consumed)
        except OSError:
            raise UserError(f"the parser of {self._name} does not start; python -c 'import {_PACKAGES[self._name]}' says why") from None
        return quarantined("no_text", origin, text or data, consumed) if not text.strip() else Item(text, origin, consumed)
