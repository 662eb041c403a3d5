"""Extraction of text from HTML and LaTeX, in a process with limits.

The text of a web page as Markdown: headings, lists, tables and code are kept; navigation and boilerplate are removed.

The text of a LaTeX document: sections become Markdown headings, formulas are kept, preamble, comments and bibliography are removed.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from lmworks.corpus.read.part import Item, quarantined
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
        self._convert = LimitedProcess(f"lmworks.corpus.read.markup:{name}_extractor", _SECONDS, _MEMORY)

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


_CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_ESCAPE = re.compile(r"\\([\\`*_{}\[\]()#+.!<>|~-])")
_DECLARED = re.compile(rb"<meta[^>]{0,200}?charset\s{0,9}=\s{0,9}[\"']?\s{0,9}([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
# matches only at the beginning of a run of spaces; otherwise the search would be quadratic in the length of the run
_PERMALINK = re.compile(r"(?<![ \t])[ \t]*¶[ \t]*$", re.MULTILINE)


def html_extractor() -> Callable[[bytes], bytes]:
    """The function from a page to its text in UTF-8 (b"" if it has none). Raises ImportError if trafilatura (extra `web`) is not
    installed.
    """
    import logging

    import trafilatura

    logging.disable()

    def extract(data: bytes) -> bytes:
        found = trafilatura.extract(decoded(data), fast=True, favor_precision=True, include_comments=False, output_format="markdown")
        return unescaped(found or "").encode("utf-8", "replace")

    return extract


def decoded(data: bytes) -> str | bytes:
    """A page as text, decoded by its byte order mark, as UTF-8, or with its declared encoding; unchanged bytes if none of these works, so
    that trafilatura detects the encoding.

    trafilatura would detect first, and its result depends on the installed detectors.
    """
    declared = _DECLARED.search(data, 0, 4096)
    marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    for encoding in ["utf-16"] if marked else ["utf-8-sig", *([declared[1].decode("ascii")] if declared else [])]:
        try:
            text, _ = codecs.getdecoder(encoding)(data)
        except (LookupError, ValueError):
            continue
        if isinstance(text, str):  # a codec such as hex makes bytes
            return text
    return data


def unescaped(markdown: str) -> str:
    """Markdown without backslashes in prose before characters with a meaning in Markdown."""
    pieces = _CODE.split(_PERMALINK.sub("", markdown))
    return "".join(piece if place % 2 else _ESCAPE.sub(r"\1", piece) for place, piece in enumerate(pieces))


_BODY = re.compile(r"\\begin\s*\{document\}(.*?)(?:\\end\s*\{document\}|\Z)", re.DOTALL)
_TITLE = re.compile(r"\\title\s*(?:\[[^\]]*\])?\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_COMMENT = re.compile(r"(?<!\\)((?:\\\\)*)%[^\n]*")
_BIBLIOGRAPHY = re.compile(r"\\begin\s*\{thebibliography\}.*?(?:\\end\s*\{thebibliography\}|\Z)", re.DOTALL)
_VERBATIM = re.compile(r"\\begin\{(verbatim\*?|lstlisting|minted|Verbatim)\}((?:\[[^\]]*\])?(?:\{[^}]*\})?)\n?(.*?)\\end\{\1\}", re.DOTALL)
_HEADING = re.compile(r"(?=\\(?:part|chapter|(?:sub)*section)\b\*?\s*[\[{])")
_MACRO = re.compile(r"\\(?:(?:re)?newcommand\*?\s*\{?\\([A-Za-z]+)\}?|def\s*\\([A-Za-z]+))\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_LONGEST_MACRO = 200
_MOST_GROWTH = 4
_INDENT = re.compile(r"^(#+ [^\n]*\n\n)[ \t]+", re.MULTILINE)
_BLANK = re.compile(r"(?<![ \t])[ \t]*\n(?:[ \t]*\n){2,}")  # matches only at the beginning of a run of spaces; otherwise quadratic


def latex_extractor() -> Callable[[bytes], bytes]:
    """The function from LaTeX source to text in UTF-8. Raises ImportError if pylatexenc (extra `web`) is not installed."""
    import logging

    from pylatexenc.latex2text import LatexNodes2Text, MacroTextSpec, get_default_latex_context_db

    logging.disable()

    def heading(level: int) -> Any:
        return lambda node, l2tobj: f"\n\n{'#' * level} {l2tobj.node_arg_to_text(node, 2).strip()}\n\n"

    levels = {"part": 1, "chapter": 1, "section": 2, "subsection": 3, "subsubsection": 4}
    quiet = ["label", "today", "maketitle", "tableofcontents", "includegraphics", "bibliography", "bibliographystyle", "vspace", "hspace"]
    known = get_default_latex_context_db()
    known.add_context_category(
        "lmworks",
        prepend=True,
        macros=[
            *(MacroTextSpec(name, simplify_repl=heading(level)) for name, level in levels.items()),
            *(MacroTextSpec(name, simplify_repl="") for name in quiet),
            *(MacroTextSpec(name, simplify_repl=_key) for name in ("cite", "citet", "citep", "ref", "eqref", "autoref", "cref", "Cref")),
        ],
    )
    converter = LatexNodes2Text(known, math_mode="verbatim", keep_braced_groups=False, strict_latex_spaces=False)

    def extract(data: bytes) -> bytes:
        return to_text(decoded_latex(data), converter.latex_to_text).encode("utf-8", "replace")

    return extract


def _key(node: Any, l2tobj: Any) -> str:
    """The key of a citation or reference, in brackets."""
    arguments = [argument for argument in node.nodeargs or () if argument is not None] if node.nodeargd else []
    return f"[{arguments[-1].latex_verbatim().strip('{}[]')}]" if arguments else ""


def decoded_latex(data: bytes) -> str:
    """Decode as UTF-8, or as Latin-1 for older sources."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def to_text(source: str, convert: Callable[[str], str]) -> str:
    """The document with `convert` applied to each section separately, because its cost is quadratic in the length."""
    source = source.replace("\r\n", "\n")
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(f"\n```\n{match[3].rstrip()}\n```\n")
        return f"\n\nVERBATIM{len(kept) - 1}X\n\n"

    source = _COMMENT.sub(r"\1", _VERBATIM.sub(keep, source))
    title, body = _TITLE.search(source), _BODY.search(source)
    text = _expanded(body[1] if body else source, source)
    text = _BIBLIOGRAPHY.sub("", text)
    pieces = [f"# {convert(title[1]).strip()}"] if title else []
    pieces += [convert(section).strip() for section in _HEADING.split(text)]
    joined = "\n\n".join(filter(None, pieces))
    joined = re.sub(r"VERBATIM(\d{1,9})X", lambda match: kept[int(match[1])] if int(match[1]) < len(kept) else match[0], joined)
    return _INDENT.sub(r"\1", _BLANK.sub("\n\n", joined.replace("\xa0", " "))).strip()


def _expanded(body: str, source: str) -> str:
    """The body with the document's own macros without arguments expanded, once."""
    found = ((match[1] or match[2], match[3]) for match in _MACRO.finditer(source))
    macros = {name: meaning for name, meaning in found if len(meaning) <= _LONGEST_MACRO and "#" not in meaning}
    if not macros:
        return body
    body = _MACRO.sub("", body)
    names = "|".join(sorted(map(re.escape, macros), key=len, reverse=True))
    used = re.compile(rf"\\({names})(?![A-Za-z])")
    grown = sum(len(macros[match[1]]) for match in used.finditer(body))
    return used.sub(lambda match: macros[match[1]], body) if grown <= _MOST_GROWTH * len(body) else body
