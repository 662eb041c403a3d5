"""Files of a deployment: the start script of an engine, the compose file, and README.md.

The start script is for a machine with and without containers: every option is on a line of its own, after its reason. The compose file has
engine, check, Prometheus and Grafana. All containers use the network of the host and listen on loopback: the same prometheus.yml works with
and without containers, and a trainer on the host, which listens on loopback too, can be watched. Text of the user's is quoted as shell
words, YAML and one-line comments.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from lmworks.deploy.monitoring import CHECK_PORT, GRAFANA_PORT, PROMETHEUS_PORT
from lmworks.deploy.panels import ENGINE_METRICS
from lmworks.deploy.request import Launch, Request
from lmworks.deploy.sizing import GB


def shell_word(text: str) -> str:
    """One word of a POSIX shell that stands for exactly this text, newlines and quotes included."""
    return "'" + text.replace("'", "'\"'\"'") + "'" if shlex.quote(text) != text else text


def compose_yaml(tree: Any, head: str) -> str:
    """YAML for a compose file: `$` is doubled, because compose substitutes variables in every value."""
    return head + plain_yaml(_doubled(tree))


def plain_yaml(tree: Any) -> str:
    """YAML of a tree of plain values, in ASCII, so that every reader sees the same characters."""
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=1_000_000, default_flow_style=False))


def _doubled(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _doubled(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_doubled(one) for one in tree]
    return tree.replace("$", "$$") if isinstance(tree, str) else tree


SUMS = "model.sha256"
_SCRIPT_HEAD = """#!/bin/sh
# Starts the engine. The API key is read from secrets/api_key: it is in no command line.
set -eu
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
"""
_ARGV = """
import json, logging, runpy, sys
key = open(sys.argv.pop(1)).read().strip()
sys.argv += [sys.argv.pop(1), key]
shown = [key, repr(key)[1:-1], json.dumps(key)[1:-1]]
make = logging.getLogRecordFactory()
def without_key(*args, **kwargs):
    record = make(*args, **kwargs)
    try:
        text = record.getMessage()
    except Exception:
        return record
    if any(one in text for one in shown):
        for one in shown:
            text = text.replace(one, "[API key]")
        record.msg, record.args = text, None
    return record
logging.setLogRecordFactory(without_key)
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
"""Gives the key to a Python module as an option: no list of processes shows it, and it is taken out of what the module logs."""
_VERIFY = """# The model is the one that was verified. Reading it takes about a second for each GB; LMWORKS_VERIFY=no leaves it out.
if [ "${{LMWORKS_VERIFY:-yes}}" != no ]; then
  {check} >&2 ||
    {{ echo "the files in $model are not those that this deployment was written for: they are damaged or were changed" >&2; exit 1; }}
fi
"""


def start_script(request: Request, launch: Launch) -> str:
    """The text of start.sh."""
    source = request.source
    path = source.served(launch.gguf)
    lines = [_SCRIPT_HEAD, f"model=${{LMWORKS_MODEL:-{shell_word(str(path))}}}\n"]
    check = f'sha256sum --check --quiet "$here/{SUMS}"'
    lines.append(_VERIFY.format(check=f'{check} < "$model"' if path.is_file() else f'(cd -- "$model" && {check})'))
    kind, name = launch.key
    if kind == "env":
        lines.append(f'{name}=$(cat "$here/secrets/api_key")\nexport {name}\n')
    for flag in launch.flags:
        if flag.env:
            lines.append(f"# {flag.reason}\nexport {flag.name}={shell_word(flag.value or '')}\n")
    program = list(launch.program)
    if kind == "argv":
        module = program[program.index("-m") + 1]
        words = [program[0], "-c", _ARGV.format(module=module)]
        lines.append(f'set -- {" ".join(map(shell_word, words))} "$here/secrets/api_key" {name}\n')
    else:
        lines.append(f"set -- {' '.join(map(shell_word, program))}\n")
    lines.append(f'set -- "$@" {"".join(shell_word(word) + " " for word in launch.model_option)}"$model"\n')
    if kind == "option":
        lines.append(f'set -- "$@" {name} "$here/secrets/api_key"\n')
    for flag in launch.flags:
        if flag.note:
            lines.append(f"# {flag.name}: {flag.reason}\n")
        elif not flag.env:
            value = "" if flag.value is None else f" {shell_word(flag.value)}"
            lines.append(f'# {flag.reason}\nset -- "$@" {flag.name}{value}\n')
    return "".join([*lines, 'exec "$@"\n'])


PROMETHEUS_IMAGE = "prom/prometheus:v2.42.0"  # the version with which the tests check rules and queries
GRAFANA_IMAGE = "grafana/grafana:11.6.0"
PYTHON_IMAGE = "python:3.11.13-slim-bookworm"
COMPOSE_HEAD = """# Written by lmworks deploy. Start: docker compose up --detach --build. The API key is in secrets/api_key.
"""


def compose(request: Request, launch: Launch) -> dict[str, Any]:
    """compose.yaml as a tree."""
    model = request.source.served(launch.gguf)
    url = f"http://{address(request)}"
    check = ["python3", "/deploy/check.py", url, "--expect", "/deploy/expected.json", "--key-file", "/deploy/secrets/api_key"]
    owner = f"{os.getuid()}:{os.getgid()}"  # who may read the key
    engine: dict[str, Any] = {
        "build": {"context": ".", "dockerfile": "Containerfile"}, "network_mode": "host", "restart": "unless-stopped", "user": owner,
        "command": ["sh", "/deploy/start.sh"], "environment": {"LMWORKS_MODEL": "/model", "HOME": "/tmp"},
        "volumes": [_mount(".", "/deploy"), _mount(str(model), "/model")],
        "healthcheck": {"test": ["CMD", *check], "interval": "60s", "timeout": "300s", "retries": 3, "start_period": "1800s"},
    }  # fmt: skip
    if launch.gpu_devices:
        engine["ipc"] = "host"  # tensor parallelism exchanges data in shared memory
        engine |= _amd() if request.hardware.amd else _nvidia(request.fit.devices)
    common = {"network_mode": "host", "restart": "unless-stopped", "user": owner}
    grafana = {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1", "GF_SERVER_HTTP_PORT": str(GRAFANA_PORT), "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_SECURITY_ADMIN_PASSWORD__FILE": "/secrets/grafana_password", "GF_USERS_ALLOW_SIGN_UP": "false",
        "GF_PATHS_DATA": "/data",
    }  # fmt: skip
    return {"services": {
        "engine": engine,
        "check": {
            "image": PYTHON_IMAGE, **common, "volumes": [_mount(".", "/deploy")],
            "command": [*check, "--watch", "60", "--port", str(CHECK_PORT)],
        },
        "prometheus": {
            "image": PROMETHEUS_IMAGE, **common,
            "command": ["--config.file=/deploy/prometheus.yml", f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
                        "--storage.tsdb.path=/data", "--storage.tsdb.retention.time=30d"],
            "volumes": [_mount(".", "/deploy"), _mount("./data/prometheus", "/data", write=True)],
        },
        "grafana": {
            "image": GRAFANA_IMAGE, **common, "environment": grafana,
            "volumes": [_mount("./grafana/provisioning", "/etc/grafana/provisioning"), _mount("./grafana/dashboards", "/dashboards"),
                        _mount("./secrets", "/secrets"), _mount("./data/grafana", "/data", write=True)],
        },
    }}  # fmt: skip


def _nvidia(count: int) -> dict[str, Any]:
    devices = [{"driver": "nvidia", "count": count, "capabilities": ["gpu"]}]
    return {"deploy": {"resources": {"reservations": {"devices": devices}}}}


def _amd() -> dict[str, Any]:
    """The devices of ROCm, with the group that owns them: `video`, and by its number that of /dev/kfd if this machine has one. Compose
    cannot count AMD's GPUs: all are visible, and the engine uses as many as it is told."""
    kfd = Path("/dev/kfd")
    groups = ["video", *([str(kfd.stat().st_gid)] if kfd.exists() else [])]
    return {"devices": ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"], "group_add": groups, "security_opt": ["seccomp:unconfined"]}


def address(request: Request) -> str:
    host = "127.0.0.1" if request.host in ("0.0.0.0", "::") else request.host
    return f"[{host}]:{request.port}" if ":" in host else f"{host}:{request.port}"


def _mount(source: str, target: str, write: bool = False) -> dict[str, Any]:
    return {"type": "bind", "source": source, "target": target} | ({} if write else {"read_only": True})


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
