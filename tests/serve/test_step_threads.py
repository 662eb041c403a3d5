"""The number of threads of a step: the fastest one is found, kept, and tried again; and how they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from lmworks.inference.generate import GenerateOptions
from lmworks.model import Transformer
from lmworks.serve.engine import Engine
from lmworks.serve.requests import Request
from lmworks.serve.spin import SPINNING, apart
from lmworks.serve.step_threads import _SAMPLES, _SHARE, StepThreads
from lmworks.serve.vocabulary import Vocabulary
from patience import PATIENCE

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
@pytest.mark.parametrize("slow", [1.2, 3.0, 100.0])
def test_the_faster_number_of_threads_is_kept_and_trying_the_other_one_costs_little(slow: float) -> None:
    machine = Machine(one=1.0, all=slow)
    chooser = StepThreads(ALL, lambda: machine.now)
    assert all(chooser.run(16, machine.step) == "tokens" for _ in range(20_000))
    assert torch.get_num_threads() == ALL, "others are not affected"
    tried = machine.used.count(ALL)
    assert tried >= 3, "it is tried again"
    assert tried * (slow - 1) <= machine.now / _SHARE + slow


@pytest.mark.usefixtures("threads")
def test_a_machine_that_changes_is_noticed() -> None:
    machine = Machine(one=1.0, all=2.0)
    chooser = StepThreads(ALL, lambda: machine.now)
    for _ in range(500):
        chooser.run(16, machine.step)
    assert set(machine.used[-_SHARE // 2 :]) <= {1, ALL} and machine.used[-_SHARE:].count(ALL) <= 1
    machine.seconds[ALL] = 0.5  # a core becomes free
    for _ in range(4 * _SHARE):
        chooser.run(16, machine.step)
    assert machine.used[-20:].count(ALL) >= 15
    machine.seconds[ALL] = 9.0  # another program takes it
    for _ in range(2 * _SAMPLES):
        chooser.run(16, machine.step)
    assert machine.used[-3:] == [1] * 3


@pytest.mark.usefixtures("threads")
def test_few_and_many_tokens_are_measured_apart() -> None:
    few, many = Machine(one=1.0, all=2.0), Machine(one=2.0, all=1.0)
    now = lambda: few.now + many.now  # noqa: E731
    chooser = StepThreads(ALL, now)
    for _ in range(40):
        chooser.run(2, few.step)
        chooser.run(32, many.step)
    assert few.used[-30:].count(1) >= 29 and many.used[-30:].count(ALL) >= 29


def test_one_thread_is_left_alone() -> None:
    assert StepThreads(1).run(4, torch.get_num_threads) == torch.get_num_threads()


@pytest.mark.usefixtures("threads")
def test_a_step_that_fails_leaves_the_threads_as_they_were() -> None:
    with pytest.raises(ZeroDivisionError):
        StepThreads(ALL).run(1, lambda: 1 // 0)
    assert torch.get_num_threads() == ALL


@pytest.mark.usefixtures("threads")
def test_the_engine_chooses_for_decoding_and_for_reading(
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
        for number in range(3):
            list(engine.stream(Request(((number, *prompt),), GenerateOptions(max_new_tokens=4 * _SAMPLES))))
    finally:
        engine.close()
    assert used == {True: {1, ALL}, False: {1, ALL}}


def test_a_server_spins_and_its_loading_leaves_no_threads() -> None:
    program = f"PATIENCE = {PATIENCE}" + """
import os, sys, time
from lmworks.serve.spin import SPINNING, apart, spin
assert "torch" not in sys.modules
spin()
import torch
torch.set_num_threads(2)
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
apart(lambda: torch.ones(1 << 22).mul_(2))
end = time.monotonic() + PATIENCE
while (after_loading := threads()) > before and time.monotonic() < end:
    time.sleep(0.01)
torch.ones(1 << 22).mul_(2)
print(dict(os.environ).get("GOMP_SPINCOUNT"), after_loading - before, threads() - before)
"""
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING}

    def said(**given: str) -> list[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=environment | given, capture_output=True, encoding="utf-8", check=True).stdout.split()

    assert said() == [SPINNING["GOMP_SPINCOUNT"], "0", "1"]
    assert said(GOMP_SPINCOUNT="7")[0] == "7", "what the user says counts"


def test_errors_of_loading_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 // 0)
