"""The frame that all pages share: templates, style sheet, and the script that draws charts, in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from lmworks import __version__
from lmworks.pages.charts import Chart, Grid
from lmworks.pages.run_records import Point

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class StepAxes:
    """What may stand on the x axis of a run's charts in place of its steps, each as values over steps, and its last step."""

    tokens: Sequence[Point]
    hours: Sequence[Point]
    last: int


def page(
    template: str,
    charts: Sequence[Chart] = (),
    axes: Mapping[str, Sequence[StepAxes]] | None = None,
    running: bool = False,
    /,
    **values: Any,
) -> str:
    """A page from a template of the package that extends `sheet.html`: whole in one file, which loads nothing.

    `charts` are those that the template draws, and `axes` has for their group those of each run. Only a page with charts, or of a run that
    is `running`, has a script, and a policy in it lets the browser run nothing else.
    """
    grid = Grid()

    def as_data(one: StepAxes) -> dict[str, Any]:
        found = {name: grid.line(points) for name, points in (("tokens", one.tokens), ("time", one.hours)) if points}
        return found | {"last": one.last}

    others = {group: [as_data(one) for one in runs] for group, runs in (axes or {}).items()}
    drawn = {chart.id: chart.data(grid) for chart in charts if chart.drawable}
    data = {"charts": drawn, "axes": others, "steps": grid.steps, "running": running}
    script = _text("uplot/uPlot.iife.min.js") + _text("page.js") if charts or running else ""
    text = _environment().get_template(template).render(
        style=Markup(_text("uplot/uPlot.min.css") + _text("page.css") if script else _text("page.css")),
        script=Markup(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(_json_for_html(data)),
        written=time.strftime("%d %B %Y, %H:%M", time.localtime()),
        written_at=int(time.time()),
        version=__version__,
        **values,
    )
    text = re.sub(r'<table class="stack.*?</table>', _label_cells, text, flags=re.DOTALL)
    return text.encode("utf-8", "replace").decode()  # a record may hold half a surrogate pair


def _label_cells(table: re.Match[str]) -> str:
    """A table with the name of its column at each cell, where a narrow screen shows a row as a list of cells. Text has no tags."""
    head, body = table[0].split("<tbody>")
    names = [re.sub("<[^>]*>", "", name) for name in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', head, re.DOTALL)]

    def label(row: re.Match[str]) -> str:
        columns = iter(names)
        return re.sub(r"<(td|th)\b", lambda cell: f'<{cell[1]} data-label="{next(columns, "")}"', row[0])

    return head + "<tbody>" + re.sub(r"<tr\b.*?</tr>", label, body, flags=re.DOTALL)


def _json_for_html(value: Any) -> str:
    """JSON that cannot close the HTML element that contains it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "&<>\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


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
    return files("lmworks.pages").joinpath(name).read_text(encoding="utf-8")
