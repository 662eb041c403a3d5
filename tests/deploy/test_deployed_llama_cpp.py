"""The start script with llama-server itself: it starts, requires the key, passes the check, and reports what its dashboard shows."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from lmworks.deploy import check
from lmworks.deploy.deploy import plan_deployment, write_deployment
from lmworks.deploy.monitoring import engine_metrics
from lmworks.deploy.sizing import Hardware
from lmworks.deploy.source import open_source
from patience import PATIENCE

sys.path.insert(0, str(Path(__file__).parents[1] / "export"))
from engines import engine

pytestmark = [pytest.mark.slow, pytest.mark.needs("llama")]


def test_the_start_script_starts_a_server_that_passes(exported: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out, url = tmp_path / "d", f"http://127.0.0.1:{port}"
    plan = plan_deployment(open_source(exported), "llama.cpp", "balanced", Hardware("cpu", 1, 2e9), port=port)
    write_deployment(plan, out)
    key, expected = check.read_key(out / "secrets" / "api_key"), check.read_expected(out / "expected.json")
    programs = f"{engine('LMWORKS_LLAMA_SERVER').parent}{os.pathsep}{os.environ['PATH']}"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([out / "start.sh"], stdout=output, stderr=output, env=os.environ | {"PATH": programs})
    try:
        end = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text(encoding="utf-8")[-3000:]
            with suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            time.sleep(0.2)
        assert not check.check(url, expected)["ok"]  # without the key
        result = check.check(url, expected, key)
        print(result)
        assert result["ok"]
        request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
        reported = set(re.findall(r"^(llamacpp:\w+)", urllib.request.urlopen(request).read().decode(), flags=re.M))
        metrics = engine_metrics("llama.cpp")
        queries = [query for panel in metrics.panels for query in panel.queries.values()]
        asked = re.findall(r"llamacpp:\w+", " ".join([*queries, metrics.waiting]))
        assert asked and set(asked) <= reported
    finally:
        process.terminate()
        process.wait()
