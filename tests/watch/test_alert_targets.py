"""Delivery to servers and commands that refuse, hang, redirect or die; and what the sender does about it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from alert_receiver import Receiver, appending, lines, receiver
from lmworks.launch import slurm
from lmworks.launch.launcher import Launch
from lmworks.launch.torchrun import Host
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.runner import _alerting
from lmworks.run.stages import StageContext
from lmworks.watch import alert_process
from lmworks.watch.alert_process import Dispatcher, Orders, Watch
from lmworks.watch.alert_targets import NotDelivered, Target, open_target
from lmworks.watch.alerting import alerting
from lmworks.watch.alerts import Alert
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import LEDGER, Ledger, events_of, read_ledger
from lmworks.watch.stop_signals import graceful_stop
from patience import PATIENCE
from ports import free_port


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


def target(url: str = "", command: list[str] | None = None, token: str = "") -> Target:
    return Target("x", "json", ("finding",), url, token, tuple(command or ()))


def tries(one: Target, timeout: float = 5.0) -> tuple[int, str, list[float]]:
    """Attempts, the reason of the failure, and the pauses between the attempts."""
    pauses: list[float] = []
    try:
        return one.deliver_patiently(b"{}", timeout, 3, pauses.append), "", pauses
    except NotDelivered as failure:
        return 0, str(failure), pauses


def test_a_server_that_fails_is_asked_again_and_one_that_refuses_is_not(server: Receiver) -> None:
    server.answers[:] = [(503, {}, 0), (429, {}, 0)]
    assert tries(target(server.url)) == (3, "", [1.0, 2.0])
    server.answers[:] = [(500, {}, 0)] * 3
    assert tries(target(server.url)) == (0, "it answers with status 500 Internal Server Error", [1.0, 2.0])
    server.answers[:] = [(403, {}, 0)]
    assert tries(target(server.url)) == (0, "it answers with status 403 Forbidden", [])
    assert len(server.requests) == 7


def test_credentials_are_never_sent_after_a_redirect(server: Receiver) -> None:
    with receiver() as other:
        for status in (301, 302, 303, 307, 308):
            server.answers[:] = [(status, {"Location": other.url + "/elsewhere"}, 0)]
            attempts, reason, pauses = tries(target(server.url.replace("://", "://me:pw@"), token="secret"))
            assert (attempts, pauses) == (0, []) and f"a redirect ({status}), which is not followed" in reason
        assert other.requests == [] and len(server.requests) == 5


def test_a_server_that_does_not_answer_is_given_up_in_time(server: Receiver) -> None:
    server.answers[:] = [(200, {}, 2.0)] * 3
    began = time.monotonic()
    assert tries(target(server.url), 0.1) == (0, "it does not answer within 0.1 s", [1.0, 2.0])
    assert time.monotonic() - began < 2
    reason = tries(target(f"http://127.0.0.1:{free_port()}/path-secret?key=secret"))[1]
    assert reason.startswith("127.0.0.1 cannot be reached (") and "secret" not in reason


def test_something_else_than_a_web_server_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                peer.sendall(b"\x00\xff" * 70_000 + b"\n")
                peer.close()

        threading.Thread(target=talk, daemon=True).start()
        attempts, reason, _ = tries(target(f"http://127.0.0.1:{listener.getsockname()[1]}/"))
    assert attempts == 0 and "127.0.0.1" in reason and "\n" not in reason and len(reason) < 300


def test_a_command_gets_no_shell_and_is_killed_with_its_children(tmp_path: Path) -> None:
    odd = tmp_path / "a file; touch b $(touch c)"
    assert tries(target(command=appending(odd))) == (1, "", [])
    assert lines(odd) == [{}] and [path.name for path in tmp_path.iterdir()] == [odd.name]
    assert tries(target(command=[sys.executable, "-S", "-c", "raise SystemExit(3)"]))[1] == "it ended with exit code 3"
    assert tries(target(command=[str(tmp_path / "none")]))[1:] == ("it cannot be started: No such file or directory", [])
    still = tmp_path / "still"
    child = f"import time\nfor _ in range(200):\n open({str(still)!r}, 'a').write('x'); time.sleep(0.02)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', {child!r}]); time.sleep(60)"
    assert tries(target(command=[sys.executable, "-S", "-c", code]), 1.0)[1] == "it did not end within 1 s and was killed"
    time.sleep(0.1)
    size = still.stat().st_size
    time.sleep(0.2)
    assert still.stat().st_size == size, "what it had started goes on"


def orders(run_dir: Path, *targets: dict[str, Any]) -> Orders:
    known = {"form": "json", "on": ["finding"], "url": "", "token": "", "command": []}
    return Orders("tiny", str(run_dir), [known | one for one in targets], 3600.0, 0.2, 1, 10.0, 60.0, True, None, 1)


def finding(code: str) -> Alert:
    return Alert("finding", f"finding/{code}", "text", time.time(), {})


def test_one_target_that_hangs_delays_no_other_and_a_cause_that_failed_is_not_tried_at_once(tmp_path: Path, server: Receiver) -> None:
    with receiver() as slow:
        slow.answers[:] = [(200, {}, 1.0)] * 9
        sender = Dispatcher(orders(tmp_path, {"name": "slow", "url": slow.url}, {"name": "web", "url": server.url}))
        for code in ("a", "b", "a"):
            sender.send(finding(code))
        sender.drain()
        sender.send(finding("a"))
        sender.drain()
        again = Dispatcher(orders(tmp_path, {"name": "slow", "url": slow.url}, {"name": "web", "url": server.url}))
        again.send(finding("a"))
        again.drain()
        assert len(slow.requests) == 2
    assert [one["cause"] for one in server.alerts] == ["finding/a", "finding/b"]
    found = [(line["event"], line["target"], line["cause"]) for line in read_ledger(tmp_path / LEDGER)]
    assert sorted(found) == [
        ("alert_failed", "slow", "finding/a"), ("alert_failed", "slow", "finding/b"), ("alert_sent", "web", "finding/a"),
        ("alert_sent", "web", "finding/b"),
    ]  # fmt: skip


def test_after_an_hour_the_same_cause_is_sent_again(tmp_path: Path, server: Receiver) -> None:
    with Ledger(tmp_path / LEDGER) as ledger:
        ledger.write("alert_sent", target="web", kind="finding", cause="finding/a")
        ledger.write("alert_sent", target="web", kind="finding", cause="finding/b")
        ledger.write("alert_sent", target="other", kind="finding", cause="finding/c")
    book = tmp_path / LEDGER
    first, *others = book.read_text(encoding="utf-8").splitlines()
    (old,) = {line["time"] for line in read_ledger(book)[:1]}
    book.write_text(first.replace(str(old), str(round(old - 3601, 3))) + "\n" + "\n".join(others) + "\n", encoding="utf-8")
    sender = Dispatcher(orders(tmp_path, {"name": "web", "url": server.url}))
    for code in ("a", "b", "c"):
        sender.send(finding(code))
    sender.drain()
    assert [one["cause"] for one in server.alerts] == ["finding/a", "finding/c"]


def test_a_sender_that_is_gone_or_stopped_never_delays_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads nothing: the pipe fills up, and the run goes on."""
    from lmworks.watch import alerting as module

    for code in ("import time; time.sleep(60)", "raise SystemExit"):
        monkeypatch.setattr(module, "COMMAND", [sys.executable, "-S", "-c", code])
        monkeypatch.setattr(module, "_MORE_PATIENCE", -12.0)  # seconds beside those of all attempts, ten and two
        recipe = Recipe.model_validate({"name": "tiny", "alerts": {"attempts": 1, "targets": [{"name": "x", "command": ["true"]}]}})
        began = time.monotonic()
        with alerting(recipe, tmp_path, owner=True), Ledger(tmp_path / LEDGER) as ledger:
            for step in range(500):
                ledger.write("finding", stage="pretrain", step=step, code=f"C{step}", sentence="long " * 100)
        assert time.monotonic() - began < 20


def test_a_cause_whose_alert_failed_is_tried_again_after_a_while(tmp_path: Path, server: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alert_process, "_RETRY_FAILED", -1.0)
    server.answers[:] = [(500, {}, 0)]
    sender = Dispatcher(orders(tmp_path, {"name": "web", "url": server.url}))
    for _ in range(3):
        sender.send(finding("a"))
        sender.drain()
    assert [line["event"] for line in read_ledger(tmp_path / LEDGER)] == ["alert_failed", "alert_sent"] and len(server.requests) == 2


def test_a_target_that_never_answers_is_in_the_ledger_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(Target, "deliver_patiently", lambda *_: answer.wait(PATIENCE))
    sender = Dispatcher(orders(tmp_path, {"name": "web"}))
    sender.send(finding("a"))
    sender.drain()
    (line,) = read_ledger(tmp_path / LEDGER)
    assert (line["event"], line["target"], line["reason"]) == ("alert_failed", "web", "it does not answer")
    answer.set()
    assert replace(orders(tmp_path), attempts=3, timeout=10.0).patience >= 3 * 10 + 1 + 2, "all attempts, and the pauses between them"


def test_a_target_gets_the_kinds_that_it_wants(tmp_path: Path, server: Receiver) -> None:
    sender = Dispatcher(orders(tmp_path, {"name": "web", "url": server.url, "on": ["failed"]}))
    sender.send(finding("a"))
    sender.drain()
    assert server.alerts == []


@pytest.mark.parametrize(("owner", "messages", "ends"), [
    (True, [], [("failed", "ended without a last word, as when it is killed")]), (False, [], []), (True, [{"ended": True}], []),
    (True, [{"stopping": "SIGINT"}], [("stopped", "was killed after SIGINT, before it had saved")]),
    (True, [{"stopping": "SIGTERM"}], [("failed", "was killed after SIGTERM, before it had saved")]),
])  # fmt: skip
def test_the_end_of_a_run_that_was_killed_is_reported_by_the_process_of_its_owner(
    tmp_path: Path, owner: bool, messages: list[dict[str, Any] | None], ends: list[tuple[str, str]]
) -> None:
    Watch(replace(orders(tmp_path), owner=owner)).run(iter(messages))
    found = events_of(tmp_path, "run_ended")
    assert [event["outcome"] for event in found] == [outcome for outcome, _ in ends]
    assert all(text in event["reason"] for event, (_, text) in zip(found, ends, strict=True))


@pytest.mark.parametrize(("message", "of", "stalls"), [(None, 0, 1), ({"idle": True}, 0, 0), (None, 1, 0)])
def test_a_stall_is_one_of_the_parent_and_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any] | None, of: int, stalls: int
) -> None:
    """Nothing is expected after the end of training, nor from the heartbeats that another process has left."""
    now = [0.0]
    monkeypatch.setattr(alert_process, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep))
    heartbeat = Heartbeat(tmp_path / "alerts", shares=False)
    heartbeat.beat(3, "update")

    def messages() -> Iterator[dict[str, Any] | None]:
        for now[0] in (0.0, 5000.0, 10_000.0):
            yield None
            yield message

    about = replace(orders(tmp_path), owner=False, heartbeats=str(tmp_path / "alerts"), parent=os.getpid() + of)
    Watch(about).run(messages())
    heartbeat.end("left")
    assert len(events_of(tmp_path, "stall")) == stalls


def recipe(*targets: dict[str, Any]) -> Recipe:
    return Recipe.model_validate({"name": "tiny", "alerts": {"targets": [{"name": "x", **one} for one in targets]}})


def test_what_the_ledger_and_signals_say_is_told_to_the_process_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.watch import alerting as module

    told = tmp_path / "told"
    copies = f"import sys; open({str(told)!r}, 'wb').write(sys.stdin.buffer.read())"
    monkeypatch.setattr(module, "COMMAND", [sys.executable, "-S", "-c", copies])
    with alerting(recipe({"command": ["true"]}), tmp_path, owner=True):
        (tmp_path / "other").mkdir()
        with Ledger(tmp_path / "other" / LEDGER) as other:
            other.write("finding", code="A", sentence="It is of another run.")
        with Ledger(tmp_path / LEDGER) as ledger:
            ledger.write("phase", step=3)
            ledger.write("finding", code="B", sentence="It is so.")
            ledger.write("finish", step=5)
        with graceful_stop():
            os.kill(os.getpid(), signal.SIGTERM)
    _, *messages = [json.loads(line) for line in told.read_text().splitlines()]
    shown = [message["alert"]["cause"] if "alert" in message else message for message in messages]
    assert shown == [{"unsettled": True}, "finding//B", {"idle": True}, {"stopping": "SIGTERM"}, {"ended": True}]


def test_a_signal_that_is_meant_for_the_run_does_not_end_the_process_beside_it(tmp_path: Path) -> None:
    file, before = tmp_path / "got.jsonl", {one.pid for one in psutil.Process().children()}
    with alerting(recipe({"command": appending(file)}), tmp_path, owner=True), Ledger(tmp_path / LEDGER) as ledger:
        ledger.write("finding", code="A", sentence="It is so.")
        until = time.monotonic() + PATIENCE
        while not file.exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        for beside in psutil.Process().children():
            if beside.pid not in before:
                beside.send_signal(signal.SIGTERM)
        ledger.write("finding", code="B", sentence="It is so, too.")
    assert [one["code"] for one in lines(file)] == ["A", "B"]


def test_the_credentials_of_a_command_are_not_in_the_recipe_and_reach_it() -> None:
    url = "https://me:pass-sesame@example.org/x"
    (options,) = recipe({"command": ["true", url]}).alerts.targets
    assert "sesame" not in str(options) and open_target(options).command == ("true", url)


@contextmanager
def noted(asked: list[bool]) -> Iterator[pytest.MonkeyPatch]:
    """Whoever enters `alerting` is noted, as owner or not."""
    with pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def alerting(recipe: Recipe, run_dir: Path, *, owner: bool, heartbeats: Path | None = None) -> Iterator[None]:
            asked.append(owner)
            yield

        for name in ("lmworks.watch.alerting", "lmworks.launch.launcher", "lmworks.launch.slurm"):
            patch.setattr(f"{name}.alerting", alerting)
        yield patch


@pytest.mark.parametrize(("rank", "asked"), [(None, [True]), ("0", [False]), ("1", [])])
def test_the_end_of_launched_ranks_is_left_to_the_launcher(tmp_path: Path, rank: str | None, asked: list[bool]) -> None:
    found: list[bool] = []
    with noted(found) as patch:
        patch.delenv("RANK", raising=False)
        if rank is not None:
            patch.setenv("RANK", rank)
        with _alerting(StageContext(recipe({"command": ["true"]}), tmp_path, "")):
            pass
    assert found == asked


def test_a_launcher_and_the_end_of_a_slurm_job_report_how_the_run_ended(tmp_path: Path) -> None:
    found: list[bool] = []
    with noted(found) as patch:
        patch.setattr(Launch, "supervise", lambda self: 3)
        launch = Launch(recipe({"command": ["true"]}), tmp_path / "a", [Host("local-0", 1)], 1, "127.0.0.1", ["pretrain"])
        assert launch.run() == 3 and found == [True]
        asked = recipe({"command": ["true"]}).model_copy(update={"launch": launch.recipe.launch.model_copy(update={"max_restarts": 0})})
        (tmp_path / "b").mkdir()
        assert slurm.finish_job(asked, tmp_path / "b", 1).code == 1 and found == [True, True]
    for name in ("a", "b"):
        assert [event["outcome"] for event in events_of(tmp_path / name, "run_ended")] == ["failed"]
