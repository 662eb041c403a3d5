"""Memory that runs out: really on a CPU, under a limit of the address space; on a GPU by recorded statistics of its allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.cli.main import main
from lmworks.errors import UserError
from lmworks.host.machine import is_out_of_memory
from lmworks.plan.memory_kinds import KINDS
from lmworks.run import out_of_memory
from lmworks.run.out_of_memory import FOLDER, Place, apportion, is_fragmented, place_of, read_snapshot, sentence_of
from lmworks.train.observe.memory_kinds import InUse, read_statistics
from tiny_run import Tiny, before_each_step

HERE = Path(__file__).parent
RECORDED = json.loads((HERE.parent / "recorded" / "cuda_out_of_memory.json").read_text())
GIB = 2.0**30
LONG = (
    "train.phases.general.sequence_length=1024", "train.phases.general.global_batch_tokens=65536", "train.phases.general.tokens=1Mi",
    "train.phases.general.batch_ramp=null", "train.phases.general.lr_schedule={kind: constant, warmup: 0%}", "shards.max_epochs=10000",
    "model.max_position_embeddings=1024", "model.num_hidden_layers=3",
)  # fmt: skip


def limited(tiny: Tiny, mib: int, *overrides: str) -> tuple[int, str, dict[str, Any]]:
    """Pretrain with a limit: exit code, last line, and the table.

    glibc ends a process that has no memory for thread-local data, and an arena of malloc per thread reserves 64 MiB of addresses. With one
    arena the request that fails is a tensor of 67 MB, for each limit between 280 and 520 MiB, however many threads there are.
    """
    sets = [word for one in (f"run_dir={tiny.run_dir}", *overrides) for word in ("--set", one)]
    command = [sys.executable, str(HERE / "limited_memory.py"), str(mib), "pretrain", str(tiny.recipe), *sets]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)
    path = tiny.run_dir / FOLDER / "rank-0.json"
    assert path.is_file(), done.stderr
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1], json.loads(path.read_text())


def test_activations_that_do_not_fit_end_the_run_with_one_line(tiny_copy: Tiny) -> None:
    code, line, record = limited(tiny_copy, 400, *LONG, "train.micro_batch_sequences=64")
    assert code == 2
    assert "the largest item is activations" in line and "--set train.activation_checkpointing=full takes about" in line
    assert record["sentence"] == line.removeprefix("error: ") and record["limit_of"].endswith("ulimit -v allows")
    assert set(record["kinds"]) == set(KINDS) and record["requested"] > 1e6
    assert record["kinds"]["weights"]["measured"] == pytest.approx(record["kinds"]["weights"]["planned"], rel=0.01)
    assert 0.8 * record["limit"] < record["in_use"] <= record["limit"]
    (event,) = [one for one in map(json.loads, (tiny_copy.run_dir / "ledger.jsonl").open()) if one["event"] == "out_of_memory"]
    assert event["largest"] == "activations" and event["stage"] == "pretrain"


@pytest.mark.slow
def test_logits_that_do_not_fit_are_named(tiny_copy: Tiny) -> None:
    """The head asks for more than there is while the layers fit."""
    overrides = (*LONG, "train.micro_batch_sequences=1", "model.vocab_size=60000", "model.num_hidden_layers=2")
    code, line, record = limited(tiny_copy, 620, *overrides)
    assert code == 2 and record["doing"] == "loss of the head", line
    assert "the largest item is logits" in line and "--set train.logit_chunk_tokens=256" in line
    assert record["requested"] == 1024 * 60000 * 4


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "memory ran out"),
        (ImportError("_tiktoken.so: failed to map segment from shared object"), "memory ran out"),
        (RuntimeError("can't start new thread"), "no thread could be started"),
    ],
    ids=["python", "library", "thread"],
)
def test_memory_that_runs_out_elsewhere_is_no_bug(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception, words: str
) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr("lmworks.recipe.load.load_recipe", fail)
    monkeypatch.setattr(sys, "argv", ["lmworks", "show", str(tiny.recipe)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and words in capfd.readouterr().err


# By recorded statistics


def record_of(case: str, place: Place, planned: dict[str, float]) -> dict[str, Any]:
    """The table of a recorded case, with 12 GiB that are kept."""
    given = RECORDED["cases"][case]
    statistics = read_statistics(given["memory_stats"])
    kept = {"weights": 4 * GIB, "gradients": 4 * GIB, "optimizer state": 4 * GIB}
    measured = apportion(place, InUse(78 * GIB, 1.5 * GIB, 79.11 * GIB, "H100"), kept, statistics, planned)
    cause = "caching allocator" if is_fragmented(statistics, place.requested) else out_of_memory.largest(measured)
    remedy = {"change": "train.activation_checkpointing=full", "saves": 40 * GIB}
    return {
        "stage": "pretrain", "step": 7, "doing": place.doing, "requested": place.requested, "in_use": 78 * GIB, "limit": 79.11 * GIB,
        "limit_of": "H100", "allocator": statistics, "largest": {"kind": cause, "bytes": measured[cause], "remedy": remedy},
        "kinds": {name: {"measured": measured[name], "planned": planned.get(name)} for name in KINDS},
    }  # fmt: skip


def error_of(case: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(RECORDED["cases"][case]["error"])


@pytest.mark.parametrize(
    ("case", "doing", "kind", "requested", "largest"),
    [
        ("activations", "forward pass", "activations", 1.5 * GIB, "activations"),
        ("logits", "loss of the head", "logits", 18 * GIB, "activations"),
        ("fragmentation", "forward pass", "activations", 2 * GIB, "caching allocator"),
    ],
)
def test_what_takes_most_and_fragmentation_are_told_apart(case: str, doing: str, kind: str, requested: float, largest: str) -> None:
    assert is_out_of_memory(error_of(case)) and place_of(error_of(case)).requested == requested
    record = record_of(case, Place(doing, kind, requested), {"activations": 40 * GIB, "logits": 20 * GIB})
    assert record["largest"]["kind"] == largest
    line = sentence_of(record, Path("runs/a/oom/rank-0.json"))
    assert "\n" not in line and ("fragmented" in line) == (case == "fragmentation")
    if case == "fragmentation":
        assert "expandable_segments:True" in line and "37 retries" in line
    held = sum(record["kinds"][name]["measured"] for name in KINDS if name not in ("runtime", "caching allocator"))
    assert held == pytest.approx(RECORDED["cases"][case]["memory_stats"]["allocated_bytes.all.current"] + requested)


def test_logits_are_what_the_layers_do_not_need() -> None:
    record = record_of("logits", Place("loss of the head", "logits", 18 * GIB), {"activations": 10 * GIB})
    assert record["largest"]["kind"] == "logits"
    assert record["kinds"]["logits"]["measured"] == pytest.approx((65.8 - 12 - 10 + 18) * GIB, rel=1e-3)


def test_a_snapshot_is_plain_values_without_names_of_files() -> None:
    found = read_snapshot(RECORDED["snapshot"])
    text = json.dumps(found)
    assert "someone" not in text and found["segments_in_all"] == 2 and found["segments"][0]["total_size"] == 2 * GIB
    assert found["bytes_by_state"] == {"active_allocated": int(0.5 * GIB) + 20 * 2**20, "inactive": int(1.5 * GIB)}
    many = {"segments": [{"total_size": n, "blocks": [{"size": 1, "state": "inactive"}] * 300} for n in range(1500)]}
    bounded = read_snapshot(many)
    assert len(bounded["segments"]) == 1000 and len(bounded["segments"][0]["blocks"]) == 100
    assert bounded["bytes_by_state"]["inactive"] == 450_000


def test_errors_that_mean_something_else_are_left_alone() -> None:
    assert not any(map(is_out_of_memory, (ValueError("out of memory"), RuntimeError("out of range"), OSError(28, "No space left"))))
    assert all(map(is_out_of_memory, (MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("std::bad_alloc"))))


def test_a_gpu_that_runs_out_late_restarts_a_launched_run_and_ends_another(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer gets the error of the recorded case from its step, and the statistics that go with it."""
    statistics = read_statistics(RECORDED["cases"]["fragmentation"]["memory_stats"])
    monkeypatch.setattr(out_of_memory, "allocator_statistics", lambda device: statistics)
    monkeypatch.setattr(out_of_memory, "_snapshot", lambda device: read_snapshot(RECORDED["snapshot"]))

    def fail(step: int) -> None:
        if step == 20:
            raise error_of("fragmentation")

    before_each_step(monkeypatch, fail)
    monkeypatch.setattr(out_of_memory, "is_launched", lambda: True)
    with pytest.raises(RuntimeError, match="the memory is fragmented") as late:
        tiny_copy.walk(last="pretrain")
    assert not isinstance(late.value, UserError)
    monkeypatch.setattr(out_of_memory, "is_launched", lambda: False)
    with pytest.raises(UserError, match=r"at step 20, .* are in use; the memory is fragmented: 82.5 GB are reserved and only 47.5 GB"):
        tiny_copy.walk(last="pretrain")
    assert (tiny_copy.run_dir / FOLDER / "snapshot-rank-0.json").is_file()
    record = json.loads((tiny_copy.run_dir / FOLDER / "rank-0.json").read_text())
    assert record["largest"]["kind"] == "caching allocator" and record["snapshot"] == "snapshot-rank-0.json"
    assert "out of memory" in (tiny_copy.run_dir / "report.html").read_text().lower()
