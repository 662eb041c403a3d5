"""Training steps on fake CUDA tensors, for `on_fake_cuda.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import parity
import pytest
import torch
from host_waits import HostWaits
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _utils

from lmworks.checkpoint.save_plan import local_slice
from lmworks.checkpoint.state import Staging
from lmworks.host import machine
from lmworks.optim.clip import LossScaler
from lmworks.optim.optimizer import build_optimizer
from lmworks.parallel import parallelize
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.recipe.schema.model import Lora
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.observe.long_context import loss_by_position
from lmworks.train.saving import all_finite
from lmworks.train.step import StepResult, train_step
from made_up_ranks import made_up_ranks

DEVICE = torch.device("cuda", 0)


def steps(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What one step of each case does: the report of its host waits, by the name of the case."""
    return {name: step(**case) for name, case in cases.items()}


def step(
    kind: str, *, layout: dict[str, Any] | None = None, length: int = 24, precision: str = "bf16", lora: bool = False,
    weighted: bool = False, optimizer: str = "adamw",
) -> dict[str, Any]:  # fmt: skip
    """The report of one training step of a small model of `parity`, on one micro-batch."""
    recipe = recipe_of(kind, precision, optimizer)
    with ranks_of(Layout(**layout or {})) as ranks:
        model = model_of(recipe, ranks, lora)
        updates = build_optimizer(model, recipe.optimizer)
        scaler = LossScaler(device=DEVICE) if precision == "fp16" else None
        chosen = length * recipe.model.moe.num_experts_per_tok if recipe.model.moe else 0
        sent = chosen // (ranks.size("cp") * ranks.size("ep"))  # rows that this rank sends to each rank of ep, if experts are chosen evenly
        with HostWaits(integer=sent) as seen:
            update(model, updates, batch_of(ranks.size("dp"), length, weighted), scaler)
        return seen.report()


def evaluations(kinds: list[str]) -> dict[str, Any]:
    """The host waits of the passes of validation and of evaluation in the loop, by kind of model; and with the last of them those of the
    losses by position, and of the look at the weights before they are saved."""
    found = {}
    for kind in kinds:
        model = model_of(recipe_of(kind), Ranks(Layout()))
        model.eval()
        with HostWaits() as seen:
            model.summed_cross_entropy_on_device(batch_of(2))
            model.token_cross_entropy_on_device(batch_of(2), 1)
        found[kind] = dict(seen.waits)
    with HostWaits() as seen:
        loss_by_position(model, [batch_of(1, 300)] * 2)
    with HostWaits(boolean=True) as looked:
        assert all_finite(model.parameters())
    return found | {"positions": dict(seen.waits), "weights": dict(looked.waits)}


def saves(machines: list[tuple[float, bool]]) -> list[dict[str, Any]]:
    """What is `staged` on each machine."""
    return [staged(memory, refused) for memory, refused in machines]


def staged(memory: float, refused: bool) -> dict[str, Any]:
    """The bytes that two saves of a state page-lock on a machine with so many bytes of memory, and closing unlocks; and the waits of the
    second one. The system refuses if `refused`."""
    calls: list[list[int]] = []
    found = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: calls.append([at, size]) or int(refused),
        cudaHostUnregister=lambda at: calls.append([at, 0]),
    )  # fmt: skip
    torch.cuda.cudart = lambda: found  # type: ignore[assignment, return-value]
    os.environ[machine.VARIABLE] = f"memory={memory}"
    kinds: list[tuple[tuple[int, ...], torch.dtype]] = [((5, 7), torch.float32), ((), torch.bool)]
    kinds += [((33,), torch.bfloat16), ((3,), torch.int64)]
    state = [torch.zeros(shape, dtype=dtype, device=DEVICE) for shape, dtype in kinds]
    slices = [one for number, tensor in enumerate(state) if (one := local_slice(str(number), tensor))]
    staging = Staging()
    with HostWaits():
        staging.copy(slices)
    with HostWaits() as seen:
        copied = staging.copy(slices)
    kept = [one.values() for one in copied]
    staging.close()
    assert [(one.shape, one.dtype) for one in kept] == kinds and len({at for at, _ in calls}) <= 1
    return {"locked": [size for _, size in calls], "waits": dict(seen.waits)}


def recipe_of(kind: str, precision: str = "bf16", optimizer: str = "adamw") -> Recipe:
    """Two layers, of which the second is sparse where the kind has experts."""
    model = parity.MODELS[kind] | {"num_hidden_layers": 2}
    if "layer_types" in model:
        model["layer_types"] = ["full_attention", "sliding_attention"] if "sliding_window" in model else model["layer_types"][-2:]
    tree = {
        "name": "traced", "model": model, "train": {"precision": precision, "compile": False},
        "optimizer": {"kind": optimizer, "learning_rate": 0.02, "adam_learning_rate": 0.02, "weight_decay": 0.1, "max_grad_norm": 1.0},
    }  # fmt: skip
    return Recipe.model_validate(tree)


def model_of(recipe: Recipe, ranks: Ranks, lora: bool = False) -> ParallelModel:
    targets = ("all-linear", "experts") if recipe.model.moe else ("all-linear",)
    adapters = Lora(rank=2, alpha=4, targets=targets) if lora else None
    parallelize.initialize = lambda *_: None  # fake tensors have no values
    model = ParallelModel(parallelize.build(recipe, ranks, DEVICE, adapters), ranks)
    model.train()
    return model


def batch_of(rows: int, length: int = 24, weighted: bool = False) -> Batch:
    batch = parity.batch_of(0, rows, length)
    return replace(batch, weights=np.ones(batch.tokens.shape, np.float32)) if weighted else batch


def update(model: ParallelModel, optimizer: Any, batch: Batch, scaler: LossScaler | None = None) -> StepResult:
    """One step on this rank's sequences of `batch`, one at a time."""
    rows = len(batch.tokens)
    return train_step(
        model, optimizer, batch.rows(*model.rank_sequences(rows)), sequences=rows, valid_tokens=batch.valid_tokens, scaler=scaler,
        micro_batch_size=1, lr_factor=1.0, max_grad_norm=1.0, bias_update_rate=0.01,
    )  # fmt: skip


@contextmanager
def ranks_of(layout: Layout) -> Iterator[Ranks]:
    """The ranks of a layout: this one, among others that torch's fake process group pretends to be."""
    if world_size(layout) == 1:
        yield Ranks(layout)
        return
    with pytest.MonkeyPatch.context() as patch, made_up_ranks(0, world_size(layout)):
        # torch computes places in a mesh with tensors, and needs their values
        for place, name in ((_utils, "_compute_local_shape_and_global_offset"), (DeviceMesh, "__init__")):
            patch.setattr(place, name, _with_values(getattr(place, name)))
        with unset_fake_temporarily():
            ranks = Ranks(layout, "cuda")
        yield ranks


def _with_values(compute: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*given: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return compute(*given, **options)

    return computed
