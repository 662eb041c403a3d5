"""Which events are alerts, what their sentence says, and when the time of a step is a stall."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from lmworks.errors import UserError
from lmworks.recipe.schema.alerts import DEFAULT_KINDS, AlertKind
from lmworks.ui.exit_codes import ExitCode
from lmworks.ui.terminal import Interrupted, Preempted
from lmworks.watch.alerts import _MAKERS, Alert, alert_of, body
from lmworks.watch.heartbeat import Beat
from lmworks.watch.run_end import RunEnd
from lmworks.watch.stall import PATIENCE, StallMonitor

EVENTS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"event": "finding", "stage": "pretrain", "step": 1200, "code": "LR-HIGH", "sentence": "The learning rate is too high."}, "finding",
     "pretrain, step 1,200: LR-HIGH: The learning rate is too high."),
    ({"event": "spike", "stage": "tune", "step": 7, "loss": 9.5, "grad_norm": 80.0, "action": "skip"}, "spike", "loss 9.5"),
    ({"event": "not_finite", "stage": "pretrain", "step": 3, "first": "layers.1"}, "spike", "not finite, first in layers.1"),
    ({"event": "rollback", "stage": "pretrain", "step": 9, "to_step": 4, "reason": "a spike"}, "spike", "back to step 4: a spike"),
    ({"event": "rollback", "stage": "pretrain", "step": 9, "to_step": 4, "reason": ""}, None, ""),
    ({"event": "stall", "step": 5, "doing": "update", "seconds": 75.0, "limit": 60.0}, "stall", "no progress for 75 s (update)"),
    ({"event": "save_failed", "stage": "tune", "step": 5, "reason": "the disk of x is full (ext4)"}, "save_failed", "disk of x is full"),
    ({"event": "rank_exit", "rank": 3, "host": "b", "code": -9, "signal": "SIGKILL", "oom_kill": True}, "dead_rank",
     "rank 3 on b was killed by SIGKILL, because memory ran out"),
    ({"event": "rank_exit", "rank": 3, "host": "b", "code": 1, "signal": None, "oom_kill": False}, None, ""),
    ({"event": "rank_exit", "rank": 3, "host": "b", "code": -15, "signal": "SIGTERM", "oom_kill": True}, None, ""),  # a peer of one
    ({"event": "rank_exit", "rank": 3, "host": "b", "code": -9, "signal": "SIGKILL", "asked": True, "oom_kill": True}, None, ""),
    ({"event": "rank_exit", "rank": 3, "host": "b", "code": -11, "signal": "SIGSEGV", "oom_kill": None}, "dead_rank", "by SIGSEGV"),
    ({"event": "restart", "step": 5, "ranks": [3], "hosts": ["b"], "reason": "rank 3 froze"}, "dead_rank", "restarted: rank 3 froze"),
    ({"event": "slow_rank", "stage": "pretrain", "step": 5, "rank": 1, "what": "arithmetic", "seconds": 0.3, "median": 0.1}, "slow_rank",
     "rank 1 is slow"),
    ({"event": "host_excluded", "host": "b", "reason": "it failed"}, "excluded_host", "host b is excluded: it failed"),
    ({"event": "requeue", "reason": "the job was preempted", "crashed": False}, "preempted", "requeued"),
    ({"event": "requeue", "reason": "the ranks exited", "crashed": True}, "dead_rank", "requeued"),
    ({"event": "run_ended", "outcome": "finished", "code": 0, "reason": ""}, "finished", "the run has finished"),
    ({"event": "run_ended", "outcome": "failed", "code": 2, "reason": "the disk is full"}, "failed", "has failed: the disk is full"),
    ({"event": "run_ended", "outcome": "preempted", "code": 75, "reason": ""}, "preempted", "preempted"),
    ({"event": "run_ended", "outcome": "stopped", "code": 130, "reason": "stopped by SIGINT"}, "stopped", "stopped"),
    ({"event": "checkpoint", "stage": "pretrain", "step": 5}, None, ""),
    ({"event": "spike", "stage": "pretrain"}, None, ""),  # of another version
    ({"event": "finding", "code": "X"}, None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("event", "kind", "text"), EVENTS, ids=[str(number) for number in range(len(EVENTS))])
def test_an_event_becomes_the_alert_of_its_kind(event: dict[str, Any], kind: str | None, text: str) -> None:
    found = alert_of({"time": 1e9, **event})
    assert (None if found is None else found.kind) == kind
    assert found is None or text in found.text


def test_each_kind_has_an_event_and_each_maker_a_case() -> None:
    assert {kind for _, kind, _ in EVENTS} - {None} == set(get_args(AlertKind))
    assert {event["event"] for event, kind, _ in EVENTS if kind} == set(_MAKERS)
    assert set(get_args(AlertKind)) - set(DEFAULT_KINDS) == {"stopped"}


def cause(event: str, **fields: Any) -> str:
    found = alert_of({"time": 1e9, "event": event, **fields})
    assert found is not None
    return found.cause


def test_what_has_one_cause() -> None:
    spike = {"stage": "pretrain", "loss": 9.0, "grad_norm": 1.0, "action": "skip"}
    assert cause("spike", step=7, **spike) == cause("spike", step=8, **spike) != cause("spike", step=8, **spike | {"stage": "tune"})
    assert cause("rank_exit", rank=3, host="b", signal="SIGKILL", oom_kill=True) == cause("restart", ranks=[3], reason="rank 3 was killed")
    assert cause("finding", code="A", sentence="s") != cause("finding", code="B", sentence="s")
    full, other = "the disk of a is full (ext4, 0.1 MB free)", "permission denied"
    assert cause("save_failed", stage="tune", reason=full) != cause("save_failed", stage="tune", reason=other)
    crash = [cause("run_ended", outcome="failed", reason=f"stopped at step {step}: no text") for step in (5, 6)]
    assert crash[0] == crash[1] != cause("run_ended", outcome="failed", reason="the disk is full")


def test_a_sentence_is_short_and_has_no_credentials(tmp_path: Path) -> None:
    reason = "s3://me:secret@bucket/x " + "long " * 2000
    found = alert_of({"time": 1e9, "event": "save_failed", "stage": "tune", "reason": reason})
    assert found is not None and "secret" not in found.text and len(found.text) < 1000
    sent = json.loads(body(found, "tiny", tmp_path, "json"))
    assert sent["text"].startswith("tiny: tune: the save failed") and sent["time"] == "2001-09-09T01:46:40Z" and sent["stage"] == "tune"
    assert body(Alert("test", "test", "hello", 0.0, {}), "tiny", tmp_path, "text") == b"tiny: hello\n"


@pytest.mark.parametrize(("error", "outcome", "code"), [
    (Interrupted("stopped"), "stopped", 130), (Preempted("stopped"), "preempted", 75), (KeyboardInterrupt(), "stopped", 130),
    (UserError("no text; give some"), "failed", 2), (RuntimeError("x"), "failed", ExitCode.BUG),
])  # fmt: skip
def test_how_a_run_ended_follows_from_what_ended_it(error: BaseException, outcome: str, code: int) -> None:
    end = RunEnd.of_error(error)
    assert (end.outcome, end.code) == (outcome, code)
    assert RunEnd.of_code(17).outcome == "failed" and RunEnd.of_code(0).outcome == "finished"


# Stalls


class Rank:
    """A rank whose heartbeats a monitor sees, on a clock of its own."""

    def __init__(self, factor: float = 10.0, minimum: float = 60.0) -> None:
        self.monitor, self.now = StallMonitor(factor, minimum), 1000.0
        self.beat = Beat(0, "host", "machine", 1)

    def spend(self, seconds: float, step: int, doing: str) -> list[float]:
        """Do something for so long, looked at every half a second; after which times a stall was reported."""
        self.beat, began, found = replace(self.beat, step=step, doing=doing, time=self.now), self.now, []
        while True:
            if (stall := self.monitor.observe(self.beat, self.now)) is not None:
                found.append(self.now - began)
                assert stall.seconds > stall.limit and (stall.step, stall.doing) == (step, doing)
            if self.now >= began + seconds:
                return found
            self.now += min(0.5, began + seconds - self.now)

    def train(self, steps: range, seconds: float) -> list[float]:
        return [late for step in steps for late in self.spend(seconds / 2, step, "data") + self.spend(seconds / 2, step, "update")]


def test_a_step_of_ten_times_the_median_and_a_minute_is_a_stall_once() -> None:
    slow, fast = Rank(), Rank()
    assert slow.train(range(20), 12.0) == [] and fast.train(range(400), 0.2) == []
    assert slow.spend(110, 20, "update") == [] and slow.spend(1000, 21, "update") == [pytest.approx(120, abs=1.5)]
    assert fast.spend(55, 400, "update") == [] and fast.spend(300, 401, "update") == [pytest.approx(60, abs=1)]
    assert fast.train(range(402, 420), 0.2) == [] and fast.spend(100, 420, "data") != [], "each stall is reported"


def test_what_was_not_timed_yet_has_half_an_hour() -> None:
    rank = Rank()
    assert rank.spend(PATIENCE - 1, 0, "update") == [], "the first step compiles"
    assert rank.train(range(1, 20), 1.0) == []
    rank.monitor.unsettle()
    assert rank.spend(600, 20, "update") == [], "so does that of a new phase"
    assert rank.train(range(21, 40), 1.0) == []
    assert rank.spend(600, 40, "validation") == [], "the first validation"
    assert rank.train(range(41, 60), 1.0) == []
    assert rank.spend(5000, 60, "validation") == [], "whose time is known now"
    assert rank.train(range(61, 80), 1.0) == [] and rank.spend(90, 80, "update") != []


def test_a_save_longer_than_ten_of_the_longest_is_a_stall() -> None:
    rank = Rank()
    assert rank.train(range(20), 1.0) == [] and rank.spend(20, 20, "save") == [] and rank.train(range(21, 40), 1.0) == []
    assert rank.spend(400, 40, "save") == [pytest.approx(200, abs=1)]


def test_after_the_end_of_training_nothing_is_expected() -> None:
    rank = Rank()
    assert rank.train(range(20), 1.0) == []
    rank.monitor.idle()
    assert rank.spend(0, 20, "save") == []
    rank.monitor.idle()
    rank.now += 10_000
    assert rank.monitor.observe(rank.beat, rank.now) is None, "the evaluation has no heartbeats"
    assert rank.train(range(20), 1.0) == [] and rank.spend(100, 20, "update") != [], "the next stage has"
