"""The HTML templates and style sheets of the pages, which are whole in one file each."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def source(*names: str) -> Markup:
    """The contents of these files of the package, joined, to be placed into a page as they are."""
    return Markup("".join(map(_text, names)))


def template(name: str) -> Template:
    """A template of the package, by the name of its file. `sheet.html` is the frame of the pages without a script."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    import jinja2

    loader = jinja2.FunctionLoader(_text)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["share"] = lambda value: f"{100 * value:.2f}%"
    environment.filters["percent"] = lambda value: f"{value:.1f}" if value else "–"
    environment.filters["place"] = lambda value: f"{value:.2f}%"
    return environment


def _text(name: str) -> str:
    return files("lmworks.doctor").joinpath(name).read_text(encoding="utf-8")
