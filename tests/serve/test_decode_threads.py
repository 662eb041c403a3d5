"""The number of threads of a decode step: the fastest one is found, kept, and tried again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lmworks.model import Transformer
from lmworks.model.generate import GenerateOptions
from lmworks.serve.decode_threads import _AGAIN, _SAMPLES, DecodeThreads
from lmworks.serve.engine import Engine
from lmworks.serve.requests import Request
from lmworks.serve.vocabulary import Vocabulary

ALL = 3


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(ALL)
    yield
    torch.set_num_threads(before)


class Machine:
    """A clock that a step advances by a duration that depends on its threads."""

    def __init__(self, one: float, all: float) -> None:
        self.seconds, self.now, self.used = {1: one, ALL: all}, 0.0, list[int]()

    def step(self) -> str:
        self.used.append(torch.get_num_threads())
        self.now += self.seconds[torch.get_num_threads()]
        return "tokens"


@pytest.mark.usefixtures("threads")
def test_the_faster_number_of_threads_is_found_and_the_other_one_tried_again() -> None:
    machine = Machine(one=1.0, all=2.0)
    chooser = DecodeThreads(ALL, lambda: machine.now)
    assert all(chooser.run(16, machine.step) == "tokens" for _ in range(4 * _AGAIN))
    assert torch.get_num_threads() == ALL, "others are not affected"
    assert machine.used.count(ALL) == _SAMPLES + 4 and set(machine.used[-_AGAIN + 1 : -1]) == {1}
    machine.seconds[1] = 5.0  # another program takes a core
    for _ in range(_SAMPLES):
        chooser.run(16, machine.step)
    assert [chooser.run(16, machine.step) and machine.used[-1] for _ in range(3)] == [ALL] * 3


@pytest.mark.usefixtures("threads")
def test_few_and_many_rows_are_measured_apart() -> None:
    few, many = Machine(one=1.0, all=2.0), Machine(one=2.0, all=1.0)
    now = lambda: few.now + many.now  # noqa: E731
    chooser = DecodeThreads(ALL, now)
    for _ in range(2 * _SAMPLES + 10):
        chooser.run(2, few.step)
        chooser.run(32, many.step)
    assert set(few.used[2 * _SAMPLES :]) == {1} and set(many.used[2 * _SAMPLES :]) == {ALL}


def test_one_thread_is_left_alone() -> None:
    assert DecodeThreads(1).run(4, torch.get_num_threads) == torch.get_num_threads()


@pytest.mark.usefixtures("threads")
def test_a_step_that_fails_leaves_the_threads_as_they_were() -> None:
    with pytest.raises(ZeroDivisionError):
        DecodeThreads(ALL).run(1, lambda: 1 // 0)
    assert torch.get_num_threads() == ALL


@pytest.mark.usefixtures("threads")
def test_the_engine_decodes_with_both_and_reads_prompts_with_all(
    model: Transformer, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[bool, set[int]] = {True: set(), False: set()}
    hidden = Transformer.hidden

    def recorded(self: Transformer, tokens: torch.Tensor, *given: object, **named: object) -> object:
        used[tokens.shape[1] > 1].add(torch.get_num_threads())
        return hidden(self, tokens, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Transformer, "hidden", recorded)
    torch.set_num_threads(1)  # as another engine does in a decode step; a new thread begins with this number
    engine = Engine(model, vocabulary, "model", 256, threads=ALL)
    try:
        prompt = tuple(vocabulary.encode("import sys\n\ndef main("))
        list(engine.stream(Request((prompt,), GenerateOptions(max_new_tokens=4 * _SAMPLES))))
    finally:
        engine.close()
    assert used == {True: {ALL}, False: {1, ALL}}
