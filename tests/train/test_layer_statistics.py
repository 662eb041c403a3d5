"""Signals per layer are what a plain computation gives, and the first bad module is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.metrics.log import read
from lmworks.model import Transformer, attention
from lmworks.model.init import initialize
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.model import Model
from lmworks.shards.batches import Batches
from lmworks.train.build import build_model
from lmworks.train.observe.layer_statistics import largest_score, observe_pass, record_activations
from small_config import small_config
from tiny_run import Tiny


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

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: object, dropout: float) -> Tensor:
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
    """Every fifth step, without changing a bit of what is trained; also where a test for corruption drops the gradients."""
    plain, asked = tiny.copy(tmp_path / "plain"), tiny.copy(tmp_path / "asked")
    plain.pretrain()
    asked.pretrain("metrics.detail_every=5 steps", "stability.recheck_every=10 steps")
    expected, found = read(plain.run_dir), read(asked.run_dir)
    assert [line["train/loss"] for line in found] == [line["train/loss"] for line in expected]
    lines = [line for line in found if "layers/0/grad_norm" in line]
    assert [line["step"] for line in lines] == [line["step"] for line in found if line["step"] % 5 == 0]
    layers = asked.resolve().recipe.model.num_hidden_layers
    assert layers
    for line in lines:
        norms = [line[f"layers/{layer}/grad_norm"] for layer in range(layers)]
        assert min(norms) > 0
        assert 0 < sum(norm**2 for norm in norms) <= line["optim/grad_norm"] ** 2 * 1.0001  # the two ends of the model have the rest
        assert 0 < line["optim/update_ratio"] < line["optim/weight_norm"] < 100
        for name in ("activation_rms", "attention_logit_max", "update_ratio"):
            assert all(0 < line[f"layers/{layer}/{name}"] < 100 for layer in range(layers))


def scores_of_a_pass(tiny: Tiny, ranks: int) -> dict[str, float]:
    recipe = tiny.resolve(f"layout.cp={ranks}").recipe
    seen = observe_pass(build_model(recipe, Ranks(recipe.layout)), Batches(recipe, tiny.run_dir / "shards").batch(0))
    return seen.logits()


def test_queries_see_the_keys_of_all_ranks(ranks, tiny: Tiny) -> None:
    """A sequence that two ranks share: what one finds, the ranks find together."""
    (alone,), shared = ranks.run(scores_of_a_pass, 1, tiny, 1), ranks.run(scores_of_a_pass, 2, tiny, 2)
    together = {name: max(found[name] for found in shared) for name in alone}
    np.testing.assert_allclose(list(together.values()), list(alone.values()), rtol=1e-5)  # another order of sums
