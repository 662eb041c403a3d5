"""The compose file: engine, check, Prometheus and Grafana.

All containers use the network of the host and listen on loopback: the same prometheus.yml works with and without containers, and a
trainer on the host, which listens on loopback too, can be watched.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmworks.deploy.engines.common import Request
from lmworks.deploy.flags import Launch
from lmworks.deploy.monitoring.scraping import CHECK_PORT, GRAFANA_PORT, PROMETHEUS_PORT

PROMETHEUS_IMAGE = "prom/prometheus:v2.42.0"  # the version with which the tests check rules and queries
GRAFANA_IMAGE = "grafana/grafana:11.6.0"
PYTHON_IMAGE = "python:3.11.13-slim-bookworm"
HEAD = """# Written by lmworks deploy. Start: docker compose up --detach --build. The API key is in secrets/api_key.
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
