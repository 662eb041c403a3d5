"""Alert rules of Prometheus for serving and for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmworks.deploy.monitoring.panels import ENGINE_METRICS

_TRAINER = '{job="trainer"}'


@dataclass(frozen=True)
class Alert:
    """One rule: it fires when `expression` has held for `wait`."""

    name: str
    expression: str
    wait: str
    severity: str
    summary: str


TRAINING = (
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


def serving(engine: str) -> tuple[Alert, ...]:
    """The rules for a server of this engine."""
    metrics = ENGINE_METRICS[engine]
    rules = [
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
        rules.append(Alert("ErrorRate", f"{metrics.errors} > 0.05", "5m", "critical", "more than 5% of the requests fail"))
    return tuple(rules)


def rules(engine: str, training: bool) -> dict[str, Any]:
    """rules.yml: the rules of an engine, and of training if a trainer is watched."""
    groups = [{"name": "serving", "rules": [_rule(one) for one in serving(engine)]}]
    if training:
        groups.append({"name": "training", "rules": [_rule(one) for one in TRAINING]})
    return {"groups": groups}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.wait,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary},
    }
