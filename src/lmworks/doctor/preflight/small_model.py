"""A scaled-down model and layout of the recipe, which a few CPU processes train within seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from lmworks.optim.optimizer import Updates
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Tokens
from lmworks.shards.format.labels import IGNORE
from lmworks.shards.read.batch import Batch
from lmworks.train.pretrain import with_optimizer
from lmworks.train.step import StepResult, train_step

_AXES = ("tp", "pp", "cp", "dp_shard", "dp_replicate")
_AT_ONCE = 3  # axes in one world: 8 ranks
HEADS, ROWS, LENGTH, STEPS = 4, 8, 24, 2
LONGER = 192  # tokens of a row in bf16: the more there are, the less the rounding of each matters beside a mistake
RATE = 0.02


def small_recipe(
    recipe: Recipe, vocab_size: int = 64, hidden_size: int = 32, head_dim: int = 16, precision: Literal["fp32", "bf16"] = "fp32"
) -> Recipe:  # fmt: skip
    """The same kind of model (attention, positions, experts, latents, layers ahead, tied or not) and optimizer, by our engine.

    What it computes in is `precision` throughout, Newton-Schulz included, whatever the machine is fastest in.
    """
    model = recipe.model
    changes: dict[str, object] = {
        "vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": 4, "num_attention_heads": HEADS, "intermediate_size": 48,
        "num_key_value_heads": HEADS if model.num_key_value_heads == model.num_attention_heads else 2, "head_dim": head_dim,
        "initializer_range": 0.1,
        "residual_dropout": 0.0, "attention_dropout": 0.0,
        "no_rope_layer_interval": min(model.no_rope_layer_interval, 2),
        "sliding_window": Tokens(8) if model.sliding_window else None,
        "layer_types": ("sliding_attention", "full_attention") if "full_attention" in model.layer_types else (),
    }  # fmt: skip
    if model.moe is not None:
        groups = {"n_group": 4, "topk_group": 2} if model.moe.n_group > 1 else {}
        sizes = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": min(model.moe.first_k_dense_replace, 1),
        }
        changes["moe"] = model.moe.model_copy(update=sizes | groups)
    if model.mla is not None:
        sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
        changes["mla"] = model.mla.model_copy(update=sizes | ({"q_lora_rank": 16} if model.mla.q_lora_rank else {}))
        changes |= {"head_dim": 12, "num_key_value_heads": HEADS}
    if model.mtp is not None:
        changes["mtp"] = model.mtp.model_copy(update={"num_nextn_predict_layers": 1})
    train = recipe.train.model_copy(update={"precision": precision, "compile": False, "micro_batch_size": 1, "deepspeed": None})
    rates = {"learning_rate": RATE, "adam_learning_rate": RATE, "eps": 1e-4, "ema_decay": 0.0}
    optimizer = recipe.optimizer.model_copy(update=rates)
    return recipe.model_copy(update={"model": model.model_copy(update=changes), "train": train, "optimizer": optimizer})


def small_layouts(layout: Layout) -> list[Layout]:
    """Worlds of at most 8 ranks that together have every axis of a layout, two ranks along each; none for one rank."""
    active = [axis for axis in _AXES if getattr(layout, axis) > 1]
    found = []
    for start in range(0, len(active), _AT_ONCE):
        sizes = {axis: 2 if axis in active[start : start + _AT_ONCE] else 1 for axis in _AXES}
        experts = {"ep": 2 if layout.ep > 1 and sizes["cp"] * sizes["dp_shard"] > 1 else 1}
        piped = sizes["pp"] > 1
        stages = {
            "pipeline_stages_per_rank": min(layout.pipeline_stages_per_rank, 2) if piped else 1,
            "pipeline_schedule": layout.pipeline_schedule if piped else "1f1b",
        }
        found.append(layout.model_copy(update=sizes | experts | stages | {"layers_per_pipeline_stage": None}))
    return found


@dataclass(frozen=True)
class Trained:
    """What came out, by name, whole: first weights; losses and gradient norms of the steps; gradients of the first; last weights.

    DeepSpeed lets go of gradients in its step, so there are none of it.
    """

    start: dict[str, np.ndarray]
    losses: list[float]
    norms: list[float]
    grads: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def train(recipe: Recipe, layout: Layout, length: int = LENGTH) -> Trained:
    """A few steps on this rank of a layout, or alone; every rank returns the whole tensors of its pipeline stages."""
    model = first_weights(recipe, layout)
    start = {name: whole(parameter) for name, parameter in model.named_parameters()}
    model, optimizer = with_optimizer(recipe, model)
    model.train()
    losses, norms = [], []
    grads: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        result = one_step(recipe, model, optimizer, step, length)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        grads = grads or {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return Trained(start, losses, norms, grads, {name: whole(value) for name, value in model.state_dict().items()})


def first_weights(recipe: Recipe, layout: Layout) -> ParallelModel:
    """The model as the recipe's seed makes it, this rank's part of it."""
    ranks = Ranks(layout)
    return ParallelModel(build(recipe, ranks, torch.device("cpu")), ranks)


def one_step(recipe: Recipe, model: ParallelModel, optimizer: Updates, step: int, length: int = LENGTH) -> StepResult:
    """Train on the random batch of a step."""
    batch = random_batch(step, length)
    return train_step(
        model, optimizer, batch.sequences(*model.rank_sequences(ROWS)), sequences=ROWS, valid_tokens=batch.valid_tokens, micro_batch_size=1,
        lr_factor=1.0, max_grad_norm=recipe.optimizer.max_grad_norm, bias_update_rate=0.01,
    )  # fmt: skip


def random_batch(step: int, length: int = LENGTH) -> Batch:
    """Random tokens in random documents, the last label of each ignored."""
    draw = np.random.default_rng(step)
    tokens = draw.integers(0, 64, (ROWS, length + 1)).astype(np.int32)
    labels, begins = tokens[:, 1:].copy(), []
    for row in range(ROWS):
        cuts = np.sort(draw.choice(np.arange(1, length), size=int(draw.integers(0, 4)), replace=False))
        labels[row, cuts - 1] = IGNORE
        begins += [row * length, *(row * length + cuts)]
    return Batch(tokens[:, :-1].copy(), labels, np.array([*begins, ROWS * length], np.int32), 0, step)


def whole(tensor: torch.Tensor) -> np.ndarray:
    """All of a tensor, gathered where it is sharded, in memory of its own."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return np.array(found.detach().numpy())
