from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import PhaseSteps, Timeline


def phase(name: str, tokens: int, length: int, batch: int, start: int | None = None, over: str = "") -> Phase:
    ramp = None if start is None else {"start_tokens": f"{start} tokens", "over": over}
    return Phase.model_validate({"name": name, "tokens": f"{tokens} tokens", "mixture": {"web": 1.0}, "sequence_length": f"{length} tokens",
                                 "global_batch_tokens": f"{batch} tokens", "batch_ramp": ramp})


ramps = st.tuples(st.integers(1, 40), st.integers(0, 60), st.integers(1, 90), st.integers(1, 5000))


@given(values=ramps)
@settings(max_examples=150, deadline=None)
def test_closed_form_equals_counting(values: tuple[int, int, int, int]) -> None:
    first, more, over, extra = values
    full, length = first + more, 8
    found = PhaseSteps.of(phase("p", (full + extra) * length, length, full * length, first * length, f"{over} steps"))
    counted = 0
    for step in range(found.steps):
        assert found.before(step) == counted
        assert found.batch(step) == (first + more * step // over if step < over else full)
        counted += found.batch(step)
    assert found.sequences == counted
    assert counted <= full + extra < counted + found.batch(found.steps), "no further step would fit the budget"


def test_steps_run_on_through_the_phases() -> None:
    timeline = Timeline([phase("one", 1000, 10, 100), phase("two", 640, 20, 200, 40, "480 tokens")])
    assert [found.steps for found in timeline.phases] == [10, 5]
    assert timeline.steps == 15
    assert [timeline.phase_of(step) for step in (0, 9, 10, 14)] == [0, 0, 1, 1]
    assert timeline.sequences(9) == (90, 10)
    assert [timeline.sequences(step) for step in range(10, 15)] == [(0, 2), (2, 4), (6, 6), (12, 8), (20, 10)]
    assert timeline.tokens_before(0) == 0
    assert timeline.tokens_before(10) == 1000
    assert timeline.tokens_before(15) == 1000 + 600


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_run_is_named(step: int) -> None:
    with pytest.raises(UserError, match=r"does not exist: the run has 10 steps, numbered from 0 to 9"):
        Timeline([phase("one", 1000, 10, 100)]).phase_of(step)


def test_a_budget_smaller_than_one_step_is_refused() -> None:
    with pytest.raises(ValidationError, match="the budget of 90 tokens is smaller than one step of 100"):
        phase("one", 90, 10, 100)
    unchecked = phase("one", 100, 10, 100).model_copy(update={"tokens": 90})
    with pytest.raises(UserError, match=r"budget of 90 tokens is smaller than one step of 100; lower global_batch_tokens or raise tokens"):
        Timeline([unchecked])


def test_no_phases_and_equal_names_are_refused() -> None:
    with pytest.raises(UserError, match=r"train\.phases is empty"):
        Timeline([])
    with pytest.raises(UserError, match="two phases have the same name"):
        Timeline([phase("one", 1000, 10, 100), phase("one", 1000, 10, 100)])
