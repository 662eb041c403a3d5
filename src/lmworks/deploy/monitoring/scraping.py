"""The configuration of Prometheus: what it scrapes. All targets are addresses of this machine."""

from __future__ import annotations

from typing import Any

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
