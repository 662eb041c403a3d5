"""README.md of a deployment."""

from __future__ import annotations

from lmworks.deploy.compose import address
from lmworks.deploy.engines.common import Request
from lmworks.deploy.flags import Launch
from lmworks.deploy.hardware import GB
from lmworks.deploy.monitoring.panels import ENGINE_METRICS
from lmworks.deploy.monitoring.scraping import CHECK_PORT, GRAFANA_PORT, PROMETHEUS_PORT
from lmworks.deploy.start_script import SUMS


def readme(engine: str, request: Request, launch: Launch, trainer: str | None) -> str:
    """What each file is, how to start, ask, watch and stop."""
    fit, url = request.fit, f"http://{address(request)}"
    rows = [f"| `{flag.name}` | {_cell(flag.value)} | {flag.reason} |" for flag in launch.flags]
    errors = ENGINE_METRICS[engine].no_errors
    used = f" ({fit.devices} of them used)" if fit.devices < request.hardware.count else ""
    notes = "".join(f"{note}\n\n" for note in launch.notes)
    return f"""# Serve {_code(request.source.name)} with {engine}

For {request.hardware.text}{used}, scenario {request.scenario.name}: {request.scenario.about}.
Per device: {fit.weights / GB:.2f} GB of weights, {fit.cache / GB:.2f} GB of KV cache, {fit.working / GB:.2f} GB of working memory
(an estimate).

## Start

With containers: `docker compose up --detach --build`. Without: `./start.sh` starts the engine alone.

The engine listens on {url}. The API key is in `secrets/api_key`; clients send it as `Authorization: Bearer KEY`. To change it, write
another key to the file and start the engine again. Prometheus listens on 127.0.0.1:{PROMETHEUS_PORT}, Grafana on 127.0.0.1:{GRAFANA_PORT}
(user admin, password in `secrets/grafana_password`), the check on 127.0.0.1:{CHECK_PORT}. From another machine, use a tunnel:
`ssh -L {GRAFANA_PORT}:127.0.0.1:{GRAFANA_PORT} HOST`.

{notes}## Check

`start.sh` compares the model's files with `{SUMS}` and does not start an engine with files that are damaged or were changed.
`python3 check.py {url} --expect expected.json --key-file secrets/api_key` asks the recorded questions and compares log-probabilities. It
exits with 0 if they agree, and with 1 if the server does not compute this model, although /health may say 200. The container's health
check and the alert AnswersWrong run the same file.

## Files

| file | purpose |
|---|---|
| `start.sh` | starts the engine, with and without a container; each option follows its reason |
| `Containerfile`, `compose.yaml` | the image of the engine; all services |
| `{SUMS}` | hashes of the model's files, which `start.sh` compares before it starts the engine |
| `check.py`, `expected.json` | the check and the recorded answers |
| `prometheus.yml`, `rules.yml` | what Prometheus reads, and its alerts |
| `grafana/` | data source and dashboards |
| `secrets/`, `data/` | key and password, readable by you alone; data of Prometheus and Grafana |
| `decisions.json` | all decisions for programs |

Monitoring without containers: `prometheus --config.file=prometheus.yml --web.listen-address=127.0.0.1:{PROMETHEUS_PORT}` and
`python3 check.py {url} --expect expected.json --key-file secrets/api_key --watch 60`.
{f"{chr(10)}The trainer at {trainer} is watched too: set `metrics.prometheus_port` in its recipe to this port.{chr(10)}" if trainer else ""}
{f"{chr(10)}There is no alert for the error rate: {errors}.{chr(10)}" if errors else ""}
Containers run as user {_owner()}, who owns this directory. All use the network of the host.

## Options

| option | value | reason |
|---|---|---|
{chr(10).join(rows)}
"""


def _owner() -> str:
    import os

    return f"{os.getuid()}:{os.getgid()}"


def _cell(value: str | None) -> str:
    return "" if value is None else _code(value).replace("|", "\\|")


def _code(text: str) -> str:
    """Text of the user's as code in one line: without backticks and control characters."""
    return "`" + "".join(one if one.isprintable() and one != "`" else "�" for one in text) + "`"
