"""Which peak learning rate trains pretrained weights best, for each stage: continued pretraining, tuning, preferences, rewards.

    python benchmarks/pretrained_rates.py DIR BASE --chats FILE [--pairs FILE] [--text FOLDER] [--arms ARM,ARM] [--threads 1]

BASE is a model that `start_from` takes. An arm is STAGE-WEIGHTS-OPTIMIZER-RATE and then changes of the stage's section, each +KEY=VALUE:
tune-lora-adamw-1e-3+global_batch_tokens=512. It trains BASE in DIR/ARM and adds a line to DIR/results.jsonl: what was measured on data held
out, the rise of the cost of general text, and two answers. Arms with a line are skipped, so that a stopped sweep goes on where it was.
SmolLM2-135M takes four to ten minutes for each arm on one core with AMX.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

RATES = {
    "pretrain-full-adamw": ("3e-5", "1e-4", "3e-4"), "pretrain-full-muon": ("1e-4", "3e-4", "1e-3"),
    "tune-full-adamw": ("1e-5", "3e-5", "1e-4", "3e-4"), "tune-full-muon": ("3e-5", "1e-4", "3e-4", "1e-3"),
    "tune-lora-adamw": ("1e-4", "3e-4", "1e-3", "3e-3"), "dpo-full-adamw": ("1e-6", "6e-6", "3e-5"),
    "dpo-lora-adamw": ("1e-5", "6e-5", "3e-4"), "grpo-lora-adamw": ("2e-5", "6e-5", "3e-4"),
}  # fmt: skip
ARMS = ",".join(f"{kind}-{rate}" for kind, rates in RATES.items() for rate in rates)

def section_of(stage: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The section of the stage, or the phase of pretraining, which all of its arms share."""
    if stage == "pretrain":
        return {
            "name": "more", "tokens": options.tokens, "sequence_length": "512 tokens", "global_batch_tokens": "2Ki",
            "mixture": {"text": 1.0},
            "lr_schedule": {"kind": "linear", "warmup": "5%", "min_lr_ratio": 0.0},
        }  # fmt: skip
    if stage == "tune":
        chats = {"name": "chats", "kind": "files", "path": str(Path(options.chats).absolute())}
        return {"data": [chats], "tokens": options.tokens, "global_batch_tokens": "2Ki", "validation_fraction": 0.1}
    if stage == "dpo":
        return {"data": [{"name": "pairs", **pairs_of(options)}], "pairs_per_step": 8, "validation_fraction": 0.2}
    sums = {"name": "sums", "kind": "files", "reward": "numeric", "path": str(folder.absolute() / "sums.jsonl")}
    return {"data": [sums], "steps": 16, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 24, "validation_prompts": 64}


def pairs_of(options: argparse.Namespace) -> dict[str, Any]:
    """Pairs of a file; without one, right and wrong numbers of somebody's brothers or sisters."""
    if options.pairs:
        return {"kind": "files", "path": str(Path(options.pairs).absolute())}
    return {"kind": "tasks", "max_rows": 300, "tasks": [{"name": "aiw", "options": {"task_type_weights": [0.5, 0.5, 0]}}]}


def write_sums(path: Path) -> None:
    """Prompts of grpo: sums up to 100, of which SmolLM2-135M has some right."""
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(2, 42) for b in range(1, 31, 3)]
    random.Random(0).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def recipe_of(arm: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The recipe of an arm."""
    what, *changes = arm.split("+")
    stage, weights, optimizer, rate = what.split("-", 3)
    section = section_of(stage, folder, options)
    section |= {key: yaml.safe_load(value) for key, value in (change.split("=", 1) for change in changes)}
    tree: dict[str, Any] = {
        "name": arm, "run_dir": str(folder / arm), "threads": options.threads, "start_from": options.base,
        "optimizer": {"kind": optimizer, "weight_decay": 0.0 if weights == "lora" else 0.1},
        "train": {"validate_every": "25%", "save_every": "100%", "sample_every": "100%"},
        "evaluate": {"benchmarks": [], "questions": ["What is the capital of France?", "Name three colors."]},
        "export": {"huggingface": False, "gguf": False},
    }  # fmt: skip
    if stage == "pretrain":
        pattern = str(Path(options.text).absolute() / "*.txt")
        tree["corpus"] = {"sources": [{"name": "text", "kind": "text", "path": pattern, "domain": "prose", "license": "CC0-1.0"}]}
        tree["train"]["phases"] = [section]
        tree["optimizer"] |= {"learning_rate": float(rate), "adam_learning_rate": float(rate) / (3 if optimizer == "muon" else 1)}
        return tree
    section["learning_rate"] = float(rate)
    if weights == "lora":
        section["lora"] = {"rank": 16, "alpha": 32, "targets": ["all-linear"]}
    return tree | {stage: section}


def run(arm: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train one arm: its figures."""
    path, stage = folder / f"{arm}.yaml", arm.split("-")[0]
    path.write_text(yaml.safe_dump(recipe_of(arm, folder, options)), encoding="utf-8")
    began = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    subprocess.run([sys.executable, "-m", "lmworks.cli.main", stage, str(path)], check=True, env=environment)
    made = folder / arm if stage == "pretrain" else folder / arm / stage
    lines = [json.loads(line) for line in (made / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    measured = {
        line["step"]: {key.removeprefix("validation/"): value for key, value in line.items() if key.startswith("validation/")}
        for line in lines if any(key.startswith("validation/") for key in line)
    }  # fmt: skip
    samples = made / "samples.jsonl"
    answers = [json.loads(line)["completion"] for line in samples.read_text(encoding="utf-8").splitlines()[-2:]] if samples.exists() else []
    shutil.rmtree(made / "checkpoints")  # a gigabyte for each arm
    return {"arm": arm, "measured": measured, "answers": answers, "seconds": round(time.monotonic() - began)}


def main() -> None:
    """Run the arms that have no line yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("base")
    for data in ("--chats", "--pairs", "--text"):
        parser.add_argument(data, default="")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--tokens", default="80Ki", help="of pretrain and tune")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_sums(options.folder / "sums.jsonl")
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
