"""Extreme numbers: recipes of the tiny run, each trained for a step of each of its two phases, saved, and started again.

A recipe is refused, the run ends with one line, or its weights are finite, as saved and after the second start, which has nothing to do.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

from fuzz_campaign import Case, Fault
from fuzz_recipes import typed_paths

from lmworks.io import jsonl
from lmworks.recipe.schema.recipe import Recipe
from tiny_run import Tiny, checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "recipe"))
from test_accepted_recipes import KEYS

SECTIONS = ("model", "optimizer", "train", "stability")
NUMBERS = [
    0.0, 5e-324, 1e-45, 1.2e-38, 1e-30, 1e-12, 1e-4, 0.5, 1 - 1e-7, 1.0, 1 + 1e-7, 2.0, 1e4, 65_600.0, 1e12, 1e30, 3.4e38, 1e39, 1e300,
]  # fmt: skip
SIGNED = [sign * number for number in NUMBERS for sign in (1, 1, 1, -1)]
# A step in each phase, and nothing between; what a case sets comes behind it, and wins.
SHORT = (
    "train.phases.general.tokens=256 tokens", "train.phases.general.batch_ramp=null", "train.phases.long.tokens=256 tokens",
    *(f"train.phases.{name}.lr_schedule={{kind: constant, warmup: 0 steps}}" for name in ("general", "long")),
    "train.validate_every=100%", "train.save_every=1 steps", "stability.max_bad_steps=10",
)  # fmt: skip
PHASES = {"0": "general", "1": "long"}


class Steps:
    """Each case is the values of some keys."""

    def prepare(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-steps-"))
        # In another process: the workers are forked from this one.
        code = f"import sys, pathlib, tiny_run; tiny_run.prepare(pathlib.Path({str(self._folder)!r}))"
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path}, capture_output=True)
        self.take(Tiny(self._folder / "tiny.yaml", self._folder / "run"))

    def take(self, tiny: Tiny) -> None:
        """Draw cases for this run, which has its shards."""
        self._tiny = tiny
        floats = [keys for keys, annotation in typed_paths(Recipe) if "float" in str(annotation) and keys.split(".")[0] in SECTIONS]
        self._floats = [_named(keys) for keys in floats if "mixture" not in keys]
        self._keys = {_named(keys): values for keys, values in KEYS.items()}

    def begin(self) -> None:
        """Nothing: a worker starts with what was prepared."""

    def case(self, draw: Random) -> Case:
        chosen = {}
        for _ in range(draw.choice([1, 1, 2, 3])):
            if draw.random() < 0.6:
                key = draw.choice(self._floats)
                chosen[key] = [draw.choice(SIGNED) for _ in range(2)] if key.endswith("betas") else draw.choice(SIGNED)
            else:
                key = draw.choice(list(self._keys))
                chosen[key] = draw.choice(self._keys[key])
        if draw.random() < 0.3:
            chosen["train.precision"] = draw.choice(["fp32", "bf16", "fp16"])
        return {"set": [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in chosen.items()]}

    def run(self, case: Case, folder: Path) -> str:
        shutil.copytree(self._tiny.run_dir, folder / "run")
        run = Tiny(self._tiny.recipe, folder / "run")
        overrides = [*SHORT, *case["set"]]
        for _ in range(2):
            run.pretrain(*overrides)
            weights = {name: tensor for name, tensor in checkpoint(run.run_dir).items() if name.startswith("model/")}
            if wrong := [name for name, tensor in weights.items() if not tensor.isfinite().all()]:
                raise Fault(f"weights were saved that are not finite: {wrong[:3]}")
        lines = jsonl.read(run.run_dir / "metrics.jsonl")
        return "trained" if math.isfinite(lines[-1].get("train/loss") or math.nan) else "left its weights alone"


def _named(keys: str) -> str:
    """A path with the names of the tiny run's phases."""
    parts = keys.split(".")
    if parts[:2] == ["train", "phases"] and parts[2] in PHASES:
        parts[2] = PHASES[parts[2]]
    return ".".join(parts)
