"""Extraction of text from HTML and LaTeX, in a process with limits.

The text of a web page as Markdown: headings, lists, tables and code are kept; navigation and boilerplate are removed.

The text of a LaTeX document: sections become Markdown headings, formulas are kept, preamble, comments and bibliography are removed.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from lmworks.corpus.read.opening import decode_text, encodings, marked_encoding
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
        if text.count("\N{REPLACEMENT CHARACTER}") > _MOST_REPLACED * len(text):
            return quarantined("bad_utf8", origin, text, consumed)
        return quarantined("no_text", origin, text or data, consumed) if not text.strip() else Item(text, origin, consumed)


_CODE = re.compile(r"(^```.*?^```[^\n]*$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
_ESCAPE = re.compile(r"\\([\\`*_{}\[\]()#+.!<>|~-])")
_DECLARED = re.compile(
    rb"(?:<meta[^>]{0,200}?charset|<\?xml[^>]{0,200}?encoding)\s{0,9}=\s{0,9}[\"']?\s{0,9}([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE
)
# control characters and references to them, which are letters and quotes of Windows-1252 (https://html.spec.whatwg.org)
_CONTROLS = re.compile("[\x80-\x9f]|&#(?:0{0,9}1[2-5][0-9](?![0-9])|x0{0,9}[89][0-9a-f](?![0-9a-f]));?", re.IGNORECASE)
_MOST_REPLACED = 0.01  # characters of a text that take the place of bytes in no known encoding
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
        page = decoded(data)
        text = page if isinstance(page, str) else trafilatura.utils.decode_file(page)
        found = trafilatura.extract(with_letters(text), fast=True, favor_precision=True, include_comments=False, output_format="markdown")
        return unescaped(found or "").encode("utf-8", "replace")

    return extract


def decoded(data: bytes) -> str | bytes:
    """A page as text, decoded by its byte order mark, as UTF-8, or with its declared encoding; unchanged bytes if none of these works, so
    that trafilatura detects the encoding.

    trafilatura would detect first, and its result depends on the installed detectors.
    """
    declared = _DECLARED.search(data, 0, 4096)
    text = decode_text(data, declared[1].decode("ascii") if declared else "")
    return data if text is None else text


def with_letters(page: str) -> str:
    """A page whose control characters are the letters and quotes that they mean; trafilatura removes those that are left."""
    return _CONTROLS.sub(lambda found: html.unescape(f"&#{ord(found[0])};" if len(found[0]) == 1 else found[0]), page)


def unescaped(markdown: str) -> str:
    """Markdown without backslashes in prose before characters with a meaning in Markdown."""
    pieces = _CODE.split(_PERMALINK.sub("", markdown))
    return "".join(piece if place % 2 else _ESCAPE.sub(r"\1", piece) for place, piece in enumerate(pieces))


_BODY = re.compile(r"\\begin\s*\{document\}(.*?)(?:\\end\s*\{document\}|\Z)", re.DOTALL)
_TITLE = re.compile(r"\\title\s*(?:\[[^\]]*\])?\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_BIBLIOGRAPHY = re.compile(r"\\begin\s*\{thebibliography\}.*?(?:\\end\s*\{thebibliography\}|\Z)", re.DOTALL)
# what is no LaTeX: code, addresses and comments; and escaped characters, since \% begins no comment
_LITERAL = re.compile(
    r"\\begin\{(?P<kind>verbatim\*?|lstlisting|minted|Verbatim)\}(?:\[[^\]]*\])?(?:\{[^}]*\})?\n?(?P<block>.*?)\\end\{(?P=kind)\}"
    r"|\\(?:verb\*?|lstinline(?:\[[^\]\n]*\])?|mintinline(?:\[[^\]\n]*\])?\{[^{}\n]*\})"
    r"(?:(?P<end>[^\sA-Za-z*{\[])(?P<code>[^\n]*?)(?P=end)|\{(?P<braced>[^{}\n]*)\})"
    r"|\\(?P<link>url|nolinkurl|path|href)\s*\{(?P<address>(?:[^{}\n]|\{[^{}\n]*\})*)\}"
    r"|\\.|%[^\n]*",
    re.DOTALL,
)
_ESCAPED = re.compile(r"\\([%#&_~{}])")  # in an address
_INPUTENC = re.compile(rb"\\usepackage\s*\[([A-Za-z0-9-]{1,20})\]\s*\{inputenc\}")
_NAMES_OF_INPUTENC = {"ansinew": "cp1252", "applemac": "mac-roman"}
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
    from pylatexenc.latexwalker import get_default_latex_context_db as get_default_arguments
    from pylatexenc.macrospec import std_macro

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

    arguments = get_default_arguments()  # without those of \href, whose text is made of them
    arguments.add_context_category("lmworks", prepend=True, macros=[std_macro("href", "{{")])

    def extract(data: bytes) -> bytes:
        convert = partial(converter.latex_to_text, latex_context=arguments)
        return to_text(decoded_latex(data), convert).encode("utf-8", "replace")

    return extract


def _key(node: Any, l2tobj: Any) -> str:
    """The key of a citation or reference, in brackets."""
    arguments = [argument for argument in node.nodeargs or () if argument is not None] if node.nodeargd else []
    return f"[{arguments[-1].latex_verbatim().strip('{}[]')}]" if arguments else ""


def decoded_latex(data: bytes) -> str:
    """Decode by the byte order mark, as UTF-8, or as the encoding that the package inputenc names, which is Latin-1 in old sources without
    it. Raises ValueError for bytes that are no text."""
    if marked := marked_encoding(data[:4]):
        return data.decode(marked)
    if 4 * data.count(0) > len(data):  # as UTF-16 has without a mark
        raise ValueError("it has zero bytes: save the file as UTF-8")
    named = _INPUTENC.search(data)
    declared = named[1].decode("ascii") if named else ""
    for encoding in encodings(_NAMES_OF_INPUTENC.get(declared, declared)):
        with suppress(LookupError, ValueError):
            return data.decode(encoding)
    return data.decode("latin-1")


def to_text(source: str, convert: Callable[[str], str]) -> str:
    """The document with `convert` applied to each section separately, because its cost is quadratic in the length."""
    source = source.replace("\r\n", "\n")
    kept: list[str] = []

    def hold(text: str) -> str:
        kept.append(text)
        return f"VERBATIM{len(kept) - 1}X"

    def replaced(match: re.Match[str]) -> str:
        if match["kind"]:
            return "\n\n" + hold(f"\n```\n{match['block'].rstrip()}\n```\n") + "\n\n"
        if code := match["code"] or match["braced"]:
            return hold(f"`{code}`")
        if match["link"]:
            return f"\\{match['link']}{{" + hold(_ESCAPED.sub(r"\1", match["address"])) + "}"
        return "" if match[0].startswith("%") else match[0]

    source = _LITERAL.sub(replaced, source)
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
