"""Preferences and rewards on a small model (`glm-tiny`): does DPO reach 0.8 of held-out pairs, and GRPO 60% of unseen problems?

    python benchmarks/alignment.py FOLDER [--seed 1] [--threads 2] [--stages dpo grpo]

The task is to name the word that a list of six has three times. The model is pretrained on such lists with their
answers, and tuned on replies of which 88% name any other word. It can solve the task and seldom does, which is the state that reinforcement
learning is for. Both stages start from this model. No list occurs twice, neither in one set of data nor in two, so held-out pairs and
problems are unseen. The work is done by `lmworks run`, as a user would do it; the curves are also on the run pages. What has ended is not
repeated. Prints the curves and the processor time, and writes the curves to `curves.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lmworks.metrics.log import read

WORDS = ["cat", "dog", "sun", "tree", "fish", "bird", "rain", "snow", "gold", "iron", "milk", "salt", "boat", "moon", "rock", "ship"]
MEASURES = {"dpo": ("dpo/accuracy", "validation/reward_accuracy"), "grpo": ("grpo/reward", "validation/reward")}
GOAL = {"dpo": 0.8, "grpo": 0.6}

RECIPE: dict[str, Any] = {
    "name": "alignment",
    "corpus": {
        "max_validation_bytes": "8KB",
        "dedup": {"minhash": None},
        "sources": [{"name": "lists", "kind": "jsonl", "path": "lists.jsonl", "domain": "other", "license": "CC0-1.0"}],
    },
    "tokenizer": {"vocab_size": 512, "sample_bytes": "1MB"},
    "model": {"preset": "glm-tiny"},
    "optimizer": {"learning_rate": 0.004, "adam_learning_rate": 0.004},
    "train": {
        "validate_every": "20%",
        "validation_bytes_per_domain": "4KiB",
        "phases": [
            {
                "name": "general", "tokens": "160Ki", "mixture": {"lists": 1.0}, "sequence_length": "256 tokens",
                "global_batch_tokens": "1Ki", "lr_schedule": {"kind": "linear", "min_lr_ratio": 0.1},
            }
        ],
    },
    "tune": {
        "data": [{"name": "answers", "kind": "files", "path": "answers.jsonl"}],
        "tokens": "32Ki", "sequence_length": "256 tokens", "global_batch_tokens": "512 tokens", "learning_rate": 0.0016,
    },
    "evaluate": {"references": False},
    "export": {"huggingface": False, "gguf": False},
}  # fmt: skip
STAGES: dict[str, dict[str, Any]] = {
    "dpo": {
        "data": [{"name": "pairs", "kind": "files", "path": "pairs.jsonl"}],
        "pairs_per_step": 32, "sequence_length": "256 tokens", "validation_fraction": 0.2, "learning_rate": 0.001,
    },
    "grpo": {
        "data": [{"name": "problems", "kind": "files", "path": "problems.jsonl", "reward": "exact"}],
        "group_size": 8, "prompts_per_step": 16, "steps": 80, "max_new_tokens": 24, "sequence_length": "256 tokens",
        "validation_prompts": 200,
        "learning_rate": 0.001, "lr_schedule": {"kind": "linear", "warmup": "5%", "min_lr_ratio": 0.0},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """A list, the word that it has three times, and a word that it has once."""

    words: list[str]
    right: str
    wrong: str

    @property
    def question(self) -> str:
        return f"Words: {' '.join(self.words)}. Which is there most often?"


class Lists:
    """Lists of words that never repeat."""

    def __init__(self, seed: int) -> None:
        self.random, self._seen = random.Random(seed), set[tuple[str, ...]]()

    def draw(self) -> Item:
        while True:
            right, *others = self.random.sample(WORDS, 4)
            words = [right, right, right, *others]
            self.random.shuffle(words)
            if tuple(words) not in self._seen:
                self._seen.add(tuple(words))
                return Item(words, right, others[0])


def page(lists: Lists) -> dict[str, Any]:
    """What there is to learn before any tuning."""
    items = [lists.draw() for _ in range(8)]
    return {"text": "\n".join(f"{item.question}\nAnswer: {item.right}" for item in items)}


def answer(lists: Lists) -> dict[str, Any]:
    item = lists.draw()
    word = item.right if lists.random.random() < 0.12 else lists.random.choice([word for word in WORDS if word != item.right])
    return {"messages": [{"role": "user", "content": item.question}, {"role": "assistant", "content": f"Answer: {word}"}]}


def pair(lists: Lists) -> dict[str, Any]:
    item = lists.draw()
    return {"prompt": item.question, "chosen": f"Answer: {item.right}", "rejected": f"Answer: {item.wrong}"}


def problem(lists: Lists) -> dict[str, Any]:
    item = lists.draw()
    return {"prompt": item.question, "answer": item.right}


def prepare(folder: Path, seed: int = 1, threads: int = 2) -> None:
    """Write the data and the recipes: `base.yaml` of the model that both stages start from, `dpo.yaml` and `grpo.yaml`."""
    folder.mkdir(parents=True, exist_ok=True)
    lists = Lists(seed)
    sets: list[tuple[str, Callable[[Lists], dict[str, Any]], int]] = [
        ("lists", page, 2000), ("answers", answer, 3000), ("pairs", pair, 1200), ("problems", problem, 1000)
    ]  # fmt: skip
    for name, make, count in sets:
        rows = [json.dumps(make(lists)) for _ in range(count)]
        path, text = folder / f"{name}.jsonl", "\n".join(rows) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # a run knows its sources by their times
            path.write_text(text, encoding="utf-8")
    for name in ("base", *STAGES):
        recipe = RECIPE | {"seed": seed, "threads": threads, "run_dir": name} | ({name: STAGES[name]} if name in STAGES else {})
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def run(folder: Path, *words: str) -> float:
    """Run a command in the folder; its processor time in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "lmworks.cli.main", *words], cwd=folder, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def align(folder: Path, stage: str) -> float:
    """Run the stage on a copy of the tuned run; its processor time in seconds."""
    if not (folder / stage).exists():
        shutil.copytree(folder / "base", folder / stage)
    return run(folder, "run", f"{stage}.yaml")


def curve(folder: Path, stage: str) -> list[tuple[int, float]]:
    """The measure by step: at 0 that of the first step's pairs or answers, which are scored before they are learned, then held-out ones."""
    first, held_out = MEASURES[stage]
    lines = read(folder / stage / stage)
    start = next(line[first] for line in lines if first in line)
    return [(0, start), *((line["step"], line[held_out]) for line in lines if held_out in line)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    prepare(folder, arguments.seed, arguments.threads)
    seconds = {"base": run(folder, "tune", "base.yaml")}
    for stage in arguments.stages:
        seconds[stage] = align(folder, stage)
    curves = {stage: curve(folder, stage) for stage in arguments.stages}
    for stage, points in curves.items():
        print(f"{stage}, {MEASURES[stage][1]} by step (goal {GOAL[stage]}): {', '.join(f'{step}: {value:.3f}' for step, value in points)}")
    (folder / "curves.json").write_text(json.dumps(curves), encoding="utf-8")
    print("CPU seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))


if __name__ == "__main__":
    main()
