"""One optimizer step: how a batch is cut, what is recomputed and in which precision must not matter to what is learnt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from lmworks.model import Transformer
from lmworks.optim.clip import LossScaler
from lmworks.optim.optimizer import Optimizer, build_optimizer
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.parameter import KINDS, kind_of
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from lmworks.train.build import build_model
from lmworks.train.observe.step_metrics import source_metrics
from lmworks.train.step import (
    Limits,
    StepResult,
    StepValues,
    accumulate_gradients,
    dropout_seed,
    micro_batch_of,
    seed_dropout,
    train_step,
)
from saved_bytes import saved_bytes
from saved_run import save_run
from tiny_run import Tiny, same_bits


@pytest.fixture(scope="module")
def batch(tiny: Tiny) -> Batch:
    """Eight sequences of 32 tokens of which 2, 32, 9, ... carry loss, as conversations and short documents do."""
    whole = Batches(tiny.resolve().recipe, tiny.run_dir / "shards").batch(11)
    assert whole.tokens.shape == (8, 32)
    labels = whole.labels.copy()
    for row, valid in enumerate((2, 32, 9, 1, 30, 4, 17, 3)):
        labels[row, valid:] = IGNORE
    return replace(whole, labels=labels)


def make(tiny: Tiny, *overrides: str) -> tuple[ParallelModel, Optimizer]:
    # A large eps: AdamW's first step is the sign of the gradient where eps is small, and rounding decides the sign of a zero.
    adamw = ("optimizer.kind=adamw", "optimizer.eps=0.001", "optimizer.adam_learning_rate=null")
    recipe = tiny.resolve(*adamw, "model.num_hidden_layers=3", *overrides).recipe
    model = build_model(recipe)
    model.train()
    return model, build_optimizer(model, recipe.optimizer)


def step(model: ParallelModel, optimizer: Optimizer, batch: Batch, micro_batch_size: int, **options: Any) -> StepResult:
    given = {"micro_batch_size": micro_batch_size, "lr_factor": 1.0, "max_grad_norm": 0.0, "bias_update_rate": 0.01}
    return train_step(model, optimizer, batch, **given | options)


def gradients(model: ParallelModel | Transformer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: ParallelModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def farthest(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference over all tensors, relative to the largest element of its tensor."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp_min(1e-12)) for name in one)


def parts(batch: Batch, rows: int) -> Iterator[tuple[torch.Tensor, ...]]:
    for start in range(0, len(batch.tokens), rows):
        part = batch.rows(start, start + rows)
        yield tuple(torch.from_numpy(array) for array in (part.tokens, part.labels, part.cu_seqlens))


def test_how_the_batch_is_cut_does_not_matter(tiny: Tiny, batch: Batch) -> None:
    """Loss, gradients and weights after the update. fp32 sums in another order: 1e-5 of the largest element is some 100 roundings."""
    model, optimizer = make(tiny)
    start = weights(model)
    whole = step(model, optimizer, batch, 8)
    expected, moved = gradients(model), weights(model)
    assert farthest(start, moved) > 1e-2  # the step is large against the tolerance below
    for micro_batch_size in (1, 2, 3, 4):
        model, optimizer = make(tiny)
        result = step(model, optimizer, batch, micro_batch_size)
        assert float(result.loss) == pytest.approx(float(whole.loss), rel=1e-6)
        assert float(result.grad_norm) == pytest.approx(float(whole.grad_norm), rel=1e-5)
        assert result.valid_tokens == 98
        assert farthest(gradients(model), expected) < 1e-5
        assert farthest(weights(model), moved) < 1e-5
        assert result.counts_LE is not None and torch.equal(result.counts_LE, whole.counts_LE)


def test_what_is_accumulated_in_parts_is_that_of_the_whole(tiny: Tiny, batch: Batch) -> None:
    model, optimizer = make(tiny)
    whole = accumulate_gradients(model, batch, 4, normalizer=50.0)
    expected = gradients(model)
    optimizer.zero_grad()
    sums = [accumulate_gradients(model, batch.rows(start, start + 4), 4, normalizer=50.0) for start in (0, 4)]
    both = sums[0] + sums[1]
    assert (both.normalizer, both.positions, both.valid_tokens) == (50.0, whole.positions, whole.valid_tokens) == (50.0, 256, 98)
    torch.testing.assert_close(both.sums.cross_entropy, whole.sums.cross_entropy, rtol=1e-5, atol=0)
    assert both.sums.counts_LE is not None and whole.sums.counts_LE is not None
    torch.testing.assert_close(both.sums.counts_LE, whole.sums.counts_LE)
    # without the losses of routers, whose weight is that of the tokens of their call
    names = [name for name in expected if "embedding" in name or "head" in name]
    found = gradients(model)
    assert farthest({name: found[name] for name in names}, {name: expected[name] for name in names}) < 1e-2


def test_shorter_sequences_have_more_rows_in_a_micro_batch(tiny: Tiny) -> None:
    """As many tokens as in the longest phase, which has sequences of 64."""
    recipe = tiny.resolve("train.micro_batch_sequences=3").recipe
    assert [micro_batch_of(recipe, length) for length in (64, 32, 48, 128, 4096)] == [3, 6, 4, 1, 1]
    assert micro_batch_of(recipe, 32, pipelined=True) == 3


@pytest.mark.parametrize(("stages", "lengths"), [
    ({"tune": 64, "dpo": 32}, {64: 3, 32: 6}), ({"dpo": 32, "grpo": 64}, {64: 3, 32: 6}), ({"grpo": 32}, {32: 3, 64: 1}), ({}, {64: 3}),
])  # fmt: skip
def test_micro_batches_of_runs_without_pretraining(tiny: Tiny, tmp_path: Path, stages: dict[str, int], lengths: dict[int, int]) -> None:
    """They are as large as the recipe says, and by default as memory allows, whichever stages there are."""
    data = {"data": [{"name": "sums", "kind": "tasks"}]}
    parts: dict[str, Any] = {"tune": {}, "dpo": data, "grpo": data}
    sections = [f"{name}={json.dumps(parts[name] | {'sequence_length': f'{length} tokens'})}" for name, length in stages.items()]
    save_run(tiny, tmp_path / "base")
    given = [f"start_from={tmp_path / 'base'}", "train.phases=[]", *sections, *(f"{name}=null" for name in parts if name not in stages)]
    recipe = tiny.resolve(*given, "train.micro_batch_sequences=3").recipe
    assert {length: micro_batch_of(recipe, length) for length in lengths} == lengths
    if stages and "tune" not in stages:
        assert tiny.resolve(*given, "train.micro_batch_sequences=null").recipe.train.micro_batch_sequences == 8192 // max(stages.values())


def test_losses_are_means_over_the_tokens_of_the_step(tiny: Tiny, batch: Batch) -> None:
    """Weights at their start give each token of 512 some e^-6.2; the next but one too."""
    model, optimizer = make(tiny, "model.mtp={num_nextn_predict_layers: 1, loss_weight: 0.3}", "model.z_loss_weight=0.001")
    result = step(model, optimizer, batch, 4)
    assert result.mtp_loss is not None and result.auxiliary_loss is not None
    assert [float(one) for one in (result.loss, result.mtp_loss)] == pytest.approx([6.2, 6.2], abs=0.5)
    assert float(result.auxiliary_loss) == pytest.approx(3e-4, rel=0.2), "3 layers of weight 0.0001, where all experts are used alike"
    assert float(result.z_loss) == pytest.approx(6.2**2, rel=0.2) and float(result.z_loss) % 1


@pytest.mark.parametrize("limits", [Limits(loss=0.1), Limits(grad_norm=1e-6)])
def test_a_spike_of_either_changes_nothing(tiny: Tiny, batch: Batch, limits: Limits) -> None:
    model, optimizer = make(tiny)
    before = weights(model)
    assert not step(model, optimizer, batch, 8, limits=limits).applied
    assert same_bits(weights(model), before) == []


def test_dropout_is_a_function_of_seed_step_and_rank() -> None:
    seeds = {dropout_seed(seed, step, rank) for seed in range(3) for step in range(3) for rank in range(3)}
    assert len(seeds) == 27 and all(0 <= seed < 2**63 for seed in seeds)


def test_the_update_is_as_large_as_the_schedule_says(tiny: Tiny, batch: Batch) -> None:
    start = weights(make(tiny)[0])
    moved = {}
    for factor in (1.0, 0.25, 0.0):
        model, optimizer = make(tiny)
        step(model, optimizer, batch, 4, lr_factor=factor, bias_update_rate=0.0)
        moved[factor] = {name: tensor - start[name] for name, tensor in weights(model).items()}
    assert not any(tensor.any() for tensor in moved[0.0].values())
    for name, tensor in moved[1.0].items():
        torch.testing.assert_close(4 * moved[0.25][name], tensor, rtol=1e-3, atol=1e-6, msg=name)
    assert any(tensor.any() for tensor in moved[1.0].values())


def test_the_gradient_is_that_of_the_mean_over_valid_tokens_and_not_of_a_mean_of_means(tiny: Tiny, batch: Batch) -> None:
    model, optimizer = make(tiny)
    plain = make(tiny)[0].parts[0].plain()
    (inputs,) = parts(batch, 8)
    plain.auxiliary_factor = 98 / 256  # all tokens are routed, whether they carry loss or not
    loss = plain.loss(*inputs)
    (loss.total / batch.valid_tokens).backward()
    result = step(model, optimizer, batch, 2)
    # the plain twin sums experts and heads in another order
    assert farthest(gradients(model), gradients(plain)) < 1e-4
    assert float(result.loss) == pytest.approx(float(loss.head.cross_entropy) / 98, rel=1e-6)

    wrong = make(tiny)[0].parts[0]
    means = []
    for inputs in parts(batch, 2):
        valid = int((inputs[1] != IGNORE).sum())
        loss = wrong.loss(*inputs)
        (loss.total / valid / 4).backward()
        means.append(float(loss.head.cross_entropy) / valid)
    assert farthest(gradients(wrong), gradients(plain)) > 0.2
    assert abs(np.mean(means) - float(result.loss)) > 1e-5  # beyond rounding; an untrained model errs alike everywhere


def test_the_weight_of_the_routers_loss_does_not_depend_on_how_many_tokens_are_trained(tiny: Tiny, batch: Batch) -> None:
    """Its part of a router's gradient is the same with 98 of 256 tokens trained and with nearly all, as in tuning and in pretraining."""
    found, measured = [], []
    for labels in (batch.labels, Batches(tiny.resolve().recipe, tiny.run_dir / "shards").batch(11).labels):
        grads = []
        for weight in (0.0, 1.0):
            model, optimizer = make(tiny, f"model.moe.balance.sequence_aux_loss_weight={weight}")
            result = step(model, optimizer, replace(batch, labels=labels), 2)
            grads.append(gradients(model)["layers.2.ffn.router.weight"])
        assert result.auxiliary_loss is not None
        measured.append(float(result.auxiliary_loss))
        found.append(grads[1] - grads[0])
    assert measured[0] == measured[1]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)


def test_auto_is_what_the_processor_is_fast_in_and_nothing_else(tiny: Tiny, batch: Batch, has_bf16: bool) -> None:
    """Bit for bit the step of the type that is named: the machine decides that, and nothing besides it."""
    stepped = {}
    for precision in ("auto", "bf16", "fp32"):
        model, optimizer = make(tiny, f"train.precision={precision}", "optimizer.kind=muon")
        step(model, optimizer, batch, 2)
        stepped[precision] = weights(model)
    same, other = ("bf16", "fp32") if has_bf16 else ("fp32", "bf16")
    assert same_bits(stepped["auto"], stepped[same]) == []
    assert same_bits(stepped["auto"], stepped[other])


def test_gradients_add_up_in_fp32_under_bf16(tiny: Tiny, batch: Batch) -> None:
    """Bit for bit the fp32 sum of the micro-batches' gradients; a sum in bf16 is far from it."""
    model, optimizer = make(tiny, "train.precision=bf16")
    single = make(tiny, "train.precision=bf16")[0].parts[0]
    assert single.compute_dtype == torch.bfloat16
    single.auxiliary_factor = batch.valid_tokens / batch.tokens.size
    exact: dict[str, torch.Tensor] = {}
    rounded: dict[str, torch.Tensor] = {}
    for inputs in parts(batch, 1):
        single.zero_grad(set_to_none=True)
        (single.loss(*inputs).total * (1.0 / batch.valid_tokens)).backward()
        for name, grad in gradients(single).items():
            assert grad.dtype == torch.float32
            exact[name] = exact[name] + grad if name in exact else grad
            rounded[name] = rounded[name] + grad.bfloat16() if name in rounded else grad.bfloat16()
    step(model, optimizer, batch, 1)
    assert same_bits(gradients(model), exact) == []
    assert farthest({name: grad.float() for name, grad in rounded.items()}, exact) > 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_changes_nothing(tiny: Tiny, batch: Batch, precision: str, dropout: float) -> None:
    """Recomputed layers give the same bits, draw the same dropout, and count each token once."""
    found = {}
    for mode in ("none", "selective", "full", "40%"):
        model, optimizer = make(
            tiny, f"train.precision={precision}", f"train.activation_checkpointing={mode}", f"model.residual_dropout={dropout}"
        )
        torch.manual_seed(3)
        result = step(model, optimizer, batch, 4)
        found[mode] = (weights(model), gradients(model), result, torch.get_rng_state())
    for mode in ("selective", "full", "40%"):
        assert same_bits(found[mode][0], found["none"][0]) == []
        assert same_bits(found[mode][1], found["none"][1]) == []
        assert torch.equal(found[mode][2].counts_LE, found["none"][2].counts_LE)
        assert torch.equal(found[mode][3], found["none"][3])
    assert found["none"][2].counts_LE.sum(-1).tolist() == [8 * 32 * 2] * 2  # tokens times experts per token


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_keeps_less(tiny: Tiny, batch: Batch, mode: Literal["selective", "full"]) -> None:
    """The bytes that the forward keeps for the backward fall."""

    def kept(mode: str) -> int:
        model = make(tiny, f"train.activation_checkpointing={mode}")[0]
        (inputs,) = parts(batch, 8)
        return saved_bytes(lambda: model.parts[0].loss(*inputs))

    assert kept(mode) < 0.8 * kept("none")
    assert kept(mode) < kept(f"{mode} 67%") < kept(f"{mode} 34%") < kept("none")


def test_an_fp16_overflow_skips_the_step_and_halves_the_scale(tiny: Tiny, batch: Batch) -> None:
    model, optimizer = make(tiny, "train.precision=fp16")
    scaler = LossScaler(initial=2.0**40)
    before, state = weights(model), {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    result = step(model, optimizer, batch, 4, scaler=scaler)
    assert torch.isfinite(result.loss) and not result.applied
    assert same_bits(weights(model), before) == [] and same_bits(optimizer.state_dict(), state) == []
    assert float(scaler.scale) == 2.0**39

    scaler = LossScaler(initial=2.0**10)
    result = step(model, optimizer, batch, 4, scaler=scaler)
    assert result.applied and float(scaler.scale) == 2.0**10 and int(scaler.good_steps) == 1
    exact, _ = make(tiny)
    assert farthest(weights(model), weights(exact)) > 1e-2
    reference, other = make(tiny)
    step(reference, other, batch, 4)
    # the scale has been taken out again: fp16 has 11 bits
    assert farthest(gradients(model), gradients(reference)) < 0.05

    assert not step(model, optimizer, batch, 4, scaler=scaler, limits=Limits(loss=0.0)).applied
    assert float(scaler.scale) == 2.0**10 and int(scaler.good_steps) == 2, "a spike is no overflow"


@pytest.mark.parametrize("device", ["host", "device"])
def test_a_bad_step_selects_the_old_values(tiny: Tiny, batch: Batch, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, state, bias; on the host by leaving the update out, and on a device by selecting."""
    model, optimizer = make(tiny, "optimizer.kind=muon", "optimizer.ema_decay=0.9")
    step(model, optimizer, batch, 4)
    before, state = weights(model), {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    honest = Transformer.loss

    def poisoned(self: Transformer, *inputs: torch.Tensor) -> Any:
        loss = honest(self, *inputs)
        return replace(loss, total=loss.total * float("inf"))

    monkeypatch.setattr(Transformer, "loss", poisoned)
    if device == "device":  # the path where the host does not know

        def select(lr_factor: float, apply: torch.Tensor, logits_AH: None) -> None:
            optimizer.muon.step(lr_factor, apply)
            optimizer.adamw.step(lr_factor, apply)
            assert optimizer.ema is not None
            optimizer.ema.step(apply)

        monkeypatch.setattr(optimizer, "step", select)
    result = step(model, optimizer, batch, 4)
    assert torch.isfinite(result.loss) and not torch.isfinite(result.grad_norm) and not result.applied
    assert same_bits(weights(model), before) == []
    assert same_bits(optimizer.state_dict(), state) == []


def test_dropout_is_seeded_where_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU as by `torch.manual_seed`, and on a GPU too."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    seed_dropout(1, 2, 3, torch.device("cpu"))
    drawn = torch.rand(4)
    torch.default_generator.manual_seed(dropout_seed(1, 2, 3))
    assert torch.equal(torch.rand(4), drawn) and not seeded
    seed_dropout(1, 2, 3, torch.device("cuda"))
    assert seeded == [dropout_seed(1, 2, 3)]


def test_the_loss_of_each_source_is_that_of_its_rows(tiny: Tiny, batch: Batch) -> None:
    """However the batch is cut into micro-batches, which may mix sources; a row without a source counts for none."""
    sources = np.zeros((8, 3), np.float32)
    for row, source in enumerate((2, 0, 2, 0, 2, 2, 0)):
        sources[row, source] = 1
    whole = replace(batch, sources=sources)
    model, _ = make(tiny)
    model.eval()
    of_rows = model.token_cross_entropy(batch).sum(1).double()
    expected = [float(of_rows[[1, 3, 6]].sum()), 0.0, float(of_rows[[0, 2, 4, 5]].sum())]
    for micro_batch in (1, 3, 8):
        found = step(*make(tiny), whole, micro_batch)
        assert found.sources_S is not None
        np.testing.assert_allclose(found.sources_S.numpy(), expected, rtol=2e-5)
    assert whole.tokens_by_source == (32 + 1 + 17, 0, 2 + 9 + 30 + 4)


def test_gradients_and_ends_are_measured_before_clipping(tiny: Tiny, batch: Batch) -> None:
    model, optimizer = make(tiny)
    clipped, unclipped = (step(*make(tiny), batch, 4, max_grad_norm=limit) for limit in (0.01, 0.0))
    step(model, optimizer, batch, 4)
    assert clipped.grad_squares_G is not None and torch.equal(clipped.grad_squares_G, unclipped.grad_squares_G)
    squares = [0.0] * len(KINDS)
    for name, gradient in gradients(model).items():
        squares[KINDS.index(kind_of(name, gradient.ndim))] += float(gradient.double().square().sum())
    np.testing.assert_allclose(clipped.grad_squares_G.numpy(), squares, rtol=1e-5)
    assert sum(squares) == pytest.approx(float(clipped.grad_norm) ** 2, rel=1e-5)
    assert all(squares), "the model has all kinds"
    sizes = {kind: sum(p.numel() for n, p in model.named_parameters() if kind_of(n, p.ndim) == kind) for kind in KINDS}
    assert model.trained_by_kind == [*sizes.values()]
    ends = [float(parameter.detach().norm()) for name, parameter in model.named_parameters() if name in ("embedding.weight", "head.weight")]
    found = model.end_norms()
    assert found is not None
    np.testing.assert_allclose(found.numpy(), ends, rtol=1e-5)


def test_a_line_has_the_sources_of_its_step() -> None:
    found = StepValues(1.0, 0.0, None, None, 1.0, None, 30, 1.0, False, None, None, torch.tensor([30.0, 0.0, 20.0], dtype=torch.float64))
    values = source_metrics(("web", "code", "books"), (10, 0, 10), found)
    assert values == {"train/source/web/loss": 3.0, "train/source/books/loss": 2.0, "train/effective_sources": pytest.approx(2.0)}
    assert source_metrics(("web",), (7,), replace(found, sources_S=None)) == {"train/effective_sources": 1.0}
    assert source_metrics((), (), found) == source_metrics(("web",), (0,), found) == {}
