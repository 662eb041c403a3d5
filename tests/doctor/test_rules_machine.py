"""Rules of the machine, of experts and of ranks: each signature is named, and what looks like it is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rule_verdicts import STEPS, judge, verdict

from lmworks.watch.rule import Finding

EVERY = range(1, STEPS + 1)


def run(metrics: Mapping[str, Any] = {}, *overrides: str, events: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A run whose lines are ten seconds apart, on one core of its own."""
    columns: dict[str, Any] = {
        "perf/step_seconds": [9.8] * STEPS, "perf/data_wait": [0.05] * STEPS, "perf/save_seconds": [0.0] * STEPS,
        "perf/cpu_seconds": [9.7] * STEPS, "perf/gap_seconds": [0.01] * STEPS, "perf/resident_memory": [1e9] * STEPS,
        "system/load": [0.9] * STEPS, "system/cpu_pressure": [0.02] * STEPS, "system/memory": [4e9] * STEPS,
        "system/throttled_seconds": [0.0] * STEPS,
    }  # fmt: skip
    return {"metrics": {**columns, **metrics}, "overrides": overrides, "events": events}


CACHE = 'shards.cache={"dir": "/tmp/cache", "max_bytes": "1GB"}'
CROWDED = {"perf/cpu_seconds": [2.0] * STEPS, "system/cpu_pressure": [0.95] * STEPS, "system/load": [5.0] * STEPS}


def test_waiting_for_data_is_a_slow_loader_and_short_waits_are_not(tmp_path: Path) -> None:
    waits = {"perf/data_wait": [4.0] * STEPS, "perf/cpu_seconds": [5.7] * STEPS}
    starved = {"event": "data_starved", "step": 60, "share": 0.4, "steps": 10}
    found = judge(tmp_path, "slow-loader", **run(waits, events=[starved]))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.changes[0].key == "shards.cache"
    cached = judge(tmp_path, "slow-loader", **run(waits, CACHE, events=[starved]))
    assert isinstance(cached, Finding) and cached.changes[0].key == "shards.cache.prefetch"
    assert verdict(judge(tmp_path, "slow-loader", **run(waits))) == "unsure"
    assert verdict(judge(tmp_path, "slow-loader", **run(waits | {"system/io_pressure": [0.6] * STEPS}))) == "named"
    assert verdict(judge(tmp_path, "slow-loader", **run())) == "silent"
    first = {"perf/data_wait": [300.0] + [0.05] * (STEPS - 1)}  # a cold start
    assert verdict(judge(tmp_path, "slow-loader", **run(first))) == "silent"


def test_a_crowded_machine_is_named_a_shared_one_noted_and_a_slow_loader_neither(tmp_path: Path) -> None:
    assert verdict(judge(tmp_path, "machine-oversubscribed", **run(CROWDED))) == "named"
    held = {"perf/cpu_seconds": [2.5] * STEPS, "system/throttled_seconds": [7.0] * STEPS}
    assert verdict(judge(tmp_path, "machine-oversubscribed", **run(held))) == "named"
    shared = {"perf/cpu_seconds": [6.0] * STEPS, "system/cpu_pressure": [0.7] * STEPS}
    assert verdict(judge(tmp_path, "machine-oversubscribed", **run(shared))) == "note"
    assert verdict(judge(tmp_path, "machine-oversubscribed", **run())) == "silent"
    loader = {"perf/data_wait": [6.0] * STEPS, "perf/cpu_seconds": [3.7] * STEPS}  # it is not waiting for a processor
    assert verdict(judge(tmp_path, "machine-oversubscribed", **run(loader))) == "silent"
    quota = {"perf/cpu_seconds": [2.5] * STEPS, "system/cpu_pressure": [0.53] * STEPS}  # the least that was measured under one
    assert verdict(judge(tmp_path, "machine-oversubscribed", **run(quota))) == "named"
    apart = {"perf/cpu_seconds": [0.8] * STEPS, "system/cpu_pressure": [0.37] * STEPS}  # ranks that wait for one that hangs
    assert verdict(judge(tmp_path, "machine-oversubscribed", **run(apart))) == "silent"
    idle = {"perf/cpu_seconds": [2.0] * STEPS}  # little processor time, and nobody who takes it: disks, a network, a GPU
    assert verdict(judge(tmp_path, "machine-oversubscribed", **run(idle))) == "silent"


def granted(found: Finding | str | None) -> float:
    """The processor time per second that a finding of machine-oversubscribed has measured."""
    assert isinstance(found, Finding)
    return found.evidence[0].value


SHARED = {"perf/cpu_seconds": [6.0] * STEPS, "system/cpu_pressure": [0.7] * STEPS}
AN_HOUR_AT_100 = [1.0e9 + 10.0 * step + 3600.0 * (step > 100) for step in EVERY]


def test_a_stop_between_two_lines_is_no_lack_of_processor_time(tmp_path: Path) -> None:
    """The line of the step after that of the resume is the first of the new process."""
    stopped = run(SHARED | {"time": AN_HOUR_AT_100}, events=[{"event": "resume", "step": 100, "steps": STEPS}])
    found = judge(tmp_path, "machine-oversubscribed", **stopped)
    assert verdict(found) == "note" and granted(found) == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("hour", [3600.0, -3600.0])
def test_a_clock_that_is_set_is_no_lack_of_processor_time(hour: float, tmp_path: Path) -> None:
    times = [1.0e9 + 10.0 * step + hour * (step > 100) for step in EVERY]
    found = judge(tmp_path, "machine-oversubscribed", **run(SHARED | {"time": times, "perf/elapsed_seconds": [10.0 * n for n in EVERY]}))
    assert verdict(found) == "note" and granted(found) == pytest.approx(0.6, abs=0.01)


def test_processes_of_earlier_versions_are_timed_by_the_clock(tmp_path: Path) -> None:
    """Also where a newer version has resumed the run, and writes the seconds of its own process."""
    elapsed = {step: 10.0 * (step - 90) for step in EVERY if step > 100}
    newer = run(SHARED | {"perf/elapsed_seconds": elapsed}, events=[{"event": "resume", "step": 100, "steps": STEPS}])
    for given in (run(SHARED), newer):
        assert granted(judge(tmp_path, "machine-oversubscribed", **given)) == pytest.approx(0.6, abs=0.01)


def pauses(every: Sequence[int], seconds: float = 30.0) -> dict[str, Any]:
    return {"perf/gap_seconds": [seconds if step in every else 0.01 for step in EVERY]}


def test_pauses_with_a_period_are_named_and_pauses_at_random_are_not(tmp_path: Path) -> None:
    found = judge(tmp_path, "periodic-pause", **run(pauses(range(20, STEPS, 20))))
    assert verdict(found) == "named" and isinstance(found, Finding)
    assert [one.value for one in found.evidence][1:4] == [1.0, 20.0, pytest.approx(29.99)] and not found.changes[0].key
    assert verdict(judge(tmp_path, "periodic-pause", **run(pauses([11, 25, 30, 77, 90, 101, 133, 160, 199])))) == "silent"
    assert verdict(judge(tmp_path, "periodic-pause", **run(pauses(range(20, STEPS, 20), 0.4)))) == "silent"  # 4% of a step
    assert verdict(judge(tmp_path, "periodic-pause", **run(pauses([1])))) == "silent"  # a slow first step


def test_pauses_that_a_run_makes_of_its_own_accord_are_not_named(tmp_path: Path) -> None:
    """After saves, validations and samples, and where the rules judge the run."""
    every = range(20, STEPS, 20)
    measured: list[Any] = [1.0 if step in every else ... for step in EVERY]
    after = pauses([step + 1 for step in every])
    for given in (pauses(every), after):
        for name in ("perf/save_seconds", "perf/validation_seconds", "perf/evaluation_seconds"):
            assert verdict(judge(tmp_path, "periodic-pause", **run(given | {name: measured}))) == "silent", name
        assert verdict(judge(tmp_path, "periodic-pause", **run(given, 'train.sample_every="20 steps"'))) == "silent"
    assert verdict(judge(tmp_path, "periodic-pause", **run(after))) == "named"
    assert verdict(judge(tmp_path, "periodic-pause", **run(after, 'metrics.diagnose_every="226 s"'))) == "silent"
    found = judge(tmp_path, "periodic-pause", **run(after, 'metrics.detail_every="20 steps"'))
    assert isinstance(found, Finding) and found.changes[0].key == "metrics.detail_every"
    found = judge(tmp_path, "periodic-pause", **run(after, 'stability.recheck_every="20 steps"'))
    assert isinstance(found, Finding) and found.changes[0].key == "stability.recheck_every"


@pytest.mark.parametrize(("cpu", "computed"), [(9.7, 0.0), (39.7, 1.0)])
def test_a_pause_in_which_the_process_computes_is_told_from_one_in_which_it_waits(cpu: float, computed: float, tmp_path: Path) -> None:
    every = range(20, STEPS, 20)
    seconds = {"perf/cpu_seconds": [cpu if step in every else 9.7 for step in EVERY]}
    found = judge(tmp_path, "periodic-pause", **run(pauses(every) | seconds))
    assert isinstance(found, Finding) and found.evidence[-1].value == pytest.approx(computed, abs=0.01)


def test_memory_that_grows_is_named_and_memory_that_settles_is_not(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 5e6, STEPS)
    grows = {"perf/resident_memory": 1e9 + 1e7 * np.arange(STEPS) + noise}
    assert verdict(judge(tmp_path, "memory-growing", **run(grows))) == "named"
    settles = {"perf/resident_memory": 1e9 + 2e9 * (1 - np.exp(-np.arange(STEPS) / 25)) + noise}
    assert verdict(judge(tmp_path, "memory-growing", **run(settles))) == "silent"
    step = {"perf/resident_memory": np.where(np.arange(STEPS) > 120, 2e9, 1e9) + noise}  # a longer sequence, a validation
    assert verdict(judge(tmp_path, "memory-growing", **run(step))) == "silent"
    again = [{"event": "resume", "step": 180}]
    assert verdict(judge(tmp_path, "memory-growing", **run(grows, events=again))) == "not judged"


def test_fragments_are_named_by_allocations_that_had_to_try_again(tmp_path: Path) -> None:
    full = {"perf/memory": [5e10] * STEPS, "perf/memory_reserved": [7.6e10] * STEPS}
    assert verdict(judge(tmp_path, "memory-fragmented", **run(full | {"perf/alloc_retries": [0.0, 1.0] * 100}))) == "named"
    assert verdict(judge(tmp_path, "memory-fragmented", **run(full | {"perf/alloc_retries": [0.0] * STEPS}))) == "silent"
    tight = {"perf/memory": [7.4e10] * STEPS, "perf/memory_reserved": [7.6e10] * STEPS, "perf/alloc_retries": [0.0, 1.0] * 100}
    assert verdict(judge(tmp_path, "memory-fragmented", **run(tight))) == "unsure"


def moe(load_cv: float, load_max: float, dead: float, bias: float = 0.2, rate: float = 0.001, method: str = "bias") -> dict[str, Any]:
    balance = f'"balance": {{"method": "{method}", "bias_update_rate": {rate}}}'
    recipe = f'model.moe={{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, {balance}}}'
    early = 40  # a router that begins out of balance is healthy
    columns = {"load_cv": load_cv, "load_max": load_max, "dead": dead, "bias_max": bias}
    starts = {"load_cv": 1.5, "load_max": 3.9, "dead": 5.0, "bias_max": 0.0}
    metrics = {f"experts/{name}": [starts[name]] * early + [value] * (STEPS - early) for name, value in columns.items()}
    return run({**metrics, "experts/load_cv/0": metrics["experts/load_cv"], "train/batch_tokens": [1024.0] * STEPS}, recipe)


@pytest.mark.parametrize(
    ("given", "collapsed", "fast"),
    [
        (moe(0.16, 1.3, 0), "silent", "silent"),
        (moe(1.6, 3.8, 5, 0.0, 0.0, "none"), "named", "silent"),
        (moe(1.1, 3.4, 3, 1.0, 0.3), "silent", "named"),
        (moe(0.4, 1.7, 0, 0.3, 0.003), "silent", "silent"),
        (moe(0.2, 1.4, 0, 0.4, 0.1), "silent", "silent"),  # fast, and balanced all the same
    ],
)
def test_collapsed_experts_and_a_bias_that_is_too_fast_are_told_apart(
    given: dict[str, Any], collapsed: str, fast: str, tmp_path: Path
) -> None:
    assert verdict(judge(tmp_path, "experts-collapsed", **given)) == collapsed
    assert verdict(judge(tmp_path, "bias-rate-too-high", **given)) == fast


def test_time_that_follows_the_load_of_the_busiest_expert_is_named(tmp_path: Path) -> None:
    load = 1.2 + 1.5 * np.arange(STEPS) / STEPS
    given = moe(0.5, 2.0, 0)
    given["metrics"] |= {"experts/load_max": load, "perf/step_seconds": 5 * load}
    assert verdict(judge(tmp_path, "expert-imbalance-slow", **given)) == "named"
    given["metrics"] |= {"perf/step_seconds": np.full(STEPS, 9.0) + np.random.default_rng(0).normal(0, 0.2, STEPS)}
    assert verdict(judge(tmp_path, "expert-imbalance-slow", **given)) == "silent"


def restart(reason: str, ranks: Sequence[int] = (1,), time: float = 1.0e9 + 60) -> dict[str, Any]:
    return {"time": time, "event": "restart", "step": 40, "ranks": list(ranks), "hosts": ["a"], "reason": reason, "in_a_row": 1}


def ended(
    rank: int, at: float, signal: str | None = None, code: int = 1, oom: bool | None = False, asked: bool = False
) -> dict[str, Any]:
    return {"time": 1.0e9 + 55, "event": "rank_exit", "rank": rank, "host": "a", "code": code, "signal": signal, "ended": 1.0e9 + at,
            "asked": asked, "oom_kill": oom}  # fmt: skip


SILENT_END = "rank 1 on a (process 7) ended without an error message (perhaps out of memory); its last heartbeat was at step 40 (forward)"
FROZEN = "rank 1 on a (process 7) stopped responding (frozen, or its machine is down); its last heartbeat was at step 40 (data)"
SAVING = "rank 1 on a (process 7) was alive but did not enter the collective: it had been at step 40 (save) for 600 s"
TOGETHER = "no rank was missing from a collective; rank 0 on a (process 6): Timed out waiting 600000ms for recv operation to complete"
KILLED = ended(1, 10, "SIGKILL", -9)
RANKS = ("dead-rank", "hung-rank", "out-of-memory-killed", "hung-collective")

FAILURES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "killed": ([KILLED, ended(0, 12), restart(SILENT_END)], "dead-rank"),
    "killed, and the run has ended": ([KILLED, ended(0, 12)], "dead-rank"),
    "killed, after the clock was set back": (
        [one | {"time": 0.9e9} for one in (KILLED, ended(0, 12), restart(SILENT_END))], "dead-rank"
    ),
    "killed before the end, which a clock that was set back has dated before": (
        [KILLED, ended(0, 12), restart(SILENT_END), {"event": "finish", "step": STEPS, "time": 1.0e9 + 5}], "dead-rank"
    ),
    "an exception": ([ended(1, 10), ended(0, 12), restart("rank 1 on a (process 7) failed at step 40: KeyError: 'x'")], "dead-rank"),
    "out of memory": ([ended(1, 10, "SIGKILL", -9, True), ended(0, 12), restart(SILENT_END)], "out-of-memory-killed"),
    "killed, and its neighbour did not end when it was asked to": (
        [KILLED, ended(0, 40, "SIGKILL", -9, True, asked=True), restart(SILENT_END)], "dead-rank"
    ),
    "an exception, and a neighbour by a clock that is behind": (
        [ended(0, 5, "SIGKILL", -9, True, asked=True), ended(1, 10), restart("rank 1 on a (process 7) failed at step 40: KeyError: 'x'")],
        "dead-rank",
    ),
    "frozen": ([ended(0, 70), ended(1, 75, "SIGKILL", -9), restart(FROZEN)], "hung-rank"),
    "frozen, and killed by its neighbour before that ended": ([ended(1, 70, "SIGKILL", -9), ended(0, 70), restart(FROZEN)], "hung-rank"),
    "frozen, by an earlier version": ([restart(FROZEN)], "hung-rank"),
    "all in one collective": ([ended(0, 70), ended(1, 70), restart(TOGETHER, (0, 1))], "hung-collective"),
    "saving": ([ended(0, 70), ended(1, 75), restart(SAVING)], ""),
    "stopped by its user": ([ended(1, 10, "SIGINT", -2), ended(0, 11, "SIGINT", -2)], ""),
    "stopped by a scheduler": ([ended(0, 10, "SIGTERM", -15), ended(1, 11, "SIGTERM", -15)], ""),
    "refused": ([ended(0, 10, None, 2), ended(1, 10, None, 2)], ""),
    "killed and resumed, alone": ([{"event": "resume", "step": 40, "time": 1.0e9 + 30}], ""),
    "killed after the end": ([{"event": "finish", "step": STEPS, "time": 1.0e9 + 5}, KILLED], ""),
}


@pytest.mark.parametrize("case", FAILURES)
def test_the_ends_of_ranks_are_told_apart(case: str, tmp_path: Path) -> None:
    events, code = FAILURES[case]
    found = {name: verdict(judge(tmp_path, name, **run(events=events))) for name in RANKS}
    assert found == {name: "named" if name == code else "silent" for name in RANKS}


def test_an_end_that_nobody_recorded_is_not_sure(tmp_path: Path) -> None:
    assert verdict(judge(tmp_path, "dead-rank", **run(events=[restart(SILENT_END)]))) == "unsure"


def test_the_rank_for_which_all_wait_is_named(tmp_path: Path) -> None:
    compared = dict.fromkeys(range(20, STEPS + 1, 20), 1.0)
    warned = {"event": "slow_rank", "step": 60, "rank": 1, "what": "arithmetic", "seconds": 0.4, "median": 0.1}
    found = judge(tmp_path, "slow-rank", **run({"perf/slowest_rank": compared}, events=[warned]))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.where.startswith("rank 1")
    assert verdict(judge(tmp_path, "slow-rank", **run({"perf/slowest_rank": compared}))) == "silent"  # one of them is the slowest
    changing = {step: float(step // 20 % 2) for step in compared}
    later = changing | {step: 1.0 for step in compared if step >= 120}  # it has become slow: the comparisons of 120, 140 and 160 showed it
    assert verdict(judge(tmp_path, "slow-rank", **run({"perf/slowest_rank": later}, events=[warned | {"step": 160}]))) == "named"
    assert verdict(judge(tmp_path, "slow-rank", **run({"perf/slowest_rank": later}, events=[warned | {"step": 80}]))) == "silent"
    assert verdict(judge(tmp_path, "slow-rank", **run({"perf/slowest_rank": changing}, events=[warned]))) == "silent"


def two_ranks(excess: float, share: float = 1.0, **others: Any) -> dict[str, Any]:
    """Comparisons of two ranks, of which the second is the slowest in a share of them."""
    steps = list(range(20, STEPS + 1, 20))
    slowest = {step: float(i < share * len(steps)) for i, step in enumerate(steps)}
    events = [{"event": "start", "ranks": 2, "steps": STEPS}, *others.pop("events", [])]
    return run({"perf/slowest_rank": slowest, "perf/slowest_excess": dict.fromkeys(steps, excess), **others}, events=events)


def test_of_two_ranks_one_that_is_slow_from_the_first_step_on_is_named(tmp_path: Path) -> None:
    found = judge(tmp_path, "slow-rank", **two_ranks(0.5))
    assert verdict(found) == "named" and isinstance(found, Finding) and found.where == "rank 1 of two"
    assert verdict(judge(tmp_path, "slow-rank", **two_ranks(0.1))) == "silent"  # always the slower one, by little
    assert verdict(judge(tmp_path, "slow-rank", **two_ranks(0.5, share=0.6))) == "silent"  # now this one and now that one


def longer(factor: float, by: int) -> list[float]:
    """Times of steps, longer after a step."""
    return [9.8 * (1 + (factor - 1) * (step > by)) for step in range(1, STEPS + 1)]


EXPLAINED: dict[str, dict[str, Any]] = {
    "more tokens": {"train/batch_tokens": [1024.0 * (1 + (step > STEPS // 2)) for step in range(1, STEPS + 1)]},
    "data": {"perf/data_wait": [0.05 + 5.8 * (step > STEPS // 2) for step in range(1, STEPS + 1)]},
    "a busy machine": {"system/cpu_pressure": [0.02 + 0.5 * (step > STEPS // 2) for step in range(1, STEPS + 1)]},
    "experts": {"experts/load_max": [1.2 + 0.8 * (step > STEPS // 2) for step in range(1, STEPS + 1)]},
    "a phase": {"events": [{"event": "phase", "step": STEPS // 2, "phase": "long"}]},
    "a few long steps": {"perf/step_seconds": [9.8 * (1 + 3 * (step > STEPS // 2 and step % 3 == 0)) for step in range(1, STEPS + 1)]},
}


def test_steps_that_become_longer_without_a_reason_are_not_sure(tmp_path: Path) -> None:
    """A rank that is slow within a step and not in arithmetic."""
    grown = {"perf/step_seconds": longer(1.6, STEPS // 2)}
    found = judge(tmp_path, "slow-rank", **two_ranks(0.05, share=0.5, **grown))
    assert verdict(found) == "unsure" and isinstance(found, Finding) and found.next_measurement.startswith("lmworks profile")
    assert verdict(judge(tmp_path, "slow-rank", **two_ranks(0.05, share=0.5))) == "silent"
    slight = {"perf/step_seconds": longer(1.2, STEPS // 2)}
    assert verdict(judge(tmp_path, "slow-rank", **two_ranks(0.05, share=0.5, **slight))) == "silent"


@pytest.mark.parametrize("reason", EXPLAINED)
def test_steps_that_become_longer_for_a_reason_accuse_no_rank(tmp_path: Path, reason: str) -> None:
    changed = {"perf/step_seconds": longer(1.6, STEPS // 2)} | EXPLAINED[reason]
    assert verdict(judge(tmp_path, "slow-rank", **two_ranks(0.05, share=0.5, **changed))) == "silent"
