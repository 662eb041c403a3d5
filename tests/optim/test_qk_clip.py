"""QK-clip: scores above the threshold are scaled down to it, those of other heads keep their bits, and the metric is the largest score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.model import flex_on_cpu
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_mask

from lmworks.errors import UserError
from lmworks.model import attention, chunked
from lmworks.model.documents import from_cu_seqlens
from lmworks.optim.optimizer import Optimizer, build_optimizer
from lmworks.optim.qk_clip import QkClip
from lmworks.parallel.mesh import alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.step import StepResult, train_step
from parallel.parity import MODELS, batch_of

MHA = {key: value for key, value in MODELS["dense"].items() if key != "use_qk_norm"} | {"num_key_value_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "mha": MHA,
    "gqa": MHA | {"num_key_value_heads": 2},
    "mla": MODELS["mla"],
    "plain queries": MODELS["mla"] | {"mla": MODELS["mla"]["mla"] | {"q_lora_rank": None}},
    "hybrid": MODELS["hybrid"] | {"use_qk_norm": False},
    "mtp": {key: value for key, value in MODELS["mtp"].items() if key != "use_qk_norm"},
    "window": MODELS["tied"] | {"use_qk_norm": False, "query_pre_attn_scalar": 20},
}  # fmt: skip


def recipe_of(kind: str, threshold: float | None, **train: Any) -> Recipe:
    return Recipe.model_validate({
        "name": "clip", "model": KINDS[kind] | {"initializer_range": 0.4}, "train": {"precision": "fp32", "compile": False} | train,
        "optimizer": {"learning_rate": 1e-9, "adam_learning_rate": 1e-9, "qk_clip_threshold": threshold},
    })  # fmt: skip


def trainer_of(kind: str, threshold: float | None, **train: Any) -> tuple[ParallelModel, Optimizer]:
    """A model that hardly moves but by QK-clip."""
    recipe = recipe_of(kind, threshold, **train)
    model = ParallelModel(build(recipe, alone(), torch.device("cpu")))
    model.train()
    return model, build_optimizer(model, recipe.optimizer)  # type: ignore[arg-type]


def step(model: ParallelModel, optimizer: Optimizer, batch: Batch, micro_batch_size: int = 3) -> StepResult:
    return train_step(model, optimizer, batch, micro_batch_size=micro_batch_size, lr_factor=1.0, max_grad_norm=1.0, bias_update_rate=0.0)


def plain_scores(model: ParallelModel, batch: Batch) -> Tensor:
    """The largest score of each head, from the reference implementation of attention over the whole batch."""
    seen: list[Tensor] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, logits: Any = None) -> Tensor:
        scores = (query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT) * query.shape[-1] ** -0.5
        seen.append(scores.masked_fill(~mask.dense(), float("-inf")).amax((0, 2, 3)))
        return attention.attend_plain(query, key, value, mask, dropout)

    part = model.parts[0]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("lmworks.model.attention.attend_fast", attend)
        patch.setattr("lmworks.model.mla.attend_fast", attend)
        part.loss(*(torch.from_numpy(rows) for rows in (batch.tokens, batch.labels, batch.cu_seqlens)))
    return torch.stack(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_above_the_threshold_are_scaled_to_it_and_no_others(kind: str) -> None:
    batch = batch_of(0)
    model, optimizer = trainer_of(kind, 1e9)
    before = plain_scores(model, batch)
    result = step(model, optimizer, batch)  # in three micro-batches
    torch.testing.assert_close(result.logits_AH, before, rtol=1e-5, atol=1e-5)
    unclipped, other = trainer_of(kind, None)
    assert torch.equal(step(unclipped, other, batch).loss, result.loss)
    named = dict(unclipped.named_parameters())
    assert all(torch.equal(weight, named[name]) for name, weight in model.named_parameters())  # it was only a measurement

    threshold = float(before[0].median())
    clipped, optimizer = trainer_of(kind, threshold)
    step(clipped, optimizer, batch)
    # only the first layer reads the same activations as before
    after = plain_scores(clipped, batch)[0]
    torch.testing.assert_close(after, before[0].clamp(max=threshold), rtol=1e-4, atol=1e-5)
    assert (before[0] > threshold).any() and (before[0] <= threshold).any()
    below = before[0] <= threshold
    assert torch.equal(after[below], plain_scores(unclipped, batch)[0][below])  # other heads keep their bits


def test_what_several_heads_share_is_not_scaled() -> None:
    batch = batch_of(0)
    for kind, shared, own in (
        ("gqa", ("key.weight", "key.bias"), ("query.weight", "query.bias")),
        ("mla", ("kv_down.weight",), ("query_up.weight", "kv_up.weight")),
    ):  # fmt: skip
        (clipped, optimizer), (unclipped, other) = trainer_of(kind, 1e-3), trainer_of(kind, None)
        step(unclipped, other, batch)
        step(clipped, optimizer, batch)
        weights, expected = dict(clipped.named_parameters()), dict(unclipped.named_parameters())
        for name in shared:
            assert torch.equal(weights[f"layers.1.attention.{name}"], expected[f"layers.1.attention.{name}"]), name
        for name in own:
            assert not torch.equal(weights[f"layers.1.attention.{name}"], expected[f"layers.1.attention.{name}"]), name
        if kind == "mla":  # the values, which are expanded from the same latent, are not touched either
            up, whole = (held["layers.1.attention.kv_up.weight"].view(4, 16, -1)[:, 8:] for held in (weights, expected))
            assert torch.equal(up, whole)


def test_a_step_that_is_not_applied_clips_nothing() -> None:
    model, _ = trainer_of("mha", None)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    clip = QkClip(dict(model.named_parameters()), model.config, 0.1)
    logits = torch.full((4, 4), 10.0)
    clip.step(logits, torch.tensor(False))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    clip.step(logits, torch.tensor(True))
    assert not torch.equal(dict(model.named_parameters())["layers.0.attention.query.weight"], before["layers.0.attention.query.weight"])


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputed_layers_record_the_same(policy: str) -> None:
    batch = batch_of(1)
    found = [step(*trainer_of("gqa", 2.0, **options), batch) for options in ({}, {"activation_checkpointing": policy})]
    assert torch.equal(found[0].logits_AH, found[1].logits_AH)  # type: ignore[arg-type]
    assert torch.equal(found[0].loss, found[1].loss)


def test_long_rows_on_every_path_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel, chunks, blocks, and rows without boundaries record what plain attention does."""
    draw = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, 96, 8, generator=draw) for heads in (4, 2, 2))
    for kept in (10**6, 0):
        monkeypatch.setattr("lmworks.model.documents._KEPT", kept)
        for cu_seqlens in (None, torch.tensor([0, 96, 130, 192])):
            mask = from_cu_seqlens((2, 96), cu_seqlens, 17, torch.device("cpu"))
            for one in (mask.mask, mask.window_mask):
                for blocked in (2048, 0):
                    monkeypatch.setattr(attention, "_LONGEST_BLOCKED", blocked)
                    expected: list[Tensor] = []
                    found: list[Tensor] = []
                    attention.attend_plain(query, key, value, one, 0.0, expected)
                    attention.attend_fast(query, key, value, one, 0.0, found)
                    torch.testing.assert_close(found[0], expected[0])


def test_the_kernel_of_gpus_is_asked_for_its_largest_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention returns the largest score of each query, on GPUs alone: a stand-in with its interface."""
    draw = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, heads, 150, 16, generator=draw) for heads in (4, 2, 2))
    spans = from_cu_seqlens((2, 150), torch.tensor([0, 96, 150, 300]), 33, torch.device("cpu"))

    def kernel(query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, enable_gqa: bool, return_aux: AuxRequest) -> Any:
        assert enable_gqa and return_aux == AuxRequest(lse=False, max_scores=True)
        seen = create_mask(block_mask.mask_mod, 2, 1, 150, 150, device="cpu")
        scores = (query @ key.repeat_interleave(2, 1).mT * query.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        return flex_on_cpu.attend(query, key, value, block_mask), AuxOutput(max_scores=scores.amax(-1))

    monkeypatch.setattr(chunked, "_compiled", lambda: kernel)
    monkeypatch.setattr("lmworks.model.documents.has_flex", lambda device: True)
    for mask in (spans.mask, spans.window_mask):
        assert mask is not None
        expected: list[Tensor] = []
        found: list[Tensor] = []
        out = attention.attend_plain(query, key, value, mask, 0.0, expected)
        on_gpu = replace(mask, kept_B1TS=None, blocks=chunked.block_mask(mask.first_BT, mask.last_BT, 150))
        torch.testing.assert_close(attention.attend_fast(query, key, value, on_gpu, 0.0, found), out)
        torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize(("overrides", "says"), [
    (("model.use_qk_norm=true",), "use_qk_norm"), (("model.use_qk_norm=false", "tune.lora={}"), "freezes"),
    (("model.use_qk_norm=false", "optimizer.kind=adamw", "train.deepspeed={}", "layout.zero=1"), "flat pieces"),
    (("model.use_qk_norm=false", "model.attention_sinks=true"), "attention_sinks"),
    (
        ("model.preset=glm-nano", "model.use_qk_norm=false", "model.layer_types=[linear_attention]", "model.lightning={}"),
        "no layer has scores",
    ),
])  # fmt: skip
def test_refused(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_recipe("quickstart", ["optimizer.qk_clip_threshold=100", *overrides])
