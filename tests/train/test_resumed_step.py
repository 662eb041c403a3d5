"""What a resumed run says of its first step, and of rows that come again, against planted faults of the data position and the rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_resume import stop_in

from lmworks.metrics.log import read
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from lmworks.train.curriculum import PretrainingCurriculum
from lmworks.train.observe.trained_rows import StepRecord, TrainedRows, combined, row_hashes
from lmworks.ui.terminal import Interrupted
from lmworks.watch.ledger import events_of
from tiny_run import Tiny

STOP = 8


def batch_of(tokens: np.ndarray, labels: np.ndarray | None = None) -> Batch:
    rows, length = tokens.shape
    starts = np.arange(rows + 1, dtype=np.int32) * length
    return Batch(tokens, tokens if labels is None else labels, starts, 0, 0)


@pytest.fixture(scope="module")
def stopped(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A run that was stopped after some steps."""
    run = tiny.copy(tmp_path_factory.mktemp("stopped") / "run")
    with pytest.MonkeyPatch.context() as patch:
        stop_in(patch, STOP)
        with pytest.raises(Interrupted):
            run.pretrain()
    return run


def resumed(stopped: Tiny, to: Path, *overrides: str) -> dict[str, Any]:
    run = stopped.copy(to)
    with pytest.MonkeyPatch.context() as patch:
        stop_in(patch, STOP + 3)
        with pytest.raises(Interrupted):
            run.pretrain(*overrides)
    (found,) = events_of(run.run_dir, "resumed_step")
    return found


def test_the_first_step_after_a_resume_is_compared_with_the_saved_one(stopped: Tiny, tmp_path: Path) -> None:
    lines = {line["step"]: line for line in read(stopped.run_dir)}
    last = lines[max(lines)]
    found = resumed(stopped, tmp_path / "run")
    assert (found["stage"], found["step"], found["repeated"]) == ("pretrain", max(lines), 0.0)
    assert found["saved_loss"] == last["train/loss"] and found["saved_learning_rate"] == last["optim/learning_rate"]
    assert abs(found["loss"] - found["saved_loss"]) < 0.5 and found["rows"] != found["saved_rows"]
    with pytest.MonkeyPatch.context() as patch:
        stop_in(patch, STOP + 4)
        with pytest.raises(Interrupted):
            replace(stopped, run_dir=tmp_path / "run").pretrain()
    assert [event["step"] for event in events_of(tmp_path / "run", "resumed_step")] == [max(lines), max(lines) + 3]


def test_a_lost_data_position_repeats_rows(stopped: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: after the resume the data goes back to step 6, the first one with as many rows."""
    honest: Callable[..., Batch] = Batches.batch

    def gone_back(self: Batches, step: int, *rows: int) -> Batch:
        return replace(honest(self, 6 if step >= STOP else step, *rows), step=step)

    monkeypatch.setattr(Batches, "batch", gone_back)
    found = resumed(stopped, tmp_path / "run")
    assert found["repeated"] == 1.0


def test_a_schedule_that_jumps_shows_in_the_rates(stopped: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretrainingCurriculum, "lr_factor", lambda self, step: 0.25)
    found = resumed(stopped, tmp_path / "run")
    assert found["learning_rate"] == pytest.approx(0.25 * 0.01) and found["saved_learning_rate"] > 2 * found["learning_rate"]


def test_the_hash_of_a_step_depends_on_no_layout() -> None:
    """It is a sum over the rows, and wraps around at 64 bits on many ranks as on one."""
    tokens = np.random.default_rng(0).integers(0, 500, (8, 16), dtype=np.int32)
    whole = row_hashes(batch_of(tokens))
    parts = [combined(row_hashes(batch_of(part))) for part in (tokens[:3], tokens[3:])]
    assert combined(whole) == combined(parts) and -(1 << 63) <= combined(whole) < 1 << 63
    assert combined(row_hashes(batch_of(tokens + 1))) != combined(whole)


def test_rows_that_only_fill_up_are_not_repeated() -> None:
    tokens = np.zeros((3, 4), np.int32)
    labels = np.full((3, 4), IGNORE, np.int32)
    labels[0, 1] = 7
    assert len(row_hashes(batch_of(tokens, labels))) == 1


def test_a_repeated_row_is_counted_and_a_bounded_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.train.observe.trained_rows._RECENT", 100)
    rows = TrainedRows()
    rows.add([*range(10), 3])
    rows.add([4])
    assert rows.take_share() == pytest.approx(2 / 12) and rows.take_share() is None
    for number in range(50):
        rows.add([1000 + 10 * number + row for row in range(10)])
    assert len(rows._known) == len(rows._recent) == 100
    rows.take_share()
    rows.add([3, 1499])  # the one is forgotten, the other is known
    assert rows.take_share() == 0.5


def test_a_rank_without_rows_has_repeated_none_of_them() -> None:
    """As one process has not, in a step with fewer rows than there are ranks; there is no share where no rank reads rows."""
    record = StepRecord("pretrain", lambda event, **fields: None)
    record.add(1, [], combined([5]), 2.0, 0.1)
    assert record.rows.take_share() == 0.0 and record.rows.take_share() is None
    record.add(2, [], 0, 2.0, 0.1)
    assert record.rows.take_share() is None


def test_a_record_of_an_earlier_version_is_no_reason_to_fail() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    record = StepRecord("pretrain", lambda event, **fields: told.append((event, fields)))
    assert record.meta() == {}
    record.load({"step": 5})
    record.resumed()
    record.add(5, [1, 2], 3, math.nan, 0.1)
    assert told == [] and record.meta()["last_step"]["loss"] is None
    again = StepRecord("pretrain", record._report)
    again.load(record.meta())
    again.resumed()
    again.add(6, [2, 9], 11, 2.0, 0.1)
    (event, fields), *none = told
    assert (event, fields["repeated"], fields["saved_loss"], fields["saved_rows"], none) == ("resumed_step", 0.5, None, f"{3:016x}", [])
    assert again.meta()["last_step"]["trained"]["first"] == "".join(f"{one:016x}" for one in (1, 2, 2, 9))
