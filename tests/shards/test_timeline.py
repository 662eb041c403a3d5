from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmworks.errors import UserError
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import GrowingSteps, Growth, PhaseSteps, Timeline, fewest_steps


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


def growing(tokens: int, sizes: list[int], **more: object) -> Phase:
    """Sequences of 8 tokens; the batch begins with the first of the sizes, in sequences."""
    first, *later = (f"{size * 8} tokens" for size in sizes)
    ramp = {"kind": "loss", "start_tokens": first, "sizes": later, "window_steps": 2}
    return Phase.model_validate({"name": "p", "tokens": f"{tokens} tokens", "mixture": {"web": 1.0}, "sequence_length": "8 tokens",
                                 "global_batch_tokens": f"{sizes[-1] * 8} tokens", "batch_ramp": ramp} | more)  # fmt: skip


@given(first=st.integers(1, 5), budget=st.integers(40, 400), moments=st.lists(st.integers(1, 200), min_size=2, max_size=2, unique=True))
@settings(max_examples=150, deadline=None)
def test_a_growth_moves_nothing_before_it_and_no_sequence(first: int, budget: int, moments: list[int]) -> None:
    sizes = [first, 2 * first, 6 * first]
    phase = growing(budget * 8, sizes)
    growths = [(step, size * 8) for step, size in zip(sorted(moments), sizes[1:], strict=True)]
    before = PhaseSteps.of(phase)
    assert isinstance(before, GrowingSteps) and before.sequences == budget // first * first
    for known in range(3):
        found = PhaseSteps.of(phase, growths[:known])
        assert isinstance(found, GrowingSteps)
        assert found.sequences == before.sequences, "ranges of the token files do not move"
        numbers = [found.before(step) for step in range(found.steps + 1)]
        assert [found.batch(step) for step in range(found.steps)] == [after - before for before, after in pairwise(numbers)]
        assert numbers[-1] == found.sequences > numbers[-2] and found.batch(found.steps - 1) % first == 0
        for step in range(found.steps - 1):
            assert found.batch(step) == max([first, *(size // 8 for at, size in growths[:known] if at <= step)])
        until = min(growths[known - 1][0] if known else 0, found.steps - 1)
        assert [before.before(step) for step in range(until + 1)] == numbers[: until + 1]
        before = found
    assert fewest_steps(phase) <= before.steps <= PhaseSteps.of(phase).steps or growths[0][0] < 2


def test_the_steps_of_later_phases_follow_those_of_a_phase_whose_batch_grew() -> None:
    phases = [growing(800, [5, 10]), phase("two", 640, 20, 200)]
    assert [one.steps for one in Timeline(phases).phases] == [20, 3]
    grown = Timeline(phases, [Growth("p", 4, 80), Growth("gone", 5, 80)])
    assert [one.steps for one in grown.phases] == [12, 3] and grown.first_step(1) == 12
    assert grown.sequences(4) == (20, 10) and grown.tokens_before(15) == 800 + 600
    assert [grown.first_unread(0, sequences) for sequences in (0, 20, 21, 30, 100)] == [0, 4, 5, 5, 12]
    assert Timeline(phases, [Growth("p", 30, 80)]).steps == 23, "of a recipe with a larger budget"
    assert Timeline(phases, [Growth("p", 4, 72)]).steps == 23, "of a recipe with other sizes"
    assert fewest_steps(phases[0]) == 2 + 9 and fewest_steps(phases[0], grown.phases[0]) == 12 and fewest_steps(phases[1]) == 3


def test_a_growth_in_a_later_phase_is_at_its_step_of_the_run() -> None:
    grown = Timeline([phase("two", 640, 20, 200), growing(800, [5, 10])], [Growth("p", 7, 80)])
    assert [one.steps for one in grown.phases] == [3, 12]
    assert [grown.sequences(step) for step in (6, 7)] == [(15, 5), (20, 10)]


@pytest.mark.parametrize(("changes", "said"), [
    ({"batch_ramp": {"start_tokens": "40 tokens"}}, "batch_ramp needs over, the length of the ramp"),
    ({"batch_ramp": {"start_tokens": "40 tokens", "over": "2%", "window_steps": 7}}, "batch_ramp.window_steps belongs to kind: loss"),
    ({"over": "2%"}, "batch_ramp.over belongs to kind: linear"),
    ({"sizes": []}, r"batch_ramp.sizes \[\] must rise above start_tokens 40, in multiples of it"),
    ({"sizes": ["64 tokens", "80 tokens"]}, r"batch_ramp.sizes \[64, 80\] must rise"),
    ({"losses": [3.0, 2.0]}, r"batch_ramp.losses \[3.0, 2.0\] must fall, one for each of the 1 sizes"),
    ({"sizes": ["80 tokens", "160 tokens"], "losses": [2.0, 3.0]}, "must fall, one for each of the 2 sizes"),
    ({"sizes": ["160 tokens"]}, "the last of batch_ramp.sizes is 160, and global_batch_tokens 80; make them equal"),
    ({"lr_schedule": {"warmup": "3 steps"}}, "lr_schedule.warmup is in steps, which are not known while the batch grows with the loss"),
    ({"lr_schedule": {"decay": "3 steps"}}, "lr_schedule.decay is in steps"),
    ({"mixture_changes": [{"at": "3 steps", "mixture": {"web": 1.0}}]}, "mixture_changes.at is in steps"),
    ({"qk_norm_steps": "10%"}, "qk_norm_steps are not known while the batch grows with the loss"),
])  # fmt: skip
def test_ramps_that_are_none(changes: dict[str, object], said: str) -> None:
    own = {"kind": "loss", "start_tokens": "40 tokens", "sizes": ["80 tokens"]}
    of_phase = {key: changes[key] for key in ("batch_ramp", "lr_schedule", "mixture_changes", "qk_norm_steps") if key in changes}
    ramp = own | {key: value for key, value in changes.items() if key not in of_phase}
    with pytest.raises(ValidationError, match=said):
        growing(800, [5, 10], **({"batch_ramp": ramp} | of_phase))


def test_the_critical_batch_size_gives_the_losses() -> None:
    """Kaplan et al. 2020: 2e8 tokens / L^(1 / 0.21), the size that a loss allows."""
    ramp = growing(8000, [5, 10, 20]).batch_ramp
    assert ramp is not None
    assert [size for size, _ in ramp.growths] == [80, 160]
    assert all(2e8 / loss ** (1 / 0.21) == pytest.approx(size) for size, loss in ramp.growths)
