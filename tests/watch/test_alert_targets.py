"""Delivery to servers and commands that refuse, hang, redirect or die; and what the sender does about it."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alert_receiver import Receiver, appending, lines, receiver
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.alert_process import Dispatcher, Orders
from lmworks.watch.alert_targets import NotDelivered, Target
from lmworks.watch.alerting import alerting
from lmworks.watch.alerts import Alert
from lmworks.watch.ledger import LEDGER, Ledger, read_ledger
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
    book = tmp_path / LEDGER
    first, second = book.read_text(encoding="utf-8").splitlines()
    (old,) = {line["time"] for line in read_ledger(book)[:1]}
    book.write_text(first.replace(str(old), str(round(old - 3601, 3))) + "\n" + second + "\n", encoding="utf-8")
    sender = Dispatcher(orders(tmp_path, {"name": "web", "url": server.url}))
    for code in ("a", "b"):
        sender.send(finding(code))
    sender.drain()
    assert [one["cause"] for one in server.alerts] == ["finding/a"]


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
