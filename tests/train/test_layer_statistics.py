"""Signals per layer are what a plain computation gives, and the first bad module is named."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.metrics.log import read
from lmworks.model import Transformer, attention
from lmworks.model.init import initialize
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.model import Model
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches
from lmworks.train import trainer
from lmworks.train.build import build_model
from lmworks.train.observe.detail_lines import DetailLines
from lmworks.train.observe.layer_statistics import LayerStatistics, beginning, largest_score, observe_pass, record_activations
from lmworks.train.step import StepResult
from lmworks.ui.terminal import Interrupted
from small_config import small_config
from tiny_run import FIRST, Tiny, before_each_step


def model() -> Transformer:
    config = Model(
        **small_config(num_hidden_layers=3),
        use_qk_norm=True, max_position_embeddings="64 tokens",
    )  # fmt: skip
    return initialize(Transformer(config), 3).eval()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (2, 12)))
    return tokens, tokens.roll(-1, 1)


def named(found: Transformer) -> tuple[dict[str, torch.nn.Module], dict[str, torch.nn.Module]]:
    blocks = {f"layers.{number}": block for number, block in enumerate(found.layers)}
    return blocks, {name: block.attention for name, block in blocks.items()}


def test_activations_and_scores_are_those_of_a_plain_computation(monkeypatch: pytest.MonkeyPatch):
    found, outputs, scores = model(), [], []
    for block in found.layers:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output[0].detach()))
    honest = attention.attend_fast

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: object, dropout: float, logits: None) -> Tensor:
        every = torch.einsum("bhtc,bhsc->bhts", query.detach(), key.detach().repeat_interleave(2, 1)) / 8**0.5
        scores.append(max(float(every[b, h, t, s]) for b in range(2) for h in range(4) for t in range(12) for s in range(t + 1)))
        return honest(query, key, value, mask, dropout)

    monkeypatch.setattr(attention, "attend_fast", plain)
    with record_activations(*named(found)) as seen:
        expected = found.loss(*batch()).total
    monkeypatch.undo()
    for number, output in enumerate(outputs):
        squares, count = seen.activations()[f"layers.{number}"]
        assert count == output.numel()
        np.testing.assert_allclose(squares, float(output.double().square().sum()), rtol=1e-12)
    np.testing.assert_allclose([seen.logits()[f"layers.{number}"] for number in range(3)], scores, rtol=1e-5)  # another order of sums
    assert torch.equal(found.loss(*batch()).total, expected), "watching changes nothing"


def test_the_largest_score_keeps_to_the_mask():
    query, key = torch.ones(1, 1, 2, 4), torch.tensor([1.0, 9.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    assert largest_score(query[:, :, :1], key[:, :, :1], None) == 2
    assert largest_score(query, key, None) == 18
    assert largest_score(query, key, torch.tensor([[[[True, False], [True, False]]]])) == 2


def test_nothing_is_left_behind():
    found, honest = model(), (attention.attend_fast, attention.attend_plain)
    with pytest.raises(RuntimeError, match="stop"), record_activations(*named(found)):
        raise RuntimeError("stop")
    assert (attention.attend_fast, attention.attend_plain) == honest
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in found.modules())


def test_a_run_that_is_asked_tells_of_its_layers(tiny: Tiny, tmp_path: Path) -> None:
    """Every fifth step, without changing a bit of what is trained; also where a test for corruption drops the
    gradients."""
    plain, asked = tiny.copy(tmp_path / "plain"), tiny.copy(tmp_path / "asked")
    plain.pretrain()
    asked.pretrain("metrics.detail_every=5 steps", "stability.recheck_every=10 steps")
    expected, found = read(plain.run_dir), read(asked.run_dir)
    assert [line["train/loss"] for line in found] == [line["train/loss"] for line in expected]
    lines = [line for line in found if "layers/0/grad_norm" in line]
    assert [line["step"] for line in lines] == [line["step"] for line in found if line["step"] % 5 == 0]
    assert not any("layers/0/grad_norm" in line for line in expected), "a run of so few steps has no time for them"
    layers = asked.resolve().recipe.model.num_hidden_layers
    assert layers
    for line in lines:
        norms = [line[f"layers/{layer}/grad_norm"] for layer in range(layers)]
        assert min(norms) > 0
        assert 0 < sum(norm**2 for norm in norms) <= line["optim/grad_norm"] ** 2 * 1.0001  # the two ends of the model have the rest
        assert 0 < line["optim/update_ratio"] < line["optim/weight_norm"] < 100
        for name in ("activation_rms", "attention_logit_max", "update_ratio"):
            assert all(0 < line[f"layers/{layer}/{name}"] < 100 for layer in range(layers))


def test_a_sample_of_the_weights_stands_for_all(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of which three quarters of the elements are none: estimated from a part of each tensor as from all, with a copy that is
    bounded."""
    monkeypatch.setattr("lmworks.train.observe.layer_statistics._SAMPLED", 500)
    recipe = tiny.resolve().recipe
    found = build_model(recipe)
    batch = Batches(recipe, tiny.run_dir / "shards").batch(0)
    statistics = {whole: LayerStatistics(found, whole) for whole in (True, False)}
    assert max(part.numel() for part in statistics[False]._before.values()) <= 500
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in found.parameters():
            moved = torch.rand(parameter.shape, generator=generator) < 0.25
            parameter += moved * 0.01 * torch.randn(parameter.shape, generator=generator)
    exact, sampled = (statistics[whole].metrics(batch) for whole in (True, False))
    assert exact.keys() == sampled.keys() and exact["optim/weight_norm"] == sampled["optim/weight_norm"]
    assert exact["optim/unchanged_weights"] == pytest.approx(0.75, abs=0.01)
    assert sampled["optim/unchanged_weights"] == pytest.approx(0.75, abs=0.05)
    for name in ("optim/update_ratio", *(f"layers/{layer}/update_ratio" for layer in range(recipe.model.num_hidden_layers or 0))):
        assert sampled[name] == pytest.approx(exact[name], rel=0.15)


def test_the_beginning_of_a_batch_has_the_documents_that_begin_in_it() -> None:
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    batch = Batch(tokens, tokens, np.array([0, 3, 7, 12, 14, 20, 24], np.int32), 0, 0)
    short = beginning(batch, 5)
    assert short.tokens.tolist() == [[0, 1, 2, 3, 4], [12, 13, 14, 15, 16]] and short.cu_seqlens.tolist() == [0, 3, 5, 7, 10]
    assert beginning(batch, 12) is batch


def taken_steps(steps: int, cost: float, events: bool = False, first: int = 1, asked: int = 0) -> list[int]:
    """The steps of a process in which statistics are taken that cost this many steps, with an event in none or in each. asked: the interval
    of `metrics.detail_every`."""
    lines, taken = DetailLines(True), []
    for step in range(first, steps + 1):
        if events:
            lines.event()
        seconds, whole = 2.0 if step > first else 60.0, asked > 0 and step % asked == 0  # the first step compiles
        if (due := lines.due(step, steps)) or whole:
            lines.taken(cost * 2.0, asked=whole)
            seconds += cost * 2.0
        if due and not whole:
            taken.append(step)
        lines.step(seconds)
    return taken


def test_the_step_after_an_event_is_looked_at_as_often_as_its_cost_allows() -> None:
    assert taken_steps(10_000, 0.5, events=True)[:6] == [1, 10, 100, 200, 300, 400]  # 0.5 steps in 100 steps
    assert taken_steps(500, 0.1) == [1, 10, 100]
    assert not DetailLines(False).due(1, 500)


@pytest.mark.parametrize(("steps", "first"), [(20, 1), (49, 1), (50, 1), (80, 1), (150, 1), (1000, 1), (1000, 970), (1000, 700)])
@pytest.mark.parametrize("events", [False, True], ids=["quiet", "events"])
@pytest.mark.parametrize("cost", [0.05, 0.12, 0.3, 0.5])
def test_what_nobody_asks_for_takes_a_hundredth_of_the_time(steps: int, first: int, events: bool, cost: float) -> None:
    """Of the steps that the process trains, without the time in which the first one compiles. Short runs have what they can afford."""
    taken = taken_steps(steps, cost, events, first)
    trained = steps - first + 1
    assert cost * len(taken) <= 0.01 * (trained + 29)
    assert bool(taken) == (trained >= 50 and (first == 1 or events))


def test_what_is_asked_for_leaves_time_for_the_rest() -> None:
    """Statistics by `metrics.detail_every` are more than the limit allows."""
    assert taken_steps(500, 0.1, asked=3) == [1, 10, 100]
    assert taken_steps(500, 0.1, asked=2) == [1]


def test_the_first_statistics_may_take_longer_than_expected() -> None:
    """Then no others follow, until the run is long enough."""
    assert taken_steps(60, 2.0, events=True) == [1]
    assert taken_steps(400, 2.0) == [1, 10]


@pytest.mark.parametrize("event", ["bad step", "resume", "phase"])
def test_an_event_is_followed_by_a_line_of_details(tiny_copy: Tiny, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although nothing asks for details; with time for them."""
    monkeypatch.setattr("lmworks.train.observe.detail_lines._SPACING", 0)
    monkeypatch.setattr("lmworks.train.observe.detail_lines._LIMIT", math.inf)
    options = ["train.log_every=100 steps", "train.validate_every=100%", "train.save_every=100 steps"]
    if event == "bad step":
        poison(monkeypatch, 14)
    elif event == "resume":
        with pytest.MonkeyPatch.context() as patch:
            before_each_step(patch, lambda now: os.kill(os.getpid(), signal.SIGINT) if now == 12 else None)
            with pytest.raises(Interrupted):
                tiny_copy.pretrain(*options)
    tiny_copy.pretrain(*options)
    details = [line["step"] for line in read(tiny_copy.run_dir) if "optim/unchanged_weights" in line]
    phases = [1, 10, FIRST + 1]
    assert details == sorted({*phases, *{"bad step": [16], "resume": [14], "phase": []}[event]})


def poison(patch: pytest.MonkeyPatch, step: int) -> None:
    """The loss of a step is not a number."""
    honest = trainer.train_step

    def poisoned(model: ParallelModel, optimizer: Any, batch: Any, **options: Any) -> StepResult:
        result = honest(model, optimizer, batch, **options)
        return replace(result, loss=result.loss * math.nan) if batch.step == step else result

    patch.setattr(trainer, "train_step", poisoned)


def scores_of_a_pass(tiny: Tiny, ranks: int) -> dict[str, float]:
    recipe = tiny.resolve(f"layout.cp={ranks}").recipe
    seen = observe_pass(build_model(recipe, Ranks(recipe.layout)), Batches(recipe, tiny.run_dir / "shards").batch(0))
    return seen.logits()


def test_queries_see_the_keys_of_all_ranks(ranks, tiny: Tiny) -> None:
    """A sequence that two ranks share: what one finds, the ranks find together."""
    (alone,), shared = ranks.run(scores_of_a_pass, 1, tiny, 1), ranks.run(scores_of_a_pass, 2, tiny, 2)
    together = {name: max(found[name] for found in shared) for name in alone}
    np.testing.assert_allclose(list(together.values()), list(alone.values()), rtol=1e-5)  # another order of sums
