"""A scaled-down model and layout of the recipe, which a few local processes train on CPUs within seconds, as ranks of one check."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from lmworks.host import machine
from lmworks.optim.optimizer import Updates
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.units import Tokens
from lmworks.shards.batch import IGNORE, Batch
from lmworks.train.build import with_optimizer
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
    types = tuple(dict.fromkeys(model.layer_types)) if len({*model.layer_types}) > 1 or model.mixers else ()
    changes: dict[str, object] = {
        "vocab_size": vocab_size, "hidden_size": hidden_size, "num_hidden_layers": max(4, len(types)), "num_attention_heads": HEADS,
        "intermediate_size": 48,
        "num_key_value_heads": HEADS if model.num_key_value_heads == model.num_attention_heads else 2, "head_dim": head_dim,
        "initializer_range": 0.1,
        "residual_dropout": 0.0, "attention_dropout": 0.0,
        "no_rope_layer_interval": min(model.no_rope_layer_interval, 2),
        "sliding_window": Tokens(8) if model.sliding_window else None,
        "layer_types": types,
    }  # fmt: skip
    if model.moe is not None:
        groups = {"n_group": 4, "topk_group": 2} if model.moe.n_group > 1 else {}
        sizes = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": min(model.moe.first_k_dense_replace, 1),
        }
        latent = {"moe_latent_size": 16} if model.moe.moe_latent_size else {}
        changes["moe"] = model.moe.model_copy(update=sizes | groups | latent)
    if model.mla is not None:
        sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
        changes["mla"] = model.mla.model_copy(update=sizes | ({"q_lora_rank": 16} if model.mla.q_lora_rank else {}))
        changes |= {"head_dim": 12, "num_key_value_heads": HEADS}
    if model.gated_delta is not None:
        sizes = {"num_key_heads": 2, "num_value_heads": HEADS, "key_head_dim": 8, "value_head_dim": 8}
        changes["gated_delta"] = model.gated_delta.model_copy(update=sizes)
    if model.mamba is not None:
        groups = {name: min(getattr(model.mamba, name), 2) for name in ("n_groups", "norm_groups")}
        changes["mamba"] = model.mamba.model_copy(update={"num_heads": HEADS, "head_dim": 8, "state_size": 8} | groups)
    if model.mtp is not None:
        changes["mtp"] = model.mtp.model_copy(update={"num_nextn_predict_layers": 1})
    train = recipe.train.model_copy(update={"precision": precision, "compile": False, "micro_batch_sequences": 1, "deepspeed": None})
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
        model, optimizer, batch.rows(*model.rank_sequences(ROWS)), sequences=ROWS, valid_tokens=batch.valid_tokens, micro_batch_size=1,
        lr_factor=1.0, max_grad_norm=recipe.optimizer.max_grad_norm, bias_update_rate=0.01,
    )  # fmt: skip


def state_of(model: ParallelModel, optimizer: Updates, values: bool = True) -> dict[str, Any]:
    """What a checkpoint has of the model; without `values`, what one is loaded into."""
    return {"model": model.state_dict(values), "optimizer": optimizer.state_dict(values)}


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


_TIMEOUT = 180  # seconds


class LostRank(RuntimeError):
    """A rank failed or did not respond."""


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run `function(*args)` on each rank of a new gloo process group (a single rank has none); returns the results of all ranks.

    `function` must be importable, and its result must consist of arrays and plain values. Raises `Lost` with the last message of a rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers, processes = start_ranks(function, ranks, Path(folder) / "store", *args)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + _TIMEOUT
        try:
            while len(found) < ranks:
                try:
                    rank, value, failure = answers.get(timeout=1)
                except queue.Empty:
                    _require_alive(found, processes, deadline)
                    continue
                if failure:
                    raise LostRank(f"rank {rank}: {failure.strip().splitlines()[-1]}")
                found[rank] = value
        finally:
            end_ranks(processes)
    return [found[rank] for rank in range(ranks)]


def _require_alive(found: dict[int, Any], processes: list[BaseProcess], deadline: float) -> None:
    """Raise `Lost` for a rank that has exited or has not responded in time."""
    waited = [rank for rank in range(len(processes)) if rank not in found]
    for rank in waited:
        if processes[rank].exitcode:
            raise LostRank(f"rank {rank} ended with code {processes[rank].exitcode}")
    if time.monotonic() > deadline:
        raise LostRank(f"ranks {waited} did not answer in {_TIMEOUT} s")


def start_ranks(function: Callable[..., Any], ranks: int, store: Path, *args: Any) -> tuple[Any, list[BaseProcess]]:
    """Start the ranks; returns the queue of their answers (rank, value, failure) and the processes.

    They are forks of one process that has imported what they need and holds nothing else: importing torch takes seconds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, "torch._dynamo"])  # has an effect before the first start only
    answers = context.Queue()
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        process = context.Process(target=_rank, args=(function, rank, ranks, str(store), answers, args), daemon=True)
        process.start()
        processes.append(process)
    return answers, processes


def end_ranks(processes: list[BaseProcess]) -> None:
    """Kill the remaining processes."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _rank(function: Callable[..., Any], rank: int, ranks: int, store: str, answers: Any, args: tuple[Any, ...]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # remarks of libraries; what goes wrong is answered
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what the run itself uses stays free
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", machine.RANKS_HERE):  # of the launch around us
        os.environ.pop(name, None)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if ranks > 1:
            patience = timedelta(seconds=_TIMEOUT)
            dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=patience)
        answers.put((rank, function(*args), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
