"""Dashboards and provisioning files for Grafana."""

from __future__ import annotations

from typing import Any

from lmworks.deploy.monitoring.panels import Panel

DATASOURCE = "lmworks-prometheus"
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 24  # of Grafana's grid


def dashboard(uid: str, title: str, rows: list[tuple[str, tuple[Panel, ...]]]) -> dict[str, Any]:
    """A dashboard in Grafana's JSON model (schema version 39)."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, several in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )
        y += 1
        for at, panel in enumerate(several):
            x = at * _WIDTH % _COLUMNS
            panels.append(_panel(len(panels) + 1, panel, {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT}))
            if x + _WIDTH == _COLUMNS or at == len(several) - 1:
                y += _HEIGHT
    return {
        "uid": uid,
        "title": title,
        "tags": ["lmworks"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": DATASOURCE}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": {"drawStyle": "line", "showPoints": "auto"}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": source,
                "expr": query.expression,
                "legendFormat": query.legend,
                "range": True,
                "editorMode": "code",
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def datasources(prometheus: str) -> dict[str, Any]:
    """provisioning/datasources/prometheus.yaml; `prometheus` is its URL."""
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus",
                "uid": DATASOURCE,
                "type": "prometheus",
                "access": "proxy",
                "url": prometheus,
                "isDefault": True,
                "editable": False,
                "jsonData": {"timeInterval": "15s"},
            },
        ],
    }


def providers(folder: str) -> dict[str, Any]:
    """provisioning/dashboards/lmworks.yaml; `folder` is where Grafana finds the dashboards."""
    return {
        "apiVersion": 1,
        "providers": [
            {
                "name": "lmworks",
                "orgId": 1,
                "folder": "lmworks",
                "type": "file",
                "disableDeletion": True,
                "allowUiUpdates": False,
                "options": {"path": folder, "foldersFromFilesStructure": False},
            },
        ],
    }
