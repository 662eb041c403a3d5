"""Training speed on a CPU: lmworks against `transformers` in a plain PyTorch loop, on the same shape and the same tokens.

    python benchmarks/train_cpu.py [--shape moe|dense|both] [--steps 6]

Peers (`train_cpu_peer.py`): Glm4Moe (experts by grouped_mm, its best setting on CPU, and SDPA) and Qwen3, fused AdamW, gradient
clipping; once eager and once under torch.compile; in bf16 autocast, or in fp32 on a processor without bf16 products, where that is 2.5
times as fast or more. lmworks: the precision that `auto` takes, Muon as in the quickstart (AdamW beside it), compiled layers. All arms see
the same random tokens without document boundaries, forward, backward, clip and update.

Each arm is a process of its own, as its users have it: lmworks sets how memory is freed and how threads wait, and a peer's user does not.
The last arm is the compiled peer with those settings, which says how much of the difference is theirs. Arms take turns step by step, so
that all of them meet the same noise; times are medians, and ratios are of medians. The peak is the fastest matrix product measured in
this process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
import numpy as np
import torch

from lmworks.host.devices import dtype_for, has_bf16
from lmworks.host.machine import keep_freed_memory
from lmworks.metrics.system import measure_peak
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.optim import build_optimizer
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.plan.counts import flops_per_token
from lmworks.recipe.families.registry import class_for, to_config
from lmworks.recipe.schema.model import Model, Moe, Rope
from lmworks.recipe.schema.train import Optimizer
from lmworks.shards.batch import Batch
from lmworks.train.step import train_step

LENGTH, ROWS = 512, 16
SHAPES = {
    "moe": Model(
        vocab_size=4096, hidden_size=256, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=704, attention_bias=True, use_qk_norm=True,
        rope=Rope(partial_rotary_factor=0.5), moe=Moe(n_routed_experts=16, num_experts_per_tok=2, moe_intermediate_size=192,
        first_k_dense_replace=1), max_position_embeddings="512 tokens",
    ),
    "dense": Model(
        vocab_size=4096, hidden_size=512, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        intermediate_size=1408, use_qk_norm=True, max_position_embeddings="512 tokens",
    ),
}  # fmt: skip


OWN_SETTINGS = ("OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE")
GLIBC_KEEPS = {"MALLOC_MMAP_THRESHOLD_": str((1 << 31) - 1), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}  # `keep_freed_memory`


def serve_ours(config: Model, kind: str) -> None:
    """Answer each line of standard input with the seconds of a step of lmworks, as `train_cpu_peer.py` does with its own."""
    keep_freed_memory()  # as the trainer does
    model = initialize(Transformer(config), 1)
    model.compute_dtype, model.logit_chunk_size = dtype_for("auto", torch.device("cpu")), 256  # as in the quickstart
    model.train()
    model.compile(dynamic=False)
    optimizer = build_optimizer(model, Optimizer(kind=kind, learning_rate=1e-3, adam_learning_rate=1e-3))  # type: ignore[arg-type]
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (ROWS, LENGTH + 1), dtype=np.int32)
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=np.int32), 0, 0)
    parallel = ParallelModel([model])
    for _ in sys.stdin:
        began = time.perf_counter()
        train_step(parallel, optimizer, batch, micro_batch_size=ROWS, lr_factor=1.0, max_grad_norm=1.0, bias_update_rate=0.001)
        print(time.perf_counter() - began, flush=True)


class Arm:
    """A process that does one step when it is asked."""

    def __init__(self, command: list[str], environment: dict[str, str], first_line: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", env=environment
        )
        assert self.process.stdin is not None
        self.process.stdin.write(first_line)

    def step(self) -> float:
        """Its seconds."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def arms_of(shape: str, with_compiled_peer: bool) -> dict[str, Arm]:
    config, here = SHAPES[shape], Path(__file__)
    plain = {name: value for name, value in os.environ.items() if name not in OWN_SETTINGS}
    arms = {
        f"lmworks ({name})": Arm([str(here), "--shape", shape, "--arm", kind], dict(os.environ))
        for name, kind in (("Muon", "muon"), ("AdamW", "adamw"))
    }
    peer = class_for(config)
    autocast = has_bf16(torch.device("cpu"))
    about = {
        "kind": peer, "config": to_config(config, config.rope, {"eos_token_id": 0, "pad_token_id": 0}), "autocast": autocast, "rows": ROWS,
        "length": LENGTH, "vocabulary": config.vocab_size, "experts": config.moe is not None, "seed": 1,
    }  # fmt: skip
    peers = [("eager", False, plain)]
    if with_compiled_peer:
        peers += [("compiled", True, plain), ("compiled, with lmworks' settings", True, dict(os.environ) | GLIBC_KEEPS)]
    for how, compiled, environment in peers:
        name = f"{peer.removesuffix('ForCausalLM')} {how}, {'bf16 autocast' if autocast else 'fp32'}"
        arms[name] = Arm([str(here.with_name("train_cpu_peer.py"))], environment, json.dumps(about | {"compiled": compiled}) + "\n")
    return arms


def measure(arms: dict[str, Arm], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm's steps; two steps of warm-up, then rounds in turn."""
    for arm in arms.values():
        arm.step()
        arm.step()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            seconds[name].append(arm.step())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-compiled-peer", action="store_true", help="leave the compiled peer out: it takes minutes to compile")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--arm", choices=("muon", "adamw"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        serve_ours(SHAPES[arguments.shape], arguments.arm)
        return
    peak = measure_peak(3.0)
    for shape in SHAPES if arguments.shape == "both" else [arguments.shape]:
        config = SHAPES[shape]
        arms = arms_of(shape, not arguments.no_compiled_peer)
        seconds = measure(arms, arguments.steps)
        for arm in arms.values():
            arm.process.kill()
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        operations = flops_per_token(config, LENGTH).total * ROWS * LENGTH
        rows = {
            name: {
                "tokens_per_second": ROWS * LENGTH / time_,
                "fastest_tokens_per_second": ROWS * LENGTH / min(seconds[name]),
                "share_of_peak": operations / time_ / peak,
                "lmworks_is_faster_by": time_ / medians["lmworks (Muon)"],
                "with_adamw_by": time_ / medians["lmworks (AdamW)"],
            }
            for name, time_ in medians.items()
        }
        if arguments.json:
            print(json.dumps({"shape": shape, "peak_gflops": peak / 1e9, "arms": rows}))
            continue
        size = sum(p.numel() for p in Transformer(config).parameters()) / 1e6
        print(f"\n{shape}: {size:.1f}M parameters, batch of {ROWS} x {LENGTH}, peak {peak / 1e9:,.0f} GFLOP/s")
        print("| arm | tokens/s (median) | fastest | share of peak | Muon is faster by | AdamW by |\n|---|---|---|---|---|---|")
        for name, row in rows.items():
            print(
                f"| {name} | {row['tokens_per_second']:,.0f} | {row['fastest_tokens_per_second']:,.0f} | "
                f"{100 * row['share_of_peak']:.0f}% | {row['lmworks_is_faster_by']:.2f} | {row['with_adamw_by']:.2f} |"
            )


if __name__ == "__main__":
    main()
