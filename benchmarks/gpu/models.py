"""Models, batches and clocks that the checks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo
from gpu.runner import Row
from torch import Tensor, nn

from lmworks.metrics.system import reset_memory_peak
from lmworks.optim.optimizer import Optimizer, Updates, build_optimizer
from lmworks.parallel import parallelize
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import IGNORE, Batch
from lmworks.train.step import StepResult, train_step

PHASES = "train.phases=[{{name: a, tokens: 1B, sequence_length: {0}, global_batch_tokens: {1}, mixture: {{web: 1.0}}}}]"
TINY = ["model={hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, "
        "intermediate_size: 128}", "tokenizer.vocab_size=512"]  # fmt: skip
DENSE_30M = ["model.preset=dense-30m", "tokenizer.vocab_size=8192"]
DENSE_125M = ["model.preset=dense-125m"]
WIDTH_8B = ["model={hidden_size: 4096, num_hidden_layers: 8, num_attention_heads: 32, num_key_value_heads: 8, head_dim: 128, "
            "intermediate_size: 14336}", "tokenizer.vocab_size=32768"]  # fmt: skip
"""Eight layers of an 8B model."""
WIDTH_7B = ["model={hidden_size: 4096, num_hidden_layers: 32, num_attention_heads: 32, num_key_value_heads: 32, head_dim: 128, "
            "intermediate_size: 11008}", "tokenizer.vocab_size=32768"]  # fmt: skip
"""A 7B model (Llama 2)."""
TINY_MOE = [
    "model={hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, intermediate_size: 128, "
    "moe: {n_routed_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 32, first_k_dense_replace: 1}}",
    "tokenizer.vocab_size=512",
]
MOE = [
    "model={hidden_size: 512, num_hidden_layers: 6, num_attention_heads: 8, num_key_value_heads: 2, head_dim: 64, intermediate_size: 1408, "
    "moe: {n_routed_experts: 32, num_experts_per_tok: 4, moe_intermediate_size: 352, first_k_dense_replace: 1}}",
    "tokenizer.vocab_size=8192",
]


def the_device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def recipe_of(model: Sequence[str], length: int, rows: int = 1, *more: str) -> Recipe:
    """A recipe with the parts of a model that a user would set, resolved as theirs is. `rows` of `length` tokens are a step."""
    return load_recipe("dense-125m", [*model, PHASES.format(length, rows * length), *more]).recipe


def build(recipe: Recipe, device: torch.device, random_fill: bool = False, ranks: Ranks | None = None) -> tuple[ParallelModel, Optimizer]:
    """A model in training and its optimizer. `random_fill`: weights drawn on the device, whatever their distribution should be, since
    only speed is measured."""
    ranks = ranks or alone()
    with patch.object(parallelize, "initialize", _fill) if random_fill else nullcontext():
        (part,) = parallelize.build(recipe, ranks, device)
    model = ParallelModel([part], ranks)
    model.train()
    return model, build_optimizer(model, recipe.optimizer, process_groups=ranks.process_groups())


@torch.no_grad()
def _fill(part: nn.Module, *_: object) -> nn.Module:
    for parameter in part.parameters():
        parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
    for buffer in part.buffers():
        buffer.zero_()
    return part


def batch_of(recipe: Recipe, rows: int, length: int, documents: int = 1, seed: int = 0) -> Batch:
    """Random tokens in rows of so many documents of different lengths."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, recipe.model.vocab_size, (rows, length), dtype=np.int32)
    starts = [np.append(0, np.sort(draw.choice(np.arange(1, length), documents - 1, replace=False))) + row * length for row in range(rows)]
    cu_seqlens = np.append(np.concatenate(starts), rows * length).astype(np.int32)
    labels = np.roll(tokens, -1, axis=1)
    labels.reshape(-1)[cu_seqlens[1:] - 1] = IGNORE
    return Batch(tokens, labels, cu_seqlens, 0, 0)


def step(model: ParallelModel, optimizer: Updates, batch: Batch, micro_batch: int, lr_factor: float = 1.0, ranks: int = 1) -> StepResult:
    """One step, of which so many ranks have as many rows and tokens as this one."""
    return train_step(
        model, optimizer, batch, micro_batch_size=micro_batch, lr_factor=lr_factor, max_grad_norm=1.0, bias_update_rate=0.001,
        sequences=ranks * len(batch.tokens), valid_tokens=ranks * batch.valid_tokens,
    )  # fmt: skip


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 10, warm: int = 3) -> float:
    """The median time of one call; on a GPU of the device alone."""
    for _ in range(warm):
        work()
    wait(device)
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def times_ms(run: Callable[[], Tensor], inputs: Sequence[Tensor], device: torch.device, rounds: int = 5) -> Row:
    """Milliseconds of a call without gradients, and of one with the gradients of the inputs."""
    with torch.no_grad():
        forward = seconds(run, device, rounds)
        grad = torch.randn_like(run())  # that of a sum has strides of 0, which some kernels refuse and others copy

    def both() -> None:
        torch.autograd.grad(run(), inputs, grad)

    return {"forward_ms": forward * 1e3, "both_ms": seconds(both, device, rounds) * 1e3}


def compiled(run: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """As training runs it on this device."""
    if device.type == "cpu":
        return run
    torch._dynamo.reset()  # there is a limit on the shapes of one function
    return torch.compile(run, dynamic=False)


def error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to that of what was expected; nan counts."""
    wide = expected.detach().double()
    return float((found.detach().to(wide.device).double() - wide).norm() / wide.norm().clamp_min(1e-30))


def fresh_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_memory_peak()
