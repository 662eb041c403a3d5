"""Prometheus and Grafana of a deployment: what is scraped, alert rules, dashboards. The files are declared in `monitoring.yaml`.

All targets are addresses of this machine. The panels of training are made from the table of metrics.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from lmworks.metrics.log import prometheus_name
from lmworks.metrics.names import METRICS, Metric
from lmworks.recipe.schema.model import Model

CHECK_PORT, PROMETHEUS_PORT, GRAFANA_PORT = 9105, 9090, 3000
PORTS = {CHECK_PORT: "the check", PROMETHEUS_PORT: "Prometheus", GRAFANA_PORT: "Grafana"}
_WORDS = {"CHECK_PORT": str(CHECK_PORT), "PROMETHEUS_PORT": str(PROMETHEUS_PORT), "GRAFANA_PORT": str(GRAFANA_PORT)}
_RATE = "$__rate_interval"  # Grafana replaces it with a multiple of the scrape interval


@cache
def _declared() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(files("lmworks.deploy").joinpath("monitoring.yaml").read_text(encoding="utf-8"))
    return found


def filled(name: str, **words: str) -> dict[str, Any]:
    """The tree `name` of monitoring.yaml, with <WORDS> replaced. A text that is put in is not searched for further ones."""
    known = {f"<{key}>": value for key, value in (_WORDS | words).items()}
    found: dict[str, Any] = _filled(_declared()[name], known)
    return found


def _filled(tree: Any, words: dict[str, str]) -> Any:
    if isinstance(tree, dict):
        return {key: _filled(value, words) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_filled(one, words) for one in tree]
    return re.sub("<[A-Z_]+>", lambda found: words[found[0]], tree) if isinstance(tree, str) else tree


def scraping(engine: str, address: str, trainer: str | None) -> dict[str, Any]:
    """prometheus.yml. `address` is HOST:PORT of the engine, `trainer` that of `metrics.prometheus_port` of a run."""
    found = filled("prometheus", ADDRESS=address, ENGINE=engine, TRAINER=trainer or "")
    return found | {"scrape_configs": [job for job in found["scrape_configs"] if trainer or job["job_name"] != "trainer"]}


@dataclass(frozen=True)
class Panel:
    """One chart: a query of Prometheus for each name of a line. `unit` is Grafana's id of a unit."""

    title: str
    unit: str
    queries: dict[str, str]
    description: str = ""


@dataclass(frozen=True)
class EngineMetrics:
    """What an engine reports. `errors` is the share of failed requests over five minutes, None if the engine does not count them, then with
    `no_errors` as the reason; `waiting` is the number of requests that wait."""

    panels: tuple[Panel, ...]
    waiting: str
    errors: str | None
    no_errors: str


def _panel(row: dict[str, Any]) -> Panel:
    queries = dict(row.get("queries", {}))
    queries |= {name: f"sum(rate({metric}[{_RATE}]))" for name, metric in row.get("rates", {}).items()}
    queries |= {name: _share(pair, _RATE) for name, pair in row.get("shares", {}).items()}
    if metric := row.get("quantiles"):
        queries |= {f"{q:.0%}": f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket[{_RATE}])))" for q in (0.5, 0.9, 0.99)}
    return Panel(row["title"], row["unit"], queries, row.get("description", ""))


def _share(metrics: Sequence[str], window: str) -> str:
    """The first as a share of the second, 0 while there are no requests; a server without a failure has no series of failures."""
    failed, every = metrics
    return f"(sum(rate({failed}[{window}])) or vector(0)) / ((sum(rate({every}[{window}])) > 0) or vector(1))"


def engine_metrics(engine: str) -> EngineMetrics:
    """The metrics of the engine of this name."""
    found = _declared()["engines"][engine]
    errors = _share(found["errors"], "5m") if "errors" in found else None
    return EngineMetrics(tuple(map(_panel, found["panels"])), found["waiting"], errors, found.get("no_errors", ""))


def alert_rules(engine: str, training: bool) -> dict[str, Any]:
    """rules.yml: the rules of an engine, and of training if a trainer is watched."""
    metrics = engine_metrics(engine)
    rules = filled("alerts", WAITING=metrics.waiting, ERRORS=metrics.errors or "")
    serving = [rule for rule in rules["serving"] if metrics.errors or rule["alert"] != "ErrorRate"]
    groups = {"serving": serving} | ({"training": rules["training"]} if training else {})
    return {"groups": [{"name": name, "rules": [_rule(**one) for one in several]} for name, several in groups.items()]}


def _rule(severity: str, summary: str, **rule: str) -> dict[str, Any]:
    return {**rule, "labels": {"severity": severity}, "annotations": {"summary": summary}}


_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24  # of Grafana's grid


def dashboard(name: str, rows: list[tuple[str, list[Panel]]]) -> dict[str, Any]:
    """A dashboard of these rows, each a title and panels."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, several in rows:
        panels.append({
            "id": len(panels) + 1, "type": "row", "title": row, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
        })  # fmt: skip
        y += 1
        for at, panel in enumerate(several):
            x = at * _WIDTH % _COLUMNS
            chart = filled("panel", TITLE=panel.title, UNIT=panel.unit, DESCRIPTION=panel.description)
            chart |= {"id": len(panels) + 1, "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT}}
            targets = [
                {"refId": chr(ord("A") + number), "datasource": chart["datasource"], "expr": query, "legendFormat": legend,
                 "range": True, "editorMode": "code"}
                for number, (legend, query) in enumerate(panel.queries.items())
            ]  # fmt: skip
            panels.append(chart | {"targets": targets})
            if x + _WIDTH == _COLUMNS or at == len(several) - 1:
                y += _HEIGHT
    return filled("dashboard", NAME=name, TITLE=name.capitalize()) | {"panels": panels}


def serving_panels(engine: str) -> list[tuple[str, list[Panel]]]:
    """Rows of the dashboard of an engine."""
    return [("Health", [_panel(one) for one in _declared()["health"]]), ("Engine", list(engine_metrics(engine).panels))]


_ROWS = {
    "train": "Loss and progress", "optim": "Optimizer", "validation": "Validation", "perf": "Speed", "experts": "Experts",
    "system": "Machine",
}  # fmt: skip
_UNITS = {"s": "s", "bytes": "bytes", "%": "percent", "degrees C": "celsius", "W": "watt"}


def training_panels(model: Model | None) -> list[tuple[str, list[Panel]]]:
    """Rows of the dashboard of training, from the table of metrics: those that every run writes, and those of what `model` has."""
    conditions = {""} | ({"model.moe"} if model and model.moe else set()) | ({"model.mtp"} if model and model.mtp else set())
    rows: dict[str, list[Panel]] = {group: [] for group in _ROWS}
    for name, metric in METRICS.items():
        group = name.split("/")[0]
        if group in _ROWS and metric.when in conditions and "{layer}" not in name:
            rows[group].append(_panel_of(metric))
    for group, several in _declared()["training"].items():
        rows[group] += map(_panel, several)
    return [(_ROWS[group], several) for group, several in rows.items() if several]


def _panel_of(metric: Metric) -> Panel:
    expression, legend = f'{prometheus_name(metric.name)}{{job="trainer"}}', "{{__name__}}"
    if "{" in metric.name:
        pattern = ".+".join(prometheus_name(part)[len("lmworks_") :] for part in re.split(r"\{\w+\}", metric.name))
        expression = f'{{__name__=~"lmworks_{pattern}", job="trainer"}}'
        legend += " {{metric}}"  # which tells series of one name apart, as those of the sources `web-high` and `web_high`; else empty
    unit = f" [{metric.unit}]" if metric.unit else ""
    return Panel(metric.name, _UNITS.get(metric.unit, "short"), {legend: expression}, metric.meaning + unit)
