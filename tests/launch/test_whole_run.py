"""Promise 3 on ranks: a run whose rank is killed or freezes goes on by itself, bit for bit; one that shrinks and grows sees the same."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lmworks.launch import launcher
from lmworks.launch.launch_dir import LaunchDir
from lmworks.launch.torchrun import CountRange, read_table
from lmworks.watch.heartbeat import Beat, read_local_beats
from lmworks.watch.ledger import read_ledger
from tiny_run import STEPS, Tiny, checkpoint, curve, same_bits

OPTIONS = ("model.residual_dropout=0.1", "train.save_every=3 steps", "stability.spike=null", "launch.timeout=60 s")


def launch(run: Tiny, ranks: str, *more: str, module: str = "lmworks.cli.rank", stage: str = "pretrain") -> int:
    options = [f"run_dir={run.run_dir}", *OPTIONS, *more]
    work = [stage, str(run.recipe), *(word for option in options for word in ("--set", option))]
    made = launcher.launch_local(run.resolve(*OPTIONS, *more).recipe, run.run_dir, CountRange.parse(ranks), work)
    return replace(made, module=module).run()


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_ledger(run_dir / "ledger.jsonl") if event["event"] == name]


def await_rank(run_dir: Path, rank: int, step: int, world: int) -> Beat:
    """Its heartbeat, as soon as it is at the step in a world of that size."""
    while True:
        beats = read_local_beats(LaunchDir.of(run_dir).heartbeats)
        for beat in beats if len(beats) == world else ():
            if beat.rank == rank and beat.step >= step:
                return beat
        time.sleep(0.005)


def meanwhile(act: Callable[[], None]) -> None:
    threading.Thread(target=act, daemon=True).start()


@pytest.mark.slow
@pytest.mark.parametrize(("by", "told"), [(signal.SIGKILL, "ended without an error message"), (signal.SIGSTOP, "stopped responding")])
def test_a_run_whose_rank_is_killed_or_frozen_ends_with_the_same_bits(
    tiny: Tiny, tmp_path: Path, by: signal.Signals, told: str
) -> None:
    undisturbed, hit = tiny.copy(tmp_path / "undisturbed"), tiny.copy(tmp_path / "hit")
    patience = "launch.timeout=20 s"
    assert launch(undisturbed, "2", patience) == 0
    meanwhile(lambda: os.kill(await_rank(hit.run_dir, 1, 10, 2).pid, by))
    assert launch(hit, "2", patience) == 0
    (restart,) = events(hit.run_dir, "restart")
    assert restart["ranks"] == [1] and told in restart["reason"]
    assert [line["step"] for line in curve(hit.run_dir)] == list(range(1, STEPS + 1))
    assert curve(hit.run_dir) == curve(undisturbed.run_dir)
    assert same_bits(checkpoint(hit.run_dir), checkpoint(undisturbed.run_dir)) == []


@pytest.mark.slow
def test_a_run_that_shrinks_from_four_ranks_to_three_and_grows_back_sees_the_same_data(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place is killed with its rank, and taken back while three go on. Four, three and one process add the same gradients in other
    orders: 1e-7 each time, which 33 steps of Muon amplify; another sequence in one batch would change its loss by a hundredth."""
    tests = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests.parent}", prepend=os.pathsep)
    alone, hit = tiny.copy(tmp_path / "alone"), tiny.copy(tmp_path / "hit")
    same = "model.residual_dropout=0"  # drawn by rank
    alone.pretrain(*OPTIONS, same)

    def strike() -> None:
        victim = await_rank(hit.run_dir, 3, 8, 4)
        agent = psutil.Process(victim.pid).ppid()
        os.kill(agent, signal.SIGKILL)
        os.kill(victim.pid, signal.SIGKILL)
        await_rank(hit.run_dir, 0, 12, 3)
        launcher.readmit(hit.run_dir, str(victim.host))

    meanwhile(strike)
    assert launch(hit, "3:4", same, module="slow_rank") == 0
    (shrunk,) = events(hit.run_dir, "restart")
    assert (shrunk["before"], shrunk["now"], shrunk["ranks"]) == (4, 3, [3])
    (grown,) = events(hit.run_dir, "resized")
    assert (grown["before"], grown["now"]) == (3, 4)
    lines, expected = curve(hit.run_dir), curve(alone.run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    counts = [name for name in expected[0] if "token" in name]
    assert counts and [[line[name] for name in counts] for line in lines] == [[line[name] for name in counts] for line in expected]
    far = [(line["step"], line["train/loss"], other["train/loss"]) for line, other in zip(lines, expected, strict=True)
           if not math.isclose(line["train/loss"], other["train/loss"], rel_tol=1e-3)]  # fmt: skip
    assert far == []


@pytest.mark.slow
def test_a_host_that_is_excluded_and_readmitted_at_once_trains_again(tiny: Tiny, tmp_path: Path) -> None:
    """Its ranks fail once; the group that has just met is given up, which is no failure, and both hosts train to the end."""
    run = tiny.copy(tmp_path / "run")

    def strike() -> None:
        victim = await_rank(run.run_dir, 1, 8, 2)
        os.kill(victim.pid, signal.SIGKILL)
        table = LaunchDir.of(run.run_dir).hosts
        while not any(host.excluded for host in read_table(table)):
            time.sleep(0.05)
        launcher.readmit(run.run_dir, str(victim.host))

    meanwhile(strike)
    assert launch(run, "1:2", "launch.exclude_after_failures=1") == 0
    (restart,) = events(run.run_dir, "restart")
    assert restart["now"] == 2 and events(run.run_dir, "host_excluded")
    assert [event["ranks"] for event in events(run.run_dir, "start")][-1] == 2
    assert [line["step"] for line in curve(run.run_dir)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_preflight_on_ranks_ends_with_its_own_code(tiny: Tiny, tmp_path: Path) -> None:
    """A failed check is the user's to mend: no rank is started again for it."""
    run = tiny.copy(tmp_path / "run")
    assert launch(run, "2", stage="preflight") == 0
    shard = next((run.run_dir / "shards").rglob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    assert launch(run, "2", stage="preflight") == 2
    assert not (run.run_dir / "ledger.jsonl").exists() or not events(run.run_dir, "restart")


@pytest.mark.slow
def test_a_time_becomes_the_same_numbers_on_all_ranks(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank decides, and the others train for as long: the same weights as a run whose recipe says these numbers."""
    timed, plain = tiny.copy(tmp_path / "timed"), tiny.copy(tmp_path / "plain")
    monkeypatch.setenv("LMWORKS_MACHINE", "peak=1e11,speed=1e5")
    assert launch(timed, "2", "time=15 h") == 0
    (budget,) = events(timed.run_dir, "budget")
    numbers = [f"{number['key']}={number['new']}" for number in budget["numbers"] if number["key"].startswith("train.")]
    assert len(numbers) == 2
    assert launch(plain, "2", *numbers) == 0
    assert curve(timed.run_dir) == curve(plain.run_dir)
    assert same_bits(checkpoint(timed.run_dir), checkpoint(plain.run_dir)) == []
