"""Configuration of Prometheus and Grafana: what is scraped, alert rules for serving and for training, dashboards and provisioning files.

All targets are addresses of this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmworks.deploy.panels import ENGINE_METRICS, Panel

CHECK_PORT, PROMETHEUS_PORT, GRAFANA_PORT = 9105, 9090, 3000


def scraping(engine: str, address: str, trainer: str | None) -> dict[str, Any]:
    """prometheus.yml. `address` is HOST:PORT of the engine, `trainer` that of `metrics.prometheus_port` of a run."""
    jobs: list[dict[str, Any]] = [
        {
            "job_name": "engine",
            "authorization": {"type": "Bearer", "credentials_file": "secrets/api_key"},
            "static_configs": [{"targets": [address], "labels": {"engine": engine}}],
        },
        {"job_name": "check", "static_configs": [{"targets": [f"127.0.0.1:{CHECK_PORT}"]}]},
    ]
    if trainer:
        jobs.append({"job_name": "trainer", "static_configs": [{"targets": [trainer]}]})
    return {
        "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": jobs,
    }


_TRAINER = '{job="trainer"}'


@dataclass(frozen=True)
class Alert:
    """One rule: it fires when `expression` has held for `wait`."""

    name: str
    expression: str
    wait: str
    severity: str
    summary: str


TRAINING_ALERTS = (
    Alert(
        "RunStalled",
        f"changes(lmworks_step{_TRAINER}[20m]) == 0",
        "10m",
        "critical",
        "no step has ended for 30 minutes; see which rank waits: lmworks launch status RUN",
    ),
    Alert("RunEnded", f"up{_TRAINER} == 0", "5m", "warning", "the trainer does not answer: the run has ended or was killed"),
    Alert(
        "LossSpike",
        f"delta(lmworks_train_spikes{_TRAINER}[10m]) > 0 or delta(lmworks_train_bad_steps{_TRAINER}[10m]) > 0",
        "0m",
        "warning",
        "steps were skipped because the loss or the gradient was far too large or not finite",
    ),
    Alert(
        "LossRising",
        f"avg_over_time(lmworks_train_loss{_TRAINER}[10m]) > 1.1 * avg_over_time(lmworks_train_loss{_TRAINER}[30m] offset 10m)",
        "10m",
        "warning",
        "the mean loss of ten minutes is 10% above that of the half hour before",
    ),
    Alert(
        "DiskFilling",
        f"lmworks_disk_free_bytes{_TRAINER} < 2e9 or predict_linear(lmworks_disk_free_bytes{_TRAINER}[1h], 4 * 3600) < 0",
        "5m",
        "critical",
        "the disk of the run directory is full in less than 4 hours; remove checkpoints: lmworks checkpoint prune RUN",
    ),
    Alert(
        "DeadRank",
        f"max by (rank) (lmworks_rank_silent_seconds{_TRAINER}) > 120",
        "1m",
        "critical",
        "rank {{ $labels.rank }} has given no sign of life for two minutes",
    ),
)


def serving_alerts(engine: str) -> tuple[Alert, ...]:
    """The rules for a server of this engine."""
    metrics = ENGINE_METRICS[engine]
    alert_rules = [
        Alert("ServerDown", 'up{job="engine"} == 0', "2m", "critical", "the engine does not answer"),
        Alert(
            "AnswersWrong",
            "lmworks_check_ok == 0",
            "1m",
            "critical",
            "the engine does not answer the check as the model does: its weights may be damaged",
        ),
        Alert(
            "CheckMissing",
            "absent(lmworks_check_ok) or time() - lmworks_check_time_seconds > 900",
            "5m",
            "warning",
            "the check has not run for a quarter of an hour",
        ),
        Alert("RequestsWaiting", f"{metrics.waiting} > 50", "10m", "warning", "more than 50 requests have been waiting for ten minutes"),
    ]
    if metrics.errors:
        alert_rules.append(Alert("ErrorRate", f"{metrics.errors} > 0.05", "5m", "critical", "more than 5% of the requests fail"))
    return tuple(alert_rules)


def alert_rules(engine: str, training: bool) -> dict[str, Any]:
    """rules.yml: the rules of an engine, and of training if a trainer is watched."""
    groups = [{"name": "serving", "rules": [_rule(one) for one in serving_alerts(engine)]}]
    if training:
        groups.append({"name": "training", "rules": [_rule(one) for one in TRAINING_ALERTS]})
    return {"groups": groups}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.wait,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary},
    }


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
