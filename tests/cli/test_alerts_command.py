"""Alerts of whole runs: `lmworks pretrain` with a recipe that alerts to a server and a command of this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Done, Lmworks

from alert_receiver import Receiver, appending, lines, receiver
from lmworks.checkpoint.save import CheckpointWriter
from lmworks.cli.main import main
from lmworks.host import machine
from lmworks.io import jsonl
from lmworks.model import Transformer
from lmworks.watch.heartbeat import Beat, read_local_beats
from lmworks.watch.ledger import Ledger, read_ledger
from patience import PATIENCE
from rank_pool import FORKS
from tiny_run import Tiny, before_each_step

SHORT = ("train.phases.general.tokens=1728 tokens", "train.phases.long.tokens=1024 tokens")  # 8 steps and 4
STEADY = ("train.phases.general.tokens=3008 tokens",)  # 13 steps, as in the recipe: a spike is judged by the steps before it
SPIKE = ("stability.spike.window_steps=8", "stability.spike.min_rise_nats=3", "stability.spike.norm_factor=1000")


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


def words(run: Tiny, targets: Sequence[dict[str, Any]], *more: str) -> list[str]:
    options = [f"run_dir={run.run_dir}", *SHORT, f"alerts.targets={yaml.safe_dump(targets, default_flow_style=True, width=10_000)}", *more]
    return [str(run.recipe), *(word for option in options for word in ("--set", option))]


def pretrain(lmworks: Lmworks, run: Tiny, targets: Sequence[dict[str, Any]], *more: str) -> Done:
    return lmworks("pretrain", *words(run, targets, *more))


def sent(run: Tiny, event: str = "alert_sent") -> Counter[tuple[str, str]]:
    return Counter((line["target"], line["kind"]) for line in read_ledger(run.run_dir / "ledger.jsonl") if line["event"] == event)


def every_file(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "url_credentials.json")


def test_a_run_alerts_a_server_and_a_command_once_per_cause_and_no_file_has_the_credentials(
    lmworks: Lmworks, tiny_copy: Tiny, server: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A finding twice, a spike in two steps, and the end; then the same findings again in a process that is started again."""
    monkeypatch.setenv("ALERT_TOKEN", "tok-sesame-secret")
    url = server.url.replace("://", "://me:pass-sesame@") + "/hook?token=query-sesame"
    file, ledger = tmp_path / "got.jsonl", tiny_copy.run_dir / "ledger.jsonl"
    targets = [
        {"name": "web", "url": url}, {"name": "bearer", "url": server.url + "/bearer", "token_variable": "ALERT_TOKEN", "on": ["finished"]},
        {"name": "file", "command": appending(file), "on": ["finding", "finished"]},
    ]  # fmt: skip
    honest, now = Transformer.loss, {"step": -1}

    def plant(step: int) -> None:
        now["step"] = step
        if step in (4, 5):
            with Ledger(ledger) as book:
                book.write("finding", stage="pretrain", step=step, code="LR-HIGH", sentence="The learning rate is too high.")

    def loss(self: Transformer, *inputs: Any) -> Any:
        found = honest(self, *inputs)
        if now["step"] not in (10, 11):
            return found
        return replace(found, head=found.head._replace(cross_entropy=found.head.cross_entropy * 50))

    with monkeypatch.context() as patch:
        before_each_step(patch, plant)
        patch.setattr(Transformer, "loss", loss)
        done = pretrain(lmworks, tiny_copy, targets, *STEADY, *SPIKE)
        assert done.code == 0, done.err
    web = [one for one, (headers, _) in zip(server.alerts, server.requests, strict=True) if headers["path"].startswith("/hook")]
    assert [one["kind"] for one in web] == ["finding", "spike", "finished"]
    assert web[0]["text"] == "tiny: pretrain, step 4: LR-HIGH: The learning rate is too high." and web[0]["code"] == "LR-HIGH"
    assert web[1]["step"] == 10 and web[0]["run_dir"] == str(tiny_copy.run_dir)
    basic = "Basic " + b64encode(b"me:pass-sesame").decode()
    assert {headers["authorization"] for headers, _ in server.requests} == {basic, "Bearer tok-sesame-secret"}
    assert "/hook?token=query-sesame" in [headers["path"] for headers, _ in server.requests]
    assert [one["kind"] for one in lines(file)] == ["finding", "finished"]
    expected = {("web", "finding"): 1, ("web", "spike"): 1, ("web", "finished"): 1, ("bearer", "finished"): 1}
    expected |= {("file", "finding"): 1, ("file", "finished"): 1}
    assert sent(tiny_copy) == expected and not sent(tiny_copy, "alert_failed")
    written = every_file(tiny_copy.run_dir) + (done.out + done.err).encode()
    assert b"sesame" not in written and b"LR-HIGH" in written
    before_each_step(monkeypatch, plant)
    (tiny_copy.run_dir / "checkpoints").rename(tmp_path / "former")
    assert pretrain(lmworks, tiny_copy, targets, *STEADY, *SPIKE).code == 0
    assert Counter(server.kinds) == {"finding": 1, "spike": 1, "finished": 2} and len(lines(file)) == 2


@pytest.mark.parametrize(("number", "code", "kinds", "asked"), [
    (signal.SIGINT, 130, [], ["stopped"]), (signal.SIGTERM, 75, ["preempted"], ["preempted"]),
])  # fmt: skip
def test_a_stop_at_the_terminal_is_no_alert_unless_asked_for_and_a_preemption_is_one(
    lmworks: Lmworks, tiny_copy: Tiny, server: Receiver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, code: int,
    kinds: list[str], asked: list[str],
) -> None:  # fmt: skip
    file = tmp_path / "got.jsonl"
    before_each_step(monkeypatch, lambda step: os.kill(os.getpid(), number) if step == 3 else None)
    asks = {"name": "file", "command": appending(file), "on": ["stopped", "preempted", "finished", "failed"]}
    assert pretrain(lmworks, tiny_copy, [{"name": "web", "url": server.url}, asks]).code == code
    assert server.kinds == kinds and [one["kind"] for one in lines(file)] == asked
    assert "resume with" in lines(file)[0]["text"]


def test_a_full_disk_is_an_alert_although_the_ledger_cannot_be_written(
    lmworks: Lmworks, tiny_copy: Tiny, server: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for the saves that fail and one for the end, which the process that trains can write nowhere."""
    honest, now = jsonl.append, {"step": -1}

    def no_space(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def full(fd: int, record: dict[str, Any]) -> None:
        (no_space if now["step"] >= 2 else honest)(fd, record)

    monkeypatch.setattr(jsonl, "append", full)
    monkeypatch.setattr(CheckpointWriter, "_write_data", no_space)
    before_each_step(monkeypatch, lambda step: now.update(step=step))
    done = pretrain(lmworks, tiny_copy, [{"name": "web", "url": server.url}], "stability.max_failed_saves=2", "train.save_every=2 steps")
    assert "is full" in done.error
    assert server.kinds == ["save_failed", "failed"]
    assert all("is full" in one["text"] for one in server.alerts) and server.alerts[1]["code"] == 2


def test_a_run_that_hangs_and_is_then_killed_is_reported_by_the_process_beside_it(tiny_copy: Tiny, server: Receiver) -> None:
    """SIGSTOP, which also stops threads; then SIGKILL, which leaves no last word."""
    folder = tiny_copy.run_dir / "alerts"
    options = ("alerts.stall_min=0.3 s", "alerts.stall_factor=3", "train.phases.long.tokens=1M tokens", "shards.max_epochs=100000",
               "train.save_every=100%", "train.validate_every=100%")  # fmt: skip
    arguments = ["lmworks", "pretrain", *words(tiny_copy, [{"name": "web", "url": server.url}], *options)]
    process = FORKS.Process(target=command, args=(arguments, os.environ[machine.VARIABLE]))
    process.start()
    assert process.pid is not None
    try:
        beat = await_step(folder, process.pid, 40)
        while "stall" not in server.kinds:  # forty steps may be over before the process beside it has seen one
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.5)
            os.kill(process.pid, signal.SIGSTOP)
            until = time.monotonic() + 5
            while time.monotonic() < until and "stall" not in server.kinds:
                time.sleep(0.02)
        stall = server.wait_for("stall")
        assert stall["step"] >= beat.step and "no progress for" in stall["text"]
        process.kill()
        failed = server.wait_for("failed")
        assert f"process {process.pid} ended without a last word" in failed["text"]
    finally:
        process.kill()
        process.join()
    until = time.monotonic() + PATIENCE
    while sent(tiny_copy) != {("web", "stall"): 1, ("web", "failed"): 1}:
        assert time.monotonic() < until, sent(tiny_copy)
        time.sleep(0.05)
    assert server.kinds == ["stall", "failed"]
    lines = read_ledger(tiny_copy.run_dir / "ledger.jsonl")
    assert [line["outcome"] for line in lines if line["event"] == "run_ended" and line["process"] == process.pid] == ["failed"]


def command(arguments: list[str], told: str) -> None:
    """A command in a process that has imported torch already."""
    os.environ[machine.VARIABLE] = told
    sys.argv = arguments
    main()


def await_step(folder: Path, process: int, step: int) -> Beat:
    """The heartbeat of the process as soon as it is at the step."""
    until = time.monotonic() + PATIENCE
    while True:
        for beat in read_local_beats(folder):
            if beat.pid == process and beat.step >= step:
                return beat
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_target_that_cannot_be_used_is_refused_before_the_first_stage(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Tiny(tiny.recipe, tmp_path / "run")
    monkeypatch.setenv("HOOK", "hooks.example/x")
    monkeypatch.setenv("BAD_TOKEN", "s3cr3t\nX-Header: y")
    for target, error in (
        ({"command": ["no-such-program-4711"]}, "there is no program no-such-program-4711 here"),
        ({"url_variable": "NO_SUCH_VARIABLE"}, "the environment variable NO_SUCH_VARIABLE is not set"),
        ({"url_variable": "HOOK"}, "HOOK: it is not a URL of the form https://HOST/PATH"),
        ({"url": "https://a.example/", "token_variable": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE is not set"),
        ({"url": "https://a.example/", "token_variable": "BAD_TOKEN"}, "BAD_TOKEN is not a token: it has characters that"),
        ({"command": ["true"], "token_variable": "BAD_TOKEN"}, "token_variable is for a URL"),
        ({"url": "ftp://a.example/"}, "it is not a URL of the form"),
        ({"url": "https://hooks.slack.com/services/T0/B0/s3cr3t"}, "looks like a secret"),
        ({"url": "https://a.example/x", "command": ["true"]}, "give one of url, url_variable and command, not url and command"),
        ({}, "not none"),
    ):
        done = pretrain(lmworks, new, [{"name": "web", **target}])
        assert error in done.error, done.err
        assert "s3cr3t" not in done.out + done.err
    assert "alerts.targets lists web twice" in pretrain(lmworks, new, [{"name": "web", "command": ["true"]}] * 2).error
    assert not (new.run_dir / "ledger.jsonl").exists()


def test_preflight_sends_a_test_alert_and_fails_with_the_reason(
    lmworks: Lmworks, tiny: Tiny, server: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmworks.preflight import checks

    monkeypatch.setattr(checks, "CHECKS", tuple(check for check in checks.CHECKS if check.name == "alerts"))
    file = tmp_path / "got.jsonl"
    targets = [{"name": "web", "url": server.url, "on": ["failed"]}, {"name": "file", "command": appending(file)}]
    done = lmworks("preflight", *words(tiny, targets))
    assert done.code == 0 and "taken by web, file" in done.out, done.out
    assert server.kinds == ["test"] and [one["kind"] for one in lines(file)] == ["test"]
    server.answers[:] = [(404, {}, 0.0)]
    done = lmworks("preflight", *words(tiny, targets))
    assert done.code == 1 and "alerts.targets.web: it answers with status 404 Not Found" in done.out, done.out
    done = lmworks("preflight", *words(tiny, [{"name": "file", "command": ["no-such-program-4711"]}]))
    assert done.code == 1 and "there is no program no-such-program-4711" in done.out
    assert lmworks("preflight", *words(tiny, [])).code == 0
