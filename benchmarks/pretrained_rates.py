"""Which peak learning rate tunes pretrained weights best: full weights with AdamW and Muon, and low-rank adapters.

    python benchmarks/pretrained_rates.py DIR BASE CHATS [--arms full-adamw-1e-4,lora-adamw-1e-3] [--tokens 80Ki] [--threads 1]

BASE is a model that `start_from` takes, CHATS a file of conversations. Each arm tunes BASE with one rate, in DIR/ARM, and adds a line to
DIR/results.jsonl: the loss on the tenth of the conversations that is held out, the rise of the cost of general text, and two answers. Arms
with a line are skipped, so that a stopped sweep goes on where it was. SmolLM2-135M takes six minutes for each arm on one core with AMX.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ARMS = ",".join(
    f"{kind}-{rate}" for kind, rates in (
        ("full-adamw", ("1e-5", "3e-5", "1e-4", "3e-4")), ("full-muon", ("3e-5", "1e-4", "3e-4", "1e-3")),
        ("lora-adamw", ("1e-4", "3e-4", "1e-3", "3e-3")),
    ) for rate in rates
)  # fmt: skip


def recipe_of(arm: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe of an arm, which is KIND-OPTIMIZER-RATE."""
    kind, optimizer, rate = arm.split("-", 2)
    tune: dict[str, Any] = {
        "data": [{"name": "chats", "kind": "files", "path": str(Path(options.chats).absolute())}], "tokens": options.tokens,
        "global_batch_size": "2Ki", "learning_rate": float(rate), "validation_fraction": 0.1,
    }  # fmt: skip
    if kind == "lora":
        tune["lora"] = {"rank": 16, "alpha": 32, "targets": ["all-linear"]}
    return {
        "name": arm, "run_dir": str(folder / arm), "threads": options.threads, "start_from": options.base,
        "optimizer": {"kind": optimizer, "weight_decay": 0.0 if kind == "lora" else 0.1}, "tune": tune,
        "train": {"validate_every": "25%", "save_every": "100%", "sample_every": "100%"},
        "evaluate": {"benchmarks": [], "questions": ["What is the capital of France?", "Name three colors."]},
        "export": {"huggingface": False, "gguf": False},
    }  # fmt: skip


def run(arm: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Tune one arm: its figures."""
    path = folder / f"{arm}.yaml"
    path.write_text(yaml.safe_dump(recipe_of(arm, folder, options)), encoding="utf-8")
    began = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    subprocess.run([sys.executable, "-m", "lmworks.cli.main", "tune", str(path)], check=True, env=environment)
    stage = folder / arm / "tune"
    lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = [line for line in lines if "validation/loss" in line]
    answers = [json.loads(line)["completion"] for line in (stage / "samples.jsonl").read_text(encoding="utf-8").splitlines()[-2:]]
    shutil.rmtree(stage / "checkpoints")  # a gigabyte for each arm
    return {
        "arm": arm, "held_out": {line["step"]: line["validation/loss"] for line in measured},
        "forgetting": measured[-1]["validation/forgetting"], "answers": answers, "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def main() -> None:
    """Run the arms that have no line yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("base")
    parser.add_argument("chats")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--tokens", default="80Ki")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    results = options.folder / "results.jsonl"
    known = {json.loads(line)["arm"] for line in results.read_text(encoding="utf-8").splitlines()} if results.exists() else set()
    for arm in options.arms.split(","):
        if arm not in known:
            found = run(arm, options.folder, options)
            with open(results, "a", encoding="utf-8") as handle:
                handle.write(json.dumps(found) + "\n")
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
