"""Training speed on a CPU: lmworks against `transformers` in a plain PyTorch loop, on the same shape and the same tokens.

    python benchmarks/train_cpu.py [--shape moe|dense|both] [--steps 6]

Peers: Glm4Moe (experts by grouped_mm, its best setting on CPU, and SDPA) and Qwen3, bf16 autocast, fused AdamW, gradient clipping; once
eager and once under torch.compile; on a processor without bf16 products also in fp32, which is faster there. lmworks: the precision that
`auto` takes, Muon as in the quickstart (AdamW beside it), compiled layers. All arms see the same random tokens without document
boundaries, forward, backward, clip and update; times are medians over steps, arms take turns round by round, and ratios are of
medians. The peak is the fastest matrix product measured in the same process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
import numpy as np
import torch

from lmworks.host.devices import dtype_for, has_bf16
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


def ours(config: Model, batch: Batch, kind: str) -> Callable[[], None]:
    """One step of lmworks."""
    model = initialize(Transformer(config), 1)
    model.compute_dtype, model.logit_chunk_size = dtype_for("auto", torch.device("cpu")), 256  # as in the quickstart
    model.train()
    model.compile(dynamic=False)
    optimizer = build_optimizer(model, Optimizer(kind=kind, learning_rate=1e-3, adam_learning_rate=1e-3))  # type: ignore[arg-type]
    return lambda: void(
        train_step(
            ParallelModel([model]), optimizer, batch, micro_batch_size=ROWS, lr_factor=1.0, max_grad_norm=1.0, bias_update_rate=0.001
        )
    )


def theirs(config: Model, batch: Batch, compiled: bool, autocast: bool) -> Callable[[], None]:
    """One step of the peer, written as its users write it."""
    import transformers

    kind = getattr(transformers, class_for(config))
    options = kind.config_class(**to_config(config, config.rope, {"eos_token_id": 0, "pad_token_id": 0}))
    if config.moe is not None:
        options._experts_implementation = "grouped_mm"
    model = kind(options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    tokens = torch.from_numpy(batch.tokens).long()
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def void(_: object) -> None:
    """Drop a result."""


def measure(arms: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each arm's steps; two steps of warm-up, then rounds in turn."""
    for step in arms.values():
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, step in arms.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-compiled-peer", action="store_true", help="leave the compiled peer out: it takes minutes to compile")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tokens = np.random.default_rng(1).integers(0, 4096, (ROWS, LENGTH + 1), dtype=np.int32)
    batch = Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=np.int32), 0, 0)
    peak = measure_peak(3.0)
    for shape in SHAPES if arguments.shape == "both" else [arguments.shape]:
        config = SHAPES[shape]
        peer = class_for(config).removesuffix("ForCausalLM")
        arms = {f"lmworks ({name})": ours(config, batch, kind) for name, kind in (("Muon", "muon"), ("AdamW", "adamw"))}
        for precision in ("bf16 autocast",) if has_bf16(torch.device("cpu")) else ("bf16 autocast", "fp32"):
            for how in ("eager",) if arguments.no_compiled_peer else ("eager", "compiled"):
                arms[f"{peer} {how}, {precision}"] = theirs(config, batch, how == "compiled", precision != "fp32")
        seconds = measure(arms, arguments.steps)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        operations = flops_per_token(config, LENGTH).total * batch.tokens.size
        rows = {
            name: {
                "tokens_per_second": batch.tokens.size / time_,
                "fastest_tokens_per_second": batch.tokens.size / min(seconds[name]),
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
