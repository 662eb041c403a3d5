"""One rank of 8,192 builds a model and takes a step, in a process group whose other ranks are made up: `python one_of_many.py LAYOUT RANK`.

Prints JSON: seconds, the groups that it joins with their sizes, open files, and the memory of the process beyond its imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lmworks  # noqa: F401  # isort: skip  (before torch)
import numpy as np
import psutil
import torch
import torch.distributed as dist

from lmworks.checkpoint.communicator import new_communicator
from lmworks.optim.optimizer import build_optimizer
from lmworks.parallel import parallelize
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch
from lmworks.train.step import train_step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from made_up_ranks import made_up_answers, made_up_ranks

RANKS, LENGTH = 8192, 64
LAYOUTS = {
    "dp": Layout(dp_shard=RANKS, zero=1), "zero3": Layout(dp_shard=RANKS, zero=3), "tp": Layout(tp=2, dp_shard=RANKS // 2, zero=1),
    "ep": Layout(dp_shard=RANKS // 2, tp=2, ep=8, zero=1), "hsdp": Layout(dp_replicate=64, dp_shard=128, zero=3),
}  # fmt: skip
_MODEL: dict[str, Any] = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8,
                          "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 256}  # fmt: skip
_FAKE = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(minutes=10)))
_MOE = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}


def main(layout: str, rank: int) -> None:
    process = psutil.Process()
    before, began = process.memory_info().rss, time.monotonic()
    with made_up_ranks(rank, RANKS), made_up_answers():
        ranks = Ranks(LAYOUTS[layout], "cpu")
        with mock.patch.object(dist.ProcessGroup, "_get_backend", return_value=_FAKE):  # which has no timeout
            new_communicator()  # that of saves, as `Checkpoints` makes it
        meshed = time.monotonic()
        model_keys = _MODEL | ({"moe": _MOE} if layout == "ep" else {})
        optimizer_keys = {"kind": "muon", "learning_rate": 0.02, "adam_learning_rate": 0.02}
        tree = {"name": "x", "model": model_keys, "train": {"precision": "fp32", "compile": False}, "optimizer": optimizer_keys}
        recipe = Recipe.model_validate(tree)
        model = ParallelModel(parallelize.build(recipe, ranks, torch.device("cpu")), ranks)
        model.train()
        optimizer = build_optimizer(model, recipe.optimizer, process_groups=ranks.process_groups())
        built = time.monotonic()
        tokens = np.zeros((1, LENGTH), np.int32)
        batch = Batch(tokens, tokens.copy(), np.array([0, LENGTH], np.int32), 0, 0)
        everybody = ranks.size("dp")
        train_step(model, optimizer, batch, sequences=everybody, valid_tokens=LENGTH * everybody, micro_batch_size=1, lr_factor=1.0,
                   max_grad_norm=1.0, bias_update_rate=0.01)  # fmt: skip
        stepped, sizes = time.monotonic(), [group.size() for group in dist.distributed_c10d._world.pg_map]
        print(json.dumps({
            "layout": layout, "rank": rank, "mesh_seconds": meshed - began, "build_seconds": built - meshed,
            "step_seconds": stepped - built, "groups": len(sizes), "groups_of_all": sizes.count(RANKS), "ranks_in_groups": sum(sizes),
            "files": len(os.listdir("/proc/self/fd")), "memory": process.memory_info().rss - before,
        }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
