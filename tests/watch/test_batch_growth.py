"""The growths of a batch that hold by a ledger, and what a rollback over one skips."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import Growth, Timeline
from lmworks.watch.batch_growth import describe, growths, skip_of_rollback

PHASES = [
    Phase.model_validate({
        "name": name, "tokens": "800 tokens", "mixture": {"web": 1.0}, "sequence_length": "8 tokens", "global_batch_tokens": "80 tokens",
        "batch_ramp": {"kind": "loss", "start_tokens": "16 tokens", "sizes": ["32 tokens", "80 tokens"], "window_steps": 4},
    })
    for name in ("one", "two")
]  # fmt: skip


def grew(step: int, tokens: int, phase: str = "one") -> dict[str, Any]:
    return {"event": "batch_grew", "stage": "pretrain", "phase": phase, "step": step, "tokens_per_step": tokens}


def back(to_step: int, stage: str = "pretrain") -> dict[str, Any]:
    return {"event": "rollback", "stage": stage, "step": to_step + 9, "to_step": to_step, "skip": None}


def test_what_holds_after_rollbacks_and_a_start_over() -> None:
    lines = [grew(10, 32), grew(20, 80)]
    assert growths(lines) == (Growth("one", 10, 32), Growth("one", 20, 80))
    assert growths([*lines, back(15)]) == (Growth("one", 10, 32),)
    assert growths([*lines, back(20)]) == growths([*lines, back(2, "tune")]) == growths(lines)
    assert growths([*lines, back(9), grew(12, 32)]) == (Growth("one", 12, 32),)
    assert growths([*lines, {"event": "start_over", "stage": "pretrain", "step": 30}, grew(11, 32)]) == (Growth("one", 11, 32),)


@pytest.mark.parametrize(("to_step", "skip", "windows", "expected"), [
    (12, (13, 14), (), (13, 14)),  # forgets nothing
    (8, (8, 10), (), (8, 10)),  # the data before the growth
    (8, None, (), None),
    (8, (9, 12), (), (8, 14)),  # 20 sequences and 2 times 4
    (8, None, ((4, 6), (11, 12)), (8, 14)),  # a window behind the growth that is skipped already
    (8, (9, 22), (), (8, 40)),  # over two growths: 20 + 10 x 4 + 2 x 10 = 80
    (8, (9, 99), (), (8, 100)),  # beyond the end
])  # fmt: skip
def test_a_rollback_over_a_growth_skips_the_same_data(
    to_step: int, skip: tuple[int, int] | None, windows: tuple[tuple[int, int], ...], expected: tuple[int, int] | None
) -> None:
    known = [Growth("one", 10, 32), Growth("one", 20, 80)]
    assert skip_of_rollback(PHASES, known, windows, to_step, skip) == expected


def test_a_window_into_the_next_phase_keeps_to_its_sequences() -> None:
    known = [Growth("one", 10, 32)]
    assert Timeline(PHASES, known).first_step(1) == 30
    assert skip_of_rollback(PHASES, known, (), 8, (29, 33)) == (8, 50 + 3)


def test_the_range_of_steps_is_told() -> None:
    known = [Growth("one", 10, 32), Growth("two", 40, 80)]
    one, two = describe(PHASES, known)
    assert one == "phase one: the batch of 16 tokens grows with the loss, up to 80; it grew to 32 at step 10; at least 19 steps, at most 30"
    assert two.endswith("it grew to 80 at step 40; at least 18 steps, at most 18")
    assert describe(PHASES)[0].endswith("it has not grown yet; at least 14 steps, at most 50")
