"""How Sphinx renders the pages that `build.py` has gathered. The site is read from a folder, without a network."""

from __future__ import annotations

import re
from importlib.metadata import version as version_of
from pathlib import Path

from pygments.lexers.data import JsonLexer
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

project = "lmworks"
version = release = version_of("lmworks")
html_title = f"lmworks {version}"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_static_path = [str(Path(__file__).parent / "static")]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = html_show_copyright = False
html_show_search_summary = False  # summaries are fetched, which browsers refuse for files
html_theme_options = {"navigation_with_keys": True, "footer_icons": []}
myst_heading_anchors = 4  # with the anchors that GitHub gives to headings
myst_linkify_fuzzy_links = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
suppress_warnings = ["ref.python"]  # two rooms have a class of the same name
autodoc_inherit_docstrings = False
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
pygments_style, pygments_dark_style = "tango", "monokai"

_CODE = re.compile(r"(`[^`\n]+`)")
_ITEM = re.compile(r"([-*]|\d+\.) ")
_FIELD = re.compile(r"(\w+): (?=\S)")


def _to_rst(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are Markdown of few forms: code in single backticks, lists, and paragraphs of `name: meaning`, which become lists."""
    converted: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        rows = paragraph.strip("\n").split("\n")
        if len(rows) > 1 and all(_FIELD.match(row) or row.startswith("    ") for row in rows):
            rows = [_FIELD.sub(r"- `\1`: ", row, count=1) if _FIELD.match(row) else f"  {row.strip()}" for row in rows]
        for before, row in zip(["", *rows], rows, strict=False):
            item = _ITEM.match(row)
            if item and before and not _ITEM.match(before) and not before.startswith(" "):
                converted.append("")
            lead = item[0] if item else ""
            parts = _CODE.split(row.removeprefix(lead).replace("``", "`"))
            converted.append(lead + "".join(f"`{part}`" if part[:1] == "`" else re.sub(r"([*|_\\])", r"\\\1", part) for part in parts))
        converted.append("")
    lines[:] = converted


def setup(app: Sphinx) -> None:
    app.add_lexer("jsonl", JsonLexer)
    app.add_lexer("messages", TextLexer)  # of `messages.py`, whose lines wrap (`site.css`)
    app.connect("autodoc-process-docstring", _to_rst)
