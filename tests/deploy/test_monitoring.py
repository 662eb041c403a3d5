"""Monitoring, against the real Prometheus where it is installed: configuration, each alert, each query of each dashboard."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployable import serving
from lmworks.deploy import check, monitoring
from lmworks.deploy.deploy import plan_deployment, write_deployment
from lmworks.deploy.engines import ENGINES
from lmworks.deploy.monitoring import engine_metrics, serving_panels, training_panels
from lmworks.deploy.sizing import parse_gpus
from lmworks.deploy.source import open_source
from lmworks.metrics import METRICS, MetricLog
from lmworks.recipe.schema.artifacts import Metrics
from lmworks.serve.requests import EngineStats
from lmworks.serve.server import RequestStats, render_metrics
from patience import PATIENCE
from ports import free_port
from tiny_run import STEPS, Tiny, before_each_step

needs_prometheus = pytest.mark.needs("prometheus")


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:lmworks|vllm|sglang|llamacpp)[_:]\w+", expression))


def test_our_servers_dashboard_asks_for_what_it_reports() -> None:
    stats = RequestStats()
    stats.count("/v1/completions", 200, 0.5)
    reported = set(re.findall(r"^(\w+)", render_metrics(EngineStats(0, 0, 0, 0), stats), flags=re.M))
    metrics = engine_metrics("lmworks")
    asked = {name for panel in metrics.panels for query in panel.queries.values() for name in names_in(query)}
    asked |= names_in(metrics.waiting) | names_in(metrics.errors or "")
    assert asked and asked <= reported


def test_every_metric_that_every_run_writes_is_on_the_dashboard_of_training() -> None:
    panels = [panel for _, several in training_panels(None) for panel in several]
    titles = {panel.title for panel in panels}
    assert {name for name, metric in METRICS.items() if not metric.when and "{layer}" not in name} <= titles
    assert not any(title.startswith(("experts/", "train/mtp")) for title in titles)


def test_series_of_one_name_have_legends_that_differ() -> None:
    """`web-high` and `web_high` have one name in Prometheus, and the label `metric`."""
    queries = {panel.title: panel.queries for _, several in training_panels(None) for panel in several}
    assert list(queries["validation/{domain}/loss"]) == ["{{__name__}} {{metric}}"]
    assert list(queries["train/loss"]) == ["{{__name__}}"]


@pytest.mark.parametrize("engine", ENGINES)
def test_dashboards_have_what_provisioning_needs(engine: str) -> None:
    """Grafana does not run here: unique ids, a grid without overlaps, and targets that name the provisioned data source."""
    uid = monitoring.filled("datasources")["datasources"][0]["uid"]
    for found in (monitoring.dashboard("a", serving_panels(engine)), monitoring.dashboard("b", training_panels(None))):
        assert found == json.loads(json.dumps(found)) and {"uid", "title", "schemaVersion", "panels", "time"} <= set(found)
        assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
        cells: set[tuple[int, int]] = set()
        for panel in found["panels"]:
            place = panel["gridPos"]
            own = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
            assert not own & cells and place["x"] + place["w"] <= 24
            cells |= own
            for target in panel.get("targets", ()):
                assert target["expr"] and target["datasource"]["uid"] == panel["datasource"]["uid"] == uid
    (provider,) = monitoring.filled("providers")["providers"]
    assert provider["options"]["path"] == "/dashboards"


SILENT = "lmworks_rank_silent_seconds"
# Of each alert: series that fire it at the given minute, and series that do not. Promtool's notation: start+step x count.
SERIES: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]], int]] = {
    "ServerDown": ([('up{job="engine"}', "1x5 0x30")], [('up{job="engine"}', "1x5 0 1x30")], 20),
    "AnswersWrong": ([("lmworks_check_ok", "1x5 0x30")], [("lmworks_check_ok", "1x40")], 20),
    "CheckMissing": ([("other", "1x40")], [("lmworks_check_ok", "1x40"), ("lmworks_check_time_seconds", "0+60x40")], 30),
    "RequestsWaiting": ([("WAITING", "60x40")], [("WAITING", "40x40")], 30),
    "ErrorRate": (
        [("REQUESTS{OK}", "0+90x40"), ("REQUESTS{ERROR}", "0+10x40")], [("REQUESTS{OK}", "0+99x40"), ("REQUESTS{ERROR}", "0+1x40")], 30,
    ),
    "RunStalled": (
        [('lmworks_step{job="trainer"}', "0+5x10 50x60")], [('lmworks_step{job="trainer"}', "0+5x10 50x12 51+5x60")], 60,
    ),
    "RunEnded": ([('up{job="trainer"}', "1x5 0x30")], [('up{job="trainer"}', "1x40")], 20),
    "LossSpike": (
        [('lmworks_train_spikes{job="trainer"}', "0x18 1x30"), ('lmworks_train_bad_steps{job="trainer"}', "0x50")],
        [('lmworks_train_spikes{job="trainer"}', "3x50"), ('lmworks_train_bad_steps{job="trainer"}', "1x50")], 22,
    ),
    "LossRising": ([('lmworks_train_loss{job="trainer"}', "2x60 2.5x30")], [('lmworks_train_loss{job="trainer"}', "3-0.01x60 2.4x30")], 85),
    "DiskFilling": (
        [('lmworks_disk_free_bytes{job="trainer"}', "200e9-1e9x90")], [('lmworks_disk_free_bytes{job="trainer"}', "900e9-1e9x90")], 80,
    ),
    "DeadRank": (
        [(f'{SILENT}{{job="trainer",rank="3"}}', "1x10 60+60x20"), (f'{SILENT}{{job="trainer",rank="0"}}', "1x30")],
        [(f'{SILENT}{{job="trainer",rank="3"}}', "1x10 60 1x20")], 20,
    ),
}  # fmt: skip
WORDS = {
    "lmworks": {
        "WAITING": "lmworks_answers_waiting", "REQUESTS": "lmworks_requests_total",
        "{OK}": '{status="200"}', "{ERROR}": '{status="500"}',
    },
    "vllm": {
        "WAITING": "vllm:num_requests_waiting", "REQUESTS": "http_requests_total",
        "{OK}": '{status="2xx"}', "{ERROR}": '{status="5xx"}',
    },
    "sglang": {
        "WAITING": "sglang:num_queue_reqs", "REQUESTS": "sglang:http_responses_total",
        "{OK}": '{status_code="200"}', "{ERROR}": '{status_code="500"}',
    },
    "llama.cpp": {"WAITING": "llamacpp:requests_deferred"},
}  # fmt: skip


def labels_of(expression: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', expression))


def case(engine: str, alert: dict[str, Any], fires: bool) -> dict[str, Any]:
    """One group of promtool's unit tests."""
    bad, good, minute = SERIES[alert["alert"]]
    series = []
    for name, values in bad if fires else good:
        for word, real in WORDS[engine].items():
            name = name.replace(word, real)
        series.append({"series": name, "values": values})
    firing: list[Any] = []
    if fires:
        kept = labels_of(series[0]["series"]) if "sum(" not in alert["expr"] and "absent" not in alert["expr"] else {}
        kept = {key: value for key, value in kept.items() if key == "rank" or " by (rank)" not in alert["expr"]}
        summary = alert["annotations"]["summary"].replace("{{ $labels.rank }}", kept.get("rank", ""))
        firing = [{"exp_labels": kept | alert["labels"], "exp_annotations": {"summary": summary}}]
    test = {"eval_time": f"{minute}m", "alertname": alert["alert"], "exp_alerts": firing}
    return {"interval": "1m", "input_series": series, "alert_rule_test": [test]}


def promtool(*arguments: object) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def alerts(engine: str) -> list[dict[str, Any]]:
    return [rule for group in monitoring.alert_rules(engine, training=True)["groups"] for rule in group["rules"]]


def test_every_alert_has_series_that_fire_it_and_series_that_do_not() -> None:
    assert {one["alert"] for engine in ENGINES for one in alerts(engine)} == set(SERIES)


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("engine", ENGINES)
def test_alerts_fire_when_they_should_and_only_then(engine: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(monitoring.alert_rules(engine, training=True)))
    every = alerts(engine)
    tests = [case(engine, one, fires) for one in every for fires in (True, False)]
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}))
    assert f"{len(every)} rules found" in promtool("check", "rules", tmp_path / "rules.yml")
    promtool("test", "rules", tmp_path / "tests.yml")


@contextmanager
def prometheus(config: Path, data: Path) -> Iterator[str]:
    """The URL of a Prometheus with this configuration."""
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}", f"--web.listen-address=127.0.0.1:{port}"]
    with (data.parent / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + PATIENCE
            while True:
                assert process.poll() is None and time.monotonic() < end, (data.parent / "prometheus.log").read_text()[-3000:]
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/-/ready", timeout=5)
                    break
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def ask(url: str, expression: str) -> list[Any]:
    query = urllib.parse.urlencode({"query": expression.replace("$__rate_interval", "10s")})
    reply = json.load(urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=30))
    assert reply["status"] == "success", reply
    return list(reply["data"]["result"])


@pytest.mark.slow
@needs_prometheus
def test_every_query_of_every_dashboard_returns_data(exported: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our server, the check and a trainer, scraped by Prometheus with the files of a deployment, at a shorter interval. The queries are
    made before the last step of the trainer, and no alert fires."""
    run = tiny.copy(tmp_path / "run")
    out, trainer_port, check_port = tmp_path / "d", free_port(), free_port()
    watch, asked = check.Watch(), []
    with (
        serving(exported, name="huggingface", api_key="key") as server,
        prometheus_for(exported, out, server, trainer_port, check_port, tmp_path) as url,
    ):
        listener = check.listen(watch, "127.0.0.1", check_port)
        expected = check.read_expected(out / "expected.json")
        queries = [
            (panel["title"], target["expr"])
            for name in ("serving", "training")
            for panel in json.loads((out / f"grafana/dashboards/{name}.json").read_text())["panels"]
            for target in panel.get("targets", ())
        ]
        assert len(queries) > 30

        def before_step(step: int) -> None:
            watch.update(check.check(server, expected, "key"), 0.1)
            if step < STEPS - 1:
                return
            end, empty = time.monotonic() + PATIENCE, queries
            while empty and time.monotonic() < end:
                watch.update(check.check(server, expected, "key"), 0.1)
                time.sleep(1)
                empty = [query for query in empty if not ask(url, query[1])]
            assert not empty, empty
            assert [float(one["value"][1]) for one in ask(url, "min(lmworks_check_ok)")] == [1.0]
            assert not ask(url, 'ALERTS{alertstate="firing"}')
            asked.append(step)

        before_each_step(monkeypatch, before_step)
        run.pretrain(f"metrics.prometheus_port={trainer_port}", "model.mtp.num_nextn_predict_layers=1")
        listener.shutdown()
        listener.server_close()
    assert asked


@contextmanager
def prometheus_for(exported: Path, out: Path, server: str, trainer_port: int, check_port: int, folder: Path) -> Iterator[str]:
    """Prometheus with the files of a deployment, which are written to `out`."""
    key = folder / "key"
    key.write_text("key")
    key.chmod(0o600)
    plan = plan_deployment(open_source(exported), "lmworks", "balanced", parse_gpus("h100"), port=int(server.rpartition(":")[2]))
    write_deployment(plan, out, key_file=key, trainer=f"127.0.0.1:{trainer_port}")
    promtool("check", "config", out / "prometheus.yml")
    config = yaml.safe_load((out / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (check_job,) = [job for job in config["scrape_configs"] if job["job_name"] == "check"]
    check_job["static_configs"] = [{"targets": [f"127.0.0.1:{check_port}"]}]
    (out / "prometheus.yml").write_text(yaml.safe_dump(config))
    with prometheus(out / "prometheus.yml", folder / "data") as url:
        yield url


def test_prometheus_shows_silent_ranks_and_free_disk(tmp_path: Path) -> None:
    import os

    from lmworks.watch.heartbeat import Heartbeat

    pytest.importorskip("prometheus_client")
    port = free_port()
    for rank in (0, 1, 2):
        Heartbeat(tmp_path / "beats", rank).share()
    os.utime(tmp_path / "beats" / "1.json", (time.time() - 500,) * 2)
    Heartbeat(tmp_path / "beats", 2).end("left")
    with MetricLog(tmp_path / "run", Metrics(prometheus_port=port), heartbeats=tmp_path / "beats"):
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    silent = {rank: float(value) for rank, value in re.findall(r'lmworks_rank_silent_seconds\{.*rank="(\d)"\} (\S+)', text)}
    assert set(silent) == {"0", "1"} and silent["0"] < 100 < 499 < silent["1"]
    assert float(re.findall(r"^lmworks_disk_free_bytes (\S+)", text, flags=re.M)[0]) > 0
