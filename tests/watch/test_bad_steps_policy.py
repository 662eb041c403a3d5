"""Bad steps are counted, kept for replay, and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from lmworks.watch.policy import BadSteps, load_bad_batch

NAN, INF = float("nan"), float("inf")
BATCH = {"tokens": np.arange(12, dtype=np.int32).reshape(3, 4), "labels": np.full((3, 4), -100, np.int32)}


def test_good_steps_touch_nothing_and_end_a_streak(tmp_path):
    policy = BadSteps(tmp_path / "bad_batches", max_in_a_row=3, keep=5)

    def never() -> dict[str, np.ndarray]:
        raise AssertionError("a good step's batch is not asked for")

    for step in range(20):
        bad = step % 3 != 0
        assert policy.observe(step, NAN if bad else 1.0, 1.0, BATCH if bad else never) is not bad
        assert policy.in_a_row == step % 3
    assert len(list((tmp_path / "bad_batches").iterdir())) == 5


@pytest.mark.parametrize(
    ("loss", "grad_norm", "what"), [(NAN, 1.0, "loss"), (INF, NAN, "loss"), (1.0, -INF, "gradient norm"), (1.0, NAN, "gradient norm")]
)
def test_too_many_in_a_row_have_a_reason(tmp_path, loss, grad_norm, what):
    events = []
    policy = BadSteps(tmp_path / "bad_batches", 3, 20, report=lambda event, **fields: events.append((event, fields)))
    for step in (7, 8):
        assert not policy.observe(step, loss, grad_norm, BATCH)
        assert not policy.too_many
    policy.observe(9, loss, grad_norm, BATCH)
    assert policy.too_many
    assert policy.first == 7
    assert policy.reason(loss) == f"the {what} was not finite in 3 steps in a row (stability.max_bad_steps)"
    assert policy.where == f"the saved batches are in {tmp_path}/bad_batches"
    assert [event for event, _ in events] == ["bad_step"] * 3
    batch = str(tmp_path / "bad_batches/step-00000007.npz")
    assert events[0][1] == {"step": 7, "loss": str(loss), "grad_norm": str(grad_norm), "in_a_row": 1, "batch": batch}


def test_batches_for_replay_are_bounded_over_restarts(tmp_path):
    for start in (0, 10):
        policy = BadSteps(tmp_path, max_in_a_row=9, keep=3)
        for step in (start, start + 1):
            policy.observe(step, NAN, 1.0, {"tokens": np.array([step])})
    policy.observe(1, NAN, 1.0, {"tokens": np.array([1])})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}.npz" for step in (0, 1, 10)]
    assert load_bad_batch(tmp_path / "step-00000010.npz")["tokens"] == [10]


def test_a_batch_comes_back_as_it_was(tmp_path):
    BadSteps(tmp_path, 5, 1).observe(3, NAN, 1.0, lambda: BATCH)
    arrays = load_bad_batch(tmp_path / "step-00000003.npz")
    assert arrays.keys() == BATCH.keys()
    assert all(arrays[name].dtype == BATCH[name].dtype and np.array_equal(arrays[name], BATCH[name]) for name in BATCH)


def test_nothing_is_kept_when_nothing_is_wanted(tmp_path):
    policy = BadSteps(tmp_path / "bad_batches", 1, 0)
    policy.observe(1, NAN, 1.0, BATCH)
    assert policy.where == "no batch was saved (stability.save_bad_batches is 0)"
    assert not (tmp_path / "bad_batches").exists()
