"""What agreeing on a checkpoint costs per rank, for the 355B recipe on 8,192 ranks: the table of docs/checkpoints.md.

    python benchmarks/checkpoint_scale.py

A rank in the middle of the pipeline is played: its boxes are laid out as it would hold them, and put into words as a save does.
Beside that, what the plan of `torch.distributed.checkpoint`, which the first rank gathers from all, takes for the same boxes.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from lmworks.checkpoint.manifest import Entry
from lmworks.checkpoint.save_plan import TensorSlice
from lmworks.checkpoint.tensor_files import Written, compressed, line_of
from lmworks.recipe.load import load_recipe
from lmworks.recipe.parameters import Parameter, parameters

PP, SHARDS, TP, EP = 16, 64, 8, 32
RANKS = PP * SHARDS * TP
STAGE, SHARD, TENSOR = 8, 37, 5  # the place of the rank that is played


def box(parameter: Parameter) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the rank's share: experts over ep and their rows over the other ranks, matrices over tp and shards."""
    shape = parameter.shape
    if parameter.component == "experts":
        own = shape[0] // EP
        rows = shape[1] // (SHARDS // EP * TP)
        return (own * (SHARD % EP), rows * (SHARD // EP * TP + TENSOR), 0), (own, rows, shape[2])
    parts, place = (TP * SHARDS, TENSOR * SHARDS + SHARD) if parameter.is_matrix and len(shape) > 1 else (SHARDS, SHARD)
    rows = math.ceil(shape[0] / parts)
    rest = (0,) * (len(shape) - 1)
    return (rows * place, *rest), (rows, *shape[1:])


def held() -> Iterator[TensorSlice]:
    """What the rank writes: its stage's weights, and what the optimizer keeps for each."""
    model = load_recipe("glm46-355b-a32b").recipe.model
    assert model.num_hidden_layers
    layers = range(model.num_hidden_layers * STAGE // PP, model.num_hidden_layers * (STAGE + 1) // PP)
    for one in parameters(model):
        if one.layer in layers:
            for kind in ("model/", *(("optimizer/momentum.",) if one.is_matrix else ("optimizer/first.", "optimizer/second."))):
                offsets, sizes = box(one)
                yield TensorSlice(kind + one.name, torch.float32, one.shape, offsets, sizes, torch.Tensor)


def plan_of(parts: list[TensorSlice]) -> SavePlan:
    """The same as torch's planner would send it."""
    return SavePlan([
        WriteItem(
            MetadataIndex(part.name, torch.Size(part.offsets)), WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)),
                TensorProperties(dtype=part.dtype), torch.Size(part.shape),
            ),
        )
        for part in parts
    ])  # fmt: skip


def figures() -> dict[str, int]:
    """Bytes per rank and in all."""
    parts = list(held())
    name = "data-04711-00000.bin"
    written = Written({name: Entry(sum(part.bytes for part in parts), "0" * 64)}, compressed([line_of(name, parts)]))
    return {
        "parts": len(parts), "state": sum(part.bytes for part in parts), "sent": len(pickle.dumps(written)), "table": len(written.table),
        "plan": len(pickle.dumps(plan_of(parts))), "hash": len(pickle.dumps(2**64 - 1)),
    }  # fmt: skip


def main() -> None:
    found = figures()
    print("| on 8,192 ranks (pp 16, dp_shard 64, tp 8, ep 32) | per rank | all ranks |")
    print("|---|---|---|")
    print(f"| state written | {found['state'] / 1e6:,.0f} MB in {found['parts']} parts | {found['state'] * RANKS / 1e12:.1f} TB |")
    for what, key in (
        ("hash sent to all before the copy", "hash"), ("sent to the first rank after the writing", "sent"),
        ("of that the table, as it is stored", "table"), ("for comparison: the plan that torch's planner would send", "plan"),
    ):  # fmt: skip
        size = f"{found[key] / 1e3:.1f} kB" if found[key] >= 100 else f"{found[key]} bytes"
        print(f"| {what} | {size} | {found[key] * RANKS / 1e6:,.1f} MB |")


if __name__ == "__main__":
    main()
