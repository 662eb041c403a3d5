"""Files of a deployment: the start script of an engine, the compose file, and README.md.

The start script is for a machine with and without containers: every option is on a line of its own, after its reason. The compose file has
engine, check, Prometheus and Grafana. All containers use the network of the host and listen on loopback: the same prometheus.yml works with
and without containers, and a trainer on the host, which listens on loopback too, can be watched. Text of the user's is quoted as shell
words, YAML and one-line comments.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from lmworks.deploy.monitoring import CHECK_PORT, GRAFANA_PORT, PROMETHEUS_PORT, engine_metrics, filled
from lmworks.deploy.request import Launch, Request
from lmworks.deploy.sizing import GB
from lmworks.io.files import rendered


def _code(text: str) -> str:
    """Text of the user's as code in one line: without backticks and control characters."""
    return "`" + "".join(one if one.isprintable() and one != "`" else "�" for one in text) + "`"


def plain_yaml(tree: Any) -> str:
    """YAML of a tree of plain values, in ASCII, so that every reader sees the same characters."""
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=False, width=1_000_000, default_flow_style=False))


SUMS = "model.sha256"
_WITH_KEY = """
import json, logging, runpy, sys
key = open(sys.argv.pop(1)).read().strip()
sys.argv.append(sys.argv.pop(1) + "=" + key)  # one word: a key may begin with a dash
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


def start_script(request: Request, launch: Launch) -> str:
    """The text of start.sh."""
    path, program = request.source.served(launch.gguf), list(launch.program)
    kind, name = launch.key
    if kind == "argv":
        program = [program[0], "-c", _WITH_KEY.format(module=program[program.index("-m") + 1])]
    return rendered(
        "lmworks.deploy", "start.sh.jinja", model=str(path), model_is_file=path.is_file(), sums=SUMS, key=kind, key_name=name,
        program=program, model_option=launch.model_option, flags=launch.flags,
    )  # fmt: skip


COMPOSE_HEAD = """# Written by lmworks deploy. Start: docker compose up --detach --build. The API key is in secrets/api_key.
"""


def compose_yaml(request: Request, launch: Launch) -> str:
    """The text of compose.yaml. `$` is doubled, because compose substitutes variables in every value."""
    model = str(request.source.served(launch.gguf))
    tree = filled("compose", MODEL=model.replace("$", "$$"), URL=f"http://{address(request)}", OWNER=_owner())
    if launch.gpu_devices:
        engine = tree["services"]["engine"]
        engine["ipc"] = "host"  # tensor parallelism exchanges data in shared memory
        engine |= _amd() if request.hardware.amd else _nvidia(request.fit.devices)
    return COMPOSE_HEAD + plain_yaml(tree)


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
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(request.host, request.host)  # some engines listen on :: without IPv4
    return f"[{host}]:{request.port}" if ":" in host else f"{host}:{request.port}"


def _owner() -> str:
    """Who may read the key."""
    return f"{os.getuid()}:{os.getgid()}"


def readme(engine: str, request: Request, launch: Launch, trainer: str | None) -> str:
    """What each file is, how to start, ask, watch and stop."""
    return rendered(
        "lmworks.deploy", "README.md.jinja", engine=engine, sums=SUMS, request=request, source=request.source, fit=request.fit,
        url=f"http://{address(request)}", flags=launch.flags, notes=launch.notes, trainer=trainer,
        no_errors=engine_metrics(engine).no_errors, owner=_owner(), code=_code, gigabytes=lambda size: f"{size / GB:.2f}",
        prometheus=PROMETHEUS_PORT, grafana=GRAFANA_PORT, check=CHECK_PORT,
    )  # fmt: skip
