"""Ablations whose runs have reached values that are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lmworks.ablate.measures import Curve, Reading
from lmworks.ablate.resolve import resolve
from lmworks.ablate.results import Results
from tiny_run import Tiny

BITS = "validation/bits_per_byte"
ONE_PHASE = "train.phases=" + json.dumps([{
    "name": "general", "tokens": "3072 tokens", "mixture": {"code": 1.0}, "sequence_length": "32 tokens",
    "global_batch_tokens": "256 tokens", "lr_schedule": {"warmup": "1 steps", "decay": "1 steps"},
}])  # fmt: skip


def results(tiny: Tiny, folder: Path, values: dict[str, list[float]], **keys: Any) -> Results:
    """An ablation whose runs have reached `values` by arm and seed, with straight curves."""
    tree: dict[str, Any] = {"recipe": str(tiny.recipe), "measures": [BITS], "out": str(folder / "out")}
    tree["seeds"] = len(next(iter(values.values())))
    if "kind" not in keys:
        rate = 0.001
        tree["arms"] = {name: [] if not index else [f"optimizer.learning_rate={rate * (index + 1)}"] for index, name in enumerate(values)}
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(tree | keys, sort_keys=False))
    found = Results(resolve(path))
    for arm, (_, of_arm) in zip(found.experiment.arms.values(), values.items(), strict=True):
        for seed, value in zip(found.experiment.seeds, of_arm, strict=True):
            run = found.experiment.directory(arm) / f"seed-{seed}"
            finite = {BITS: value} if np.isfinite(value) else {}
            found.readings[run] = Reading(finite, {BITS: Curve([100.0, 200.0, 300.0, 400.0], [value + 5, value + 3, value + 1, value])})
            found.seconds[run] = 10.0
    return found
