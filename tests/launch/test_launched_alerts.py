"""Alerts of launched ranks: a rank that is killed is reported once, and so is the end, by the launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from test_whole_run import await_rank, events, launch, meanwhile

from alert_receiver import Receiver, receiver
from tiny_run import Tiny


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.mark.slow
def test_a_rank_that_is_killed_and_the_end_are_one_alert_each(tiny: Tiny, tmp_path: Path, server: Receiver) -> None:
    hit = tiny.copy(tmp_path / "hit")
    targets = "alerts.targets=" + yaml.safe_dump([{"name": "web", "url": server.url}], default_flow_style=True, width=10_000)
    meanwhile(lambda: os.kill(await_rank(hit.run_dir, 1, 10, 2).pid, signal.SIGKILL))
    assert launch(hit, "2", targets) == 0
    assert server.kinds == ["dead_rank", "finished"]
    assert "rank 1" in server.alerts[0]["text"]
    assert [event["outcome"] for event in events(hit.run_dir, "run_ended")][-1] == "finished"


@pytest.mark.slow
def test_a_launch_that_cannot_go_on_says_why(tiny: Tiny, tmp_path: Path, server: Receiver) -> None:
    """A user error of the first rank, which the launcher does not print itself."""
    hit = tiny.copy(tmp_path / "hit")
    targets = "alerts.targets=" + yaml.safe_dump([{"name": "web", "url": server.url}], default_flow_style=True, width=10_000)
    assert launch(hit, "2", targets, "tokenizer.path=/no/such/tokenizer") == 2
    assert server.kinds == ["failed"] and "/no/such/tokenizer" in server.alerts[0]["text"]
