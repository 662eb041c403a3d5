"""Which runs count as diverged, by their metrics and their ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmworks.metrics.divergence import divergence
from lmworks.metrics.log import read


def run(folder: Path, losses: list[float], held: dict[int, float], events: list[dict[str, Any]]) -> str:
    lines = [{"step": step, "train/loss": loss} | ({"validation/bits_per_byte": held[step]} if step in held else {})
             for step, loss in enumerate(losses, 1)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "ledger.jsonl").write_text("".join(json.dumps({"time": 1.0, "stage": "pretrain"} | one) + "\n" for one in events))
    return divergence(folder, read(folder))


def bad(*steps: int) -> list[dict[str, Any]]:
    return [{"event": "bad_step", "step": step} for step in steps]


def back(step: int, to_step: int, skip: list[int] | None) -> dict[str, Any]:
    return {"event": "rollback", "step": step, "to_step": to_step, "skip": skip, "reason": "" if skip is None else "bad steps"}


FALLING = [8 - 0.04 * step for step in range(100)]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], ""),
        (bad(5), ""),  # one step, as the first of fp16
        (bad(5, 9), "2 of 100 steps without an update: 2 bad steps"),
        ([*bad(*range(20, 30)), back(29, 10, [10, 30])], "20 of 100 steps without an update: 10 bad steps, 1 rollback"),
        ([back(30, 10, [12, 30])], "18 of 100 steps without an update: 1 rollback"),  # of a spike
        ([*bad(20, 21, 22), back(30, 10, None)], ""),  # asked for: the steps are trained again
        ([*bad(20, 21, 22), {"event": "start_over", "step": 30}], ""),
        ([one | {"stage": "tune"} for one in bad(1, 2, 3)], ""),
    ],
)
def test_a_run_has_diverged_if_it_made_no_update_in_many_steps(tmp_path: Path, events: list[dict[str, Any]], said: str) -> None:
    assert run(tmp_path, FALLING, {10: 3.0, 100: 2.0}, events) == said


def test_a_run_has_diverged_if_both_losses_have_risen(tmp_path: Path) -> None:
    rising = FALLING[::-1]
    assert "held-out loss of 3.5 bits/byte at the end, 3 at the first validation" in run(tmp_path, rising, {10: 3.0, 100: 3.5}, [])
    assert run(tmp_path, FALLING, {10: 3.0, 100: 3.5}, []) == "", "it has overfitted"
    assert run(tmp_path, rising, {10: 3.0, 100: 2.5}, []) == "", "a phase on harder text"
    assert run(tmp_path, [3.0] * 50 + [3.1] * 50, {10: 1.0, 100: 1.02}, []) == "", "it has learned nothing, which is a result"
    assert run(tmp_path, rising, {100: 3.5}, []) == ""
