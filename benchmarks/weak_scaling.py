"""What the parallel layer itself costs: two gloo ranks of one thread each, beside plain DDP and plain FSDP2 on the same model and tokens.

    python benchmarks/weak_scaling.py [--rows 8] [--accumulation 1 4] [--rounds 7] [--compile]

The model is `glm-tiny` (`--dense`: its layers without experts), and each rank reads `--rows` rows of 512 tokens a step,
in as many micro-batches as `--accumulation` says. A step is forward, backward, clipping and AdamW (fused), fp32. Peers are what
torch's tutorials write: DDP with `no_sync` until the last micro-batch; FSDP2 with `fully_shard` on every layer and the whole, which gathers
and reduces in every micro-batch; and FSDP2 told to keep weights and gradients whole until the last one. Ours is `train_step` with
`layout.zero` 0, 3 and 1, which do the same, and with it loss and balancing counts over all ranks and the guard against steps that are not
finite. `alone` is the plain loop on two ranks that do not talk. Muon is listed without a peer.

Arms take turns round by round, another one first each time; a time is that of the slower rank, a ratio the median over rounds of two times
of one round. Bar: at most 1.05 of the peer. CPU time is that of both ranks with all their threads, and tells something on a busy machine.
The losses of all arms must agree at the end, or nothing was compared.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.optim import build_optimizer
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel, micro_batches
from lmworks.parallel.parallelize import build
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.step import train_step

LENGTH, RATE, CLIP = 512, 1e-3, 1.0
MODEL: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 704, "attention_bias": True,
    "use_qk_norm": True, "rope": {"partial_rotary_factor": 0.5}, "max_position_embeddings": "512 tokens",
}  # fmt: skip
MOE = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "first_k_dense_replace": 1}
PEERS = {"lmworks, zero 0": "DDP", "lmworks, zero 3": "FSDP2", "lmworks, zero 1": "FSDP2, kept whole"}

Step = Callable[[Batch, int, int], float]  # this rank's rows of a step, rows in a micro-batch, micro-batches -> mean loss of this rank


def recipe(dense: bool, compiled: bool, kind: str) -> Recipe:
    optimizer = {"kind": kind, "learning_rate": RATE, "adam_learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": CLIP}
    train = {"precision": "fp32", "compile": compiled, "logit_chunk_tokens": "256 tokens"}
    model = MODEL | ({} if dense else {"moe": MOE})
    return Recipe.model_validate({"name": "weak-scaling", "seed": 1, "model": model, "optimizer": optimizer, "train": train})


def ours(what: Recipe, ranks: Ranks) -> Step:
    """A step as the trainer makes it."""
    model = ParallelModel(build(what, ranks, torch.device("cpu")), ranks)
    optimizer = build_optimizer(model, what.optimizer, what.model.num_hidden_layers, ranks.process_groups())
    model.train()

    def step(batch: Batch, rows: int, count: int) -> float:
        result = train_step(
            model, optimizer, batch, sequences=rows * count * ranks.world, valid_tokens=batch.valid_tokens * ranks.world,
            micro_batch_size=rows, lr_factor=1.0, max_grad_norm=CLIP, bias_update_rate=0.0,
        )  # fmt: skip
        return float(result.loss)

    return step


class WithLoss(nn.Module):
    """The model as wrappers want it: its forward returns the loss."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.model.loss(tokens, labels, cu_seqlens).total


def theirs(what: Recipe, kind: str) -> Step:
    """A step as a plain loop makes it."""
    model = initialize(Transformer(what.model), what.seed)
    model.logit_chunk_size = int(what.train.logit_chunk_tokens)
    if what.train.compile:
        model.compile(dynamic=False)
    wrapped: Any = WithLoss(model.train())
    if kind == "DDP":
        wrapped = DistributedDataParallel(wrapped)
    elif kind != "alone":
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=kind == "FSDP2")
        fully_shard(wrapped, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=RATE, betas=what.optimizer.betas, weight_decay=0.0, fused=True)

    def step(batch: Batch, rows: int, count: int) -> float:
        optimizer.zero_grad()
        total = torch.zeros(())
        for index, (piece, _) in enumerate(micro_batches(batch, count, rows)):
            last = index == count - 1
            if kind == "FSDP2, kept whole":
                wrapped.set_requires_gradient_sync(last)
                wrapped.set_reshard_after_backward(last)
            with wrapped.no_sync() if kind == "DDP" and not last else nullcontext():
                loss = wrapped(*(torch.from_numpy(array) for array in (piece.tokens, piece.labels, piece.cu_seqlens)))
                (loss / batch.valid_tokens).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        return float(total) / batch.valid_tokens

    return step


def batch_of(rank: int, rows: int) -> Batch:
    tokens = np.random.default_rng(rank).integers(0, MODEL["vocab_size"], (rows, LENGTH + 1), dtype=np.int32)
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(0, rows * LENGTH + 1, LENGTH, dtype=np.int32), 0, 0)


@dataclass
class Times:
    """Of one arm, by round: seconds of the slower rank, CPU seconds of both; and the ranks' mean loss in the last one."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    loss: float = 0.0


def measure(arms: dict[str, Step], batch: Batch, rows: int, count: int, rounds: int) -> dict[str, Times]:
    """By arm; two steps of warm-up are left out."""
    found = {name: Times() for name in arms}
    names = list(arms)
    for turn in range(rounds + 2):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            loss = arms[name](batch, rows, count)
            took, sums = torch.tensor(time.perf_counter() - began), torch.tensor([time.process_time() - cpu, loss])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            dist.all_reduce(sums)
            if turn > 1:
                found[name].seconds.append(took.item())
                found[name].cpu.append(sums[0].item())
            found[name].loss = sums[1].item() / dist.get_world_size()
    return found


def rank(number: int, options: argparse.Namespace, store: str) -> None:
    """Measure every arm as the number-th of two ranks; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=number, world_size=2)
    adamw = recipe(options.dense, options.compile, "adamw")
    for count in options.accumulation:
        arms: dict[str, Step] = {peer: theirs(adamw, peer) for peer in ("alone", *PEERS.values())}
        arms |= {name: ours(adamw, Ranks(Layout(dp_shard=2, zero=int(name[-1])))) for name in PEERS}
        arms["lmworks, zero 1, Muon"] = ours(recipe(options.dense, options.compile, "muon"), Ranks(Layout(dp_shard=2, zero=1)))
        found = measure(arms, batch_of(number, options.rows), options.rows // count, count, options.rounds)
        if number == 0:
            report(found, count)
    dist.destroy_process_group()


def report(found: dict[str, Times], count: int) -> None:
    """Print the table of one accumulation, and refuse arms that have not done the same."""
    print(f"\n{count} micro-batches a step\n| arm | milliseconds | of its peer | CPU, of its peer | of alone |\n|---|---|---|---|---|")
    for name, times in found.items():
        peer = found.get(PEERS.get(name, ""))
        of_peer = f"{ratio(times.seconds, peer.seconds):.3f} | {ratio(times.cpu, peer.cpu):.3f}" if peer else " | "
        of_alone = ratio(times.seconds, found["alone"].seconds)
        print(f"| {name} | {1000 * statistics.median(times.seconds):.0f} | {of_peer} | {of_alone:.2f} |", flush=True)
    losses = {name: times.loss for name, times in found.items() if "Muon" not in name and name != "alone"}
    assert all(math.isclose(loss, losses["DDP"], rel_tol=1e-3) for loss in losses.values()), f"the arms have not trained the same: {losses}"


def ratio(times: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="of a rank in a step")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dense", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (options, str(Path(folder) / "store")), nprocs=2)


if __name__ == "__main__":
    main()
