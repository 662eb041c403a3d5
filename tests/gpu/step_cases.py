"""The training steps that are traced on fake CUDA tensors, and where their figures are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parent.parent / "recorded" / "step_costs.json"
ALONE: dict[str, dict[str, Any]] = {
    "dense": {"kind": "dense", "optimizer": "muon"}, "windows": {"kind": "tied"}, "post-norm": {"kind": "post_norm"},
    "block mask": {"kind": "dense", "length": 2064},
    "fp16": {"kind": "dense", "precision": "fp16"},
    "experts": {"kind": "moe"}, "mla": {"kind": "mla"}, "auxiliary loss": {"kind": "aux"},
    "sinkhorn": {"kind": "sinkhorn"}, "multi-token prediction": {"kind": "mtp"},
    "adapters": {"kind": "moe", "lora": True},
    "weights of labels": {"kind": "moe", "weighted": True},
}  # fmt: skip
RANKS: dict[str, dict[str, Any]] = {
    name: {"kind": "moe", "layout": layout}
    for name, layout in (
        ("copies", {"dp_shard": 2, "zero": 0}), ("zero 1", {"dp_shard": 2, "zero": 1}), ("zero 3", {"dp_shard": 2, "zero": 3}),
        ("context", {"cp": 2}), ("tensor", {"tp": 2}), ("expert", {"dp_shard": 2, "ep": 2}), ("expert and context", {"cp": 2, "ep": 2}),
    )
}  # fmt: skip


def torch_version() -> str:
    """The version whose figures are comparable: another one may call other operators."""
    import torch

    return ".".join(torch.__version__.split(".")[:2])
