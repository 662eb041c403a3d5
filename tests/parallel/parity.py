"""The same steps on one rank and on many: what the tests of every layout compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from torch.distributed.tensor import DTensor

from lmworks.model.init import normal_part
from lmworks.optim.clip import LossScaler
from lmworks.optim.optimizer import Updates, build_optimizer
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build, local_shard
from lmworks.preflight.layouts import BF16_OF_LOSS, BF16_OF_NORM, BF16_SLACK, worst_error
from lmworks.preflight.small_model import LONGER
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.model import Lora
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE, Batch, one_hot
from lmworks.train.step import StepResult, train_step
from small_config import small_config

_COMMON: dict[str, Any] = small_config(num_hidden_layers=4) | {
    "attention_bias": True,
    "use_qk_norm": True, "rope": {"partial_rotary_factor": 0.5}, "z_loss_weight": 1e-3, "initializer_range": 0.1,
}  # fmt: skip
_MOE = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "balance": {"bias_update_rate": 0.01, "sequence_aux_loss_weight": 0.3},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": _COMMON,
    "tied": _COMMON | {"tie_word_embeddings": True, "no_rope_layer_interval": 2, "sliding_window": "8 tokens",
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "moe": _COMMON | {"moe": _MOE},
    "mla": {key: value for key, value in _COMMON.items() if key not in ("head_dim", "use_qk_norm", "attention_bias", "num_key_value_heads",
    "rope")} | {
        "moe": _MOE | {"n_group": 4, "topk_group": 2}, "num_key_value_heads": 4, "head_dim": 12,
        "mla": {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    },
    "aux": _COMMON | {"moe": _MOE | {"balance": {"method": "aux", "aux_loss_weight": 0.5, "sequence_aux_loss_weight": 0.3}}},
    "sinkhorn": _COMMON | {"moe": _MOE | {"balance": {"method": "sinkhorn", "sequence_aux_loss_weight": 0.0}}},
    "post_norm": _COMMON | {"attention_bias": False, "rope": {}, "norm_position": "post", "qk_norm_over": "all_heads"},
    "hybrid": _COMMON | {
        "layer_types": ["hybrid"], "mamba": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 2, "norm_groups": 2},
        "multipliers": {"embedding": 1.5, "key": 0.75, "attention_in": 0.5, "gate": 1.25, "mamba_out": 0.75},
    },
    "mamba": _COMMON | {
        "attention_bias": False, "use_qk_norm": False, "rope": {"partial_rotary_factor": 0.0},
        "layer_types": ["linear_attention", "full_attention"],
        "mamba": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "norm_groups": 2},
        "moe": _MOE | {"n_shared_experts": 2, "first_k_dense_replace": 0, "scoring_func": "softmax", "routed_scaling_factor": 1.0},
        "multipliers": {"embedding": 1.5, "key": 0.75, "attention_out": 0.5, "mamba_out": 0.5, "ffn_out": 0.5, "logits": 0.75},
    },
    "mamba_alone": _COMMON | {
        "num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": False, "use_qk_norm": False,
        "layer_types": ["linear_attention"],
        "mamba": {"num_heads": 4, "head_dim": 12, "state_size": 6, "n_groups": 1, "conv_bias": False, "gate_norm": "before_gate"},
        "multipliers": {"mamba_in": 0.75, "mamba_parts": [1.5, 0.75, 1.25, 0.5, 2.0], "mamba_out": 0.5},
    },
    "mamba_pairs": _COMMON | {
        "num_key_value_heads": 4, "layer_types": ["hybrid", "linear_attention", "full_attention"], "use_qk_norm": False,
        "mamba": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
        "multipliers": {"key": 0.75, "attention_in": 0.5, "mamba_parts": [1.5, 0.75, 1.25, 0.5, 2.0]},
    },
    "lightning": _COMMON | {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"], "moe": _MOE, "lightning": {},
        "norm_position": "stream", "multipliers": {"lightning_stream": 0.75, "ffn_out": 0.5},
    },
    "conv": _COMMON | {
        "num_attention_heads": 4, "attention_bias": False, "rope": {}, "layer_types": ["conv", "conv", "full_attention"], "short_conv": {},
        "moe": _MOE | {"n_shared_experts": 0},
    },
    "delta": _COMMON | {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "moe": _MOE | {"shared_expert_gate": True}, "attn_output_gate": True,
        "gated_delta": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6},
    },
    "moe_blocks": _COMMON | {
        "hidden_act": "relu2", "rope": {"partial_rotary_factor": 0.0}, "layer_types": ["full_attention", "moe", "full_attention", "mlp"],
        "moe": _MOE | {"n_shared_experts": 2, "first_k_dense_replace": 0, "moe_latent_size": 12},
    },
    "moe_mamba_blocks": _COMMON | {
        "hidden_act": "relu2", "attention_bias": False, "use_qk_norm": False, "rope": {"partial_rotary_factor": 0.0},
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "norm_groups": 2, "min_time_step": 0.01},
        "moe": _MOE | {"n_shared_experts": 2, "first_k_dense_replace": 0},
    },
    "gemma": _COMMON | {
        "attention_bias": False, "norm_position": "both", "hidden_act": "gelu_tanh", "scale_embeddings": True, "query_pre_attn_scalar": 20,
        "sliding_window": "8 tokens", "layer_types": ["sliding_attention", "full_attention"],
        "sliding_rope": {"theta": 300.0, "partial_rotary_factor": 0.5},
    },
    "sinks": _COMMON | {
        "use_qk_norm": False, "rope": {}, "attention_output_bias": True, "attention_sinks": True, "sliding_window": "8 tokens",
        "layer_types": ["sliding_attention", "full_attention"],
        "moe": _MOE | {"n_shared_experts": 0, "first_k_dense_replace": 0, "scoring_func": "softmax", "add_bias": True,
                       "swiglu_alpha": 1.702, "swiglu_limit": 0.1},
    },
    "mtp": _COMMON | {"moe": _MOE, "mtp": {"num_nextn_predict_layers": 1, "loss_weight": 0.3}},
}  # fmt: skip
THRESHOLDS = {"clip": 1.0, "clip_alone": 1.0, "clip_latent": 0.1}  # of QK-clip: some heads of the kind are above, and some below
MODELS["clip"] = MODELS["mtp"] | {"use_qk_norm": False}
MODELS["clip_alone"] = MODELS["clip"] | {"num_key_value_heads": 4}
MODELS["clip_latent"] = MODELS["mla"]
STEPS, ROWS, LENGTH = 2, 8, 24  # the second has all that the first leaves: moments, biases of experts, gathered parameters
CLIP = 0.5  # of the norm of the gradients, which is larger
OF_FP16 = 2**-3  # the unit roundoff of fp16, whose significand has 11 bits, relative to that of bf16, which has 8


@dataclass
class Trained:
    """What came out, by name, whole: losses of the steps, gradients of the first step, weights and buffers after the last."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    counts: np.ndarray | None
    extras: list[float]


def recipe_of(kind: str, **train: Any) -> Recipe:
    tree = {
        "name": "parity", "model": MODELS[kind], "train": {"precision": "fp32", "compile": False, **train},
        "optimizer": {"learning_rate": 0.02, "adam_learning_rate": 0.02, "weight_decay": 0.1, "max_grad_norm": CLIP, "eps": 1e-4}
        | ({"qk_clip_threshold": THRESHOLDS[kind]} if kind in THRESHOLDS else {}),
    }  # fmt: skip
    return Recipe.model_validate(tree)


def model_of(kind: str, ranks: Ranks) -> tuple[ParallelModel, Lora | None]:
    """The model of a kind in evaluation mode; "lora-" before its name gives it adapters, which change what it computes."""
    targets = ("all-linear", "experts") if "moe" in kind else ("all-linear",)
    lora = Lora(rank=2, alpha=4, targets=targets) if kind.startswith("lora-") else None
    model = ParallelModel(build(recipe_of(kind.removeprefix("lora-")), ranks, torch.device("cpu"), lora), ranks)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                parameter.fill_(0.05)
    return model, lora


def batch_of(step: int, rows: int = ROWS, length: int = LENGTH) -> Batch:
    """Random documents of random lengths; the last label of each is ignored, and some rows have hardly a label. Of three sources, and a
    row of none."""
    draw = np.random.default_rng(step)
    tokens = draw.integers(0, 64, (rows, length + 1)).astype(np.int32)
    labels = tokens[:, 1:].copy()
    labels[rows // 2, 3:] = IGNORE
    begins = []
    for row in range(rows):
        cuts = np.sort(draw.choice(np.arange(1, length), size=int(draw.integers(0, 4)), replace=False))
        labels[row, cuts - 1] = IGNORE
        begins += [row * length, *(row * length + cuts)]
    sources = one_hot([-1 if row == 3 else row % 3 for row in range(rows)], 3)
    return Batch(tokens[:, :-1].copy(), labels, np.array([*begins, rows * length], np.int32), 0, step, sources=sources)


def train(
    layout: dict[str, Any], kind: str, micro_batch_size: int | None = None, rows: int = ROWS, length: int = LENGTH,
    lora: Lora | None = None, **options: Any,
) -> Trained:  # fmt: skip
    """Some steps on this rank of a layout (or alone); every rank returns the whole tensors of its pipeline stages. Adapters begin with a
    B that is not 0, so that A has a gradient in the first step. Micro-batches have half of a rank's rows, and one row in a pipeline."""
    recipe = recipe_of(kind, **options)
    ranks = Ranks(Layout(**layout))
    if micro_batch_size is None:
        own = rows // (ranks.layout.dp_replicate * ranks.layout.dp_shard)
        micro_batch_size = max(1, own // 2) if ranks.layout.pp == 1 else 1
    model = ParallelModel(build(recipe, ranks, torch.device("cpu"), lora), ranks)
    for name, parameter in model.named_parameters():
        if name.endswith("lora.B"):
            here, begins = local_shard(parameter.detach())
            if here.numel():
                here.copy_(normal_part(7, name, parameter.shape, begins, here.shape) * 0.2)
    chosen = recipe.optimizer if lora is None else recipe.optimizer.model_copy(update={"eps": 0.01})  # all is Adam's, whose division rounds
    optimizer = build_optimizer(model, chosen)  # type: ignore[arg-type]
    scaler = LossScaler() if recipe.train.precision == "fp16" else None
    model.train()
    losses, norms, extras, grads, counts = [], [], [], {}, None
    for step in range(STEPS):
        result = step_of(model, optimizer, batch_of(step, rows, length), scaler, micro_batch_size)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
        extras += [float(value) for value in (result.z_loss, result.auxiliary_loss, result.mtp_loss) if value is not None]
        extras += [] if result.sources_S is None else result.sources_S.tolist()
        extras += [] if result.logits_AH is None else result.logits_AH.flatten().tolist()
        if step == 0:
            grads = {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}
        counts = result.counts_LE
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    return Trained(losses, norms, grads, weights, None if counts is None else counts.numpy(), extras)


def step_of(model: ParallelModel, optimizer: Updates, batch: Batch, scaler: LossScaler | None, micro_batch_size: int = 1) -> StepResult:
    """One step on this rank's sequences of `batch`."""
    rows = len(batch.tokens)
    return train_step(
        model, optimizer, batch.rows(*model.rank_sequences(rows)), sequences=rows, valid_tokens=batch.valid_tokens, scaler=scaler,
        micro_batch_size=micro_batch_size, lr_factor=1.0, max_grad_norm=CLIP, bias_update_rate=0.01,
    )  # fmt: skip


@cache
def alone(kind: str, micro_batch_size: int | None = None, rows: int = ROWS, length: int = LENGTH, precision: str = "fp32") -> Trained:
    """The same steps in one process, once for all tests that compare with it."""
    return train({}, kind, micro_batch_size, rows, length, precision=precision)


def train_16bit(layout: dict[str, Any], kind: str, precision: str = "bf16") -> Trained:
    """The steps that `compare_16bit` compares, on this rank."""
    return train(layout, kind, length=LONGER, precision=precision)


def alone_16bit(kind: str, precision: str = "bf16") -> tuple[Trained, Trained]:
    """One process in fp32, and one in a precision of 16 bits."""
    return alone(kind, length=LONGER), alone(kind, length=LONGER, precision=precision)


def whole(tensor: torch.Tensor) -> np.ndarray:
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().numpy().copy()


def hashes(state: Mapping[str, Any]) -> dict[str, str]:
    """A hash of the bits of each whole tensor."""
    return {name: blake3(np.ascontiguousarray(whole(value)).tobytes()).hexdigest() for name, value in state.items()}


def compare(expected: Trained, found: list[Trained], tolerance: float = 1e-5, of_update: float = 2e-3) -> None:
    """Every rank's copy of everything against one process, both in fp32 throughout, whatever the processor multiplies.

    Losses within `tolerance` of their size, gradients within `tolerance` of the largest in their tensor: fp32 sums in another order
    differ by some 1e-6. A weight moves by about the rate (0.02) a step; Newton-Schulz blows up the rounding of small singular values, so
    that weights may differ by `of_update` of that (Adam's division would do worse: eps is 1e-4 here). A wrong sign or a missing sum is
    off by 1, a doubled count by 0.5.
    """
    _all_there(expected, found)
    for one in found:
        np.testing.assert_allclose(one.losses, expected.losses, rtol=tolerance)
        np.testing.assert_allclose(one.norms, expected.norms, rtol=tolerance)
        np.testing.assert_allclose(one.extras, expected.extras, rtol=10 * tolerance)
        if expected.counts is not None:
            np.testing.assert_array_equal(one.counts, expected.counts)
        for name, grad in one.grads.items():
            whole = expected.grads[name]
            np.testing.assert_allclose(grad, whole, rtol=0, atol=tolerance * np.abs(whole).max(), err_msg=f"gradient of {name}")
        for name, weight in one.weights.items():
            np.testing.assert_allclose(weight, expected.weights[name], rtol=0, atol=of_update * 0.02, err_msg=name)


def compare_16bit(exact: Trained, one: Trained, found: list[Trained], roundoff: float = 1.0) -> None:
    """Every rank in 16 bits against one process in 16 bits (`one`), measured from one process in fp32 (`exact`) as `rounding` explains.

    The norm of the gradients is that of the gradients themselves in any precision. `roundoff` is relative to that of bf16: `OF_FP16` for
    fp16.
    """
    _all_there(exact, found)
    for trained in found:
        np.testing.assert_allclose(trained.losses, exact.losses, rtol=roundoff * BF16_OF_LOSS)
        np.testing.assert_allclose(trained.norms[:1], exact.norms[:1], rtol=roundoff * BF16_OF_NORM)
        np.testing.assert_allclose(trained.extras, exact.extras, rtol=roundoff * BF16_OF_NORM)
        if exact.counts is not None and one.counts is not None and trained.counts is not None:
            moved = np.abs(one.counts - exact.counts).sum()
            assert np.abs(trained.counts - exact.counts).sum() <= BF16_SLACK * moved, "tokens per expert"
        for kind in ("grads", "weights"):
            times, name = worst_error(getattr(exact, kind), getattr(one, kind), getattr(trained, kind))
            assert times <= BF16_SLACK, f"{kind} of {name}: {times:.1f} times the error of one process"


def _all_there(expected: Trained, found: list[Trained]) -> None:
    """The ranks together have every tensor, and the norm of the gradients is that of the gradients which they have."""
    grads = {name: grad for one in found for name, grad in one.grads.items()}
    assert grads.keys() == expected.grads.keys()
    assert {name for one in found for name in one.weights} == expected.weights.keys()
    norm = sum(float(np.square(grad.astype(np.float64)).sum()) for grad in grads.values()) ** 0.5
    for one in found:
        assert norm == pytest.approx(min(one.norms[0], CLIP), rel=1e-5), "the norm of the gradients is not that of the gradients"
