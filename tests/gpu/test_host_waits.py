"""What makes the host wait for the device in a training step: nothing. Traced on fake CUDA tensors, by file and line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from step_cases import ALONE, FIGURES, RANKS, torch_version

import lmworks
from fake_cuda import FakeCuda

EXCHANGE = "parallel/experts.py"  # where the ranks of ep learn how many rows they exchange, the one wait of a sparse layer
# Mistakes that make the host wait, by the kind that is reported: a module, text in it, and what is written behind it.
MISTAKES = {
    "item": ("model.layers", "wide = at_least_fp32(x)", "; x.sum().item()"),
    "copy to the host": ("train.step", "loss = sums.cross_entropy / tokens", "; loss.cpu()"),
    "index from the host": ("parallel.parallel_model", "own_LE = counts_LE.index_select(0, self._moe_indices)", "; counts_LE[[0]]"),
    "tolist": ("model.loss", "grad_hidden, grad_weight = ctx.saved_tensors", "; grad_total.tolist()"),  # in the backward pass
    "boolean index": ("model.router", "B, T, D = x_BTD.shape", "; x_BTD[x_BTD > 0]"),
    "nonzero": ("model.moe", "routing = self.router(x_BTD)", "; routing.counts.nonzero()"),
    "copy to the device": ("optim.clip", "norms_n = torch.stack(norms)", "; torch.ones(3).to(norms_n.device)"),
    "stream synchronized": (
        "optim.adamw", "self.count.add_(1.0 if apply is None else apply)", "; torch.accelerator.current_stream().synchronize()",
    ),
}


@pytest.fixture(scope="module")
def found(fake_cuda: FakeCuda) -> dict[str, Any]:
    """The report of a step by case."""
    return fake_cuda.run("traced_steps:steps", cases=ALONE | RANKS)


@pytest.mark.parametrize("case", [*ALONE, *RANKS])
def test_a_training_step_has_no_host_wait(found: dict[str, Any], case: str) -> None:
    """And its inputs go to the device in one copy per micro-batch, out of page-locked memory."""
    report = found[case]
    exchanges = {place: count for place, count in report["waits"].items() if place.startswith(EXCHANGE)}
    assert report["waits"] == exchanges
    assert report["to_device"] == {"pinned": 1}
    assert report["shared"] >= 1 and report["stream_waits"] >= 1  # the computation waits for the copy, on the device
    if case in ALONE:
        assert report["shared"] == report["stream_waits"] == 1
    if "ep" in (RANKS | ALONE)[case].get("layout", {}):
        assert list(exchanges.values()) == [1]  # one sparse layer, one micro-batch
    else:
        assert not exchanges


@pytest.mark.parametrize("case", [*ALONE, *RANKS])
def test_a_training_step_costs_no_more_than_recorded(found: dict[str, Any], case: str) -> None:
    """Operators on the device, and the bytes that they read and write: `benchmarks/step_costs.py` records and prints them."""
    recorded = json.loads(FIGURES.read_text(encoding="utf-8"))
    if recorded["torch"] != torch_version():
        pytest.skip(f"the figures are those of torch {recorded['torch']}")
    for figure, limit in recorded["steps"][case].items():
        assert found[case][figure] <= limit, f"{figure}; if that is meant: python benchmarks/step_costs.py --record"


def test_an_evaluation_waits_when_it_is_read(fake_cuda: FakeCuda) -> None:
    """The passes of validation and of evaluation in the loop have no wait, whatever the model. All losses by position are read at once, and
    so is whether all weights are numbers, before a save."""
    found = fake_cuda.run("traced_steps:evaluations", kinds=["dense", "moe", "mla", "conv"])
    assert [_by_file(found[name]) for name in ("positions", "weights")] == [{"model/transfers.py": 1}, {"train/saving.py": 1}]
    assert [found[kind] for kind in ("dense", "moe", "mla", "conv")] == [{}, {}, {}, {}]


def test_a_step_of_the_trainer_waits_once(fake_cuda: FakeCuda) -> None:
    """For what it has found, in one copy. A validation adds one wait for each domain, and the statistics of layers add one: every fifth
    step, and the first."""
    every = {"log_every": "2 steps", "validate_every": "3 steps", "save_every": "50 steps", "micro_batch_sequences": 1}
    steps = fake_cuda.run("traced_trainer:steps", kind="moe", train=every, metrics={"detail_every": "5 steps"})
    assert [sum(waits.values()) for waits in steps] == [2, 1, 2, 1, 2, 2]
    assert {place.partition(":")[0] for waits in steps for place in waits} == {"model/transfers.py"}


def test_a_step_of_dpo_and_grpo_waits_for_scores_and_for_what_it_has_found(fake_cuda: FakeCuda) -> None:
    """An update is weighted by the scores of its rows, which are read once: dpo's pairs, and all rollouts of grpo, whatever the number of
    updates and with those of the reference. Each further update of the same rollouts has its own. The first step of grpo has the
    statistics of the layers besides; the 10 steps of dpo are too few for them."""
    found = fake_cuda.run("traced_alignment:steps", kind="dense")
    assert {case: [_by_file(waits) for waits in steps] for case, steps in found.items()} == {
        "dpo": [{"parallel/parallel_model.py": 1, "model/transfers.py": 1}] * 2,
        "grpo": [{"model/transfers.py": 3 + first} for first in (1, 0)],
        "reference": [{"parallel/parallel_model.py": 3}],
    }  # fmt: skip


def test_a_save_page_locks_one_piece_of_the_size_of_the_state(fake_cuda: FakeCuda) -> None:
    """Each tensor at a multiple of 64 bytes: 140, 1, 66 and 24 bytes are 192 + 64 + 128 + 64. Not if that were more than half of the
    machine's memory, and without it where the system refuses. What is copied from the device is waited for once."""
    found = fake_cuda.run("traced_steps:saves", machines=[(1e9, False), (896, False), (895, False), (1e9, True)])
    assert [one["locked"] for one in found] == [[448, 0], [448, 0], [], [448]]
    assert [_by_file(one["waits"]) for one in found[:2]] == [{"checkpoint/state.py": 1}] * 2


def _by_file(waits: dict[str, int]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for place, count in waits.items():
        found[place.partition(":")[0]] += count
    return dict(found)


def test_a_wait_that_is_planted_is_named(fake_cuda: FakeCuda) -> None:
    """By file, line and kind."""
    planted = [(f"lmworks.{module}", old, old + behind) for module, old, behind in MISTAKES.values()]
    waits = fake_cuda.run("traced_steps:steps", planted, cases={"experts": ALONE["experts"]})["experts"]["waits"]
    assert set(waits) == {f"{_place(*mistake[:2])} {kind}" for kind, mistake in MISTAKES.items()}


def _place(module: str, text: str) -> str:
    """The file and line of a text in a module."""
    file = f"{module.replace('.', '/')}.py"
    before, _, _ = (Path(lmworks.__file__).parent / file).read_text(encoding="utf-8").partition(text)
    return f"{file}:{before.count(chr(10)) + 1}"
