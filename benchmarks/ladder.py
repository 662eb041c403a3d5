"""A ladder of small runs on the quickstart's data, and ten larger runs that it predicts: how far off, and how often do its intervals hold?

    python benchmarks/ladder.py FOLDER [--jobs 2]

Each of the ten has four times the operations of the ladder's largest run: larger models, more tokens, or both, and a seed of its own. All
ten predictions are written before the first of them runs. The work is done by `lmworks ladder` and `lmworks pretrain`, as users do it,
and what has ended is not repeated. Prints a row for each prediction. The bound: 8 of 10 inside their 90% intervals, and a mean error of at
most 0.02 bits per byte. LOG.md has what was reached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from lmworks.io.files import link_tree
from lmworks.ladder.points import size_and_tokens
from lmworks.ladder.run import resolve
from lmworks.recipe.load import load_recipe

MIXTURE = load_recipe("quickstart").recipe.train.phases[0].mixture
BATCH = 1024
HORIZONS = (1000 * BATCH, 1350 * BATCH, 1800 * BATCH, 2400 * BATCH, 3200 * BATCH)
SEEDS = [601, 602, 603]
WARMUP = 0.1  # of the shortest horizon
LAYERS = 2  # of all runs: depth and width do not count alike, so a family of models grows in one of them, or in both together
HEAD = 16  # dimension of a head: hidden sizes are multiples of it, so that all else is in proportion to them
SIZES = (32, 48, 64, 80)  # hidden sizes
TARGETS = (112, 128, 96, 144, 112, 128, 112, 128, 112, 128)
FACTOR = 4  # operations of a target, relative to those of the ladder's largest run
COMMON = [
    "time=null", "tune=null", "evaluate.benchmarks=[]", "export.huggingface=false", "export.gguf=false", "tokenizer.vocab_size=2048",
    "train.validate_every=100%", "train.sample_every=100%",
    # Weight decay raises the loss of long runs by more than that of short ones (docs/sizing.md).
    "optimizer.weight_decay=0",
    # With 32 KB for each domain, a few files, seeds differ by twice as much.
    "corpus.max_validation_bytes=256KiB", "train.validation_bytes_per_domain=256KiB",
]  # fmt: skip


def shape(hidden: int) -> list[str]:
    """A dense model in place of the quickstart's mixture of experts, which is slow at these sizes."""
    return ["model.moe=null", *(f"model.{key}={value}" for key, value in {
        "hidden_size": hidden, "num_hidden_layers": LAYERS, "head_dim": HEAD, "num_attention_heads": hidden // HEAD,
        "num_key_value_heads": hidden // HEAD, "intermediate_size": hidden * 11 // 4,
    }.items())]  # fmt: skip


def phase(tokens: int, warmup: int) -> str:
    schedule = {"kind": "wsd", "warmup": f"{warmup} steps", "decay": "20%", "min_lr_ratio": 0.0}
    return "train.phases=" + json.dumps([{
        "name": "general", "tokens": f"{tokens} tokens", "mixture": MIXTURE, "sequence_length": "256 tokens",
        "global_batch_tokens": f"{BATCH} tokens", "lr_schedule": schedule,
    }])  # fmt: skip


def lmworks(*words: object) -> str:
    command = [sys.executable, "-m", "lmworks.cli.main", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def overrides(words: Iterable[str]) -> list[str]:
    return [word for one in words for word in ("--set", one)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="directory of the ladder and of the larger runs")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, each with one thread")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    warmup = round(WARMUP * HORIZONS[0] / BATCH)
    file, out = folder / "ladder.yaml", folder / "ladder"
    ladder = {
        "recipe": "quickstart", "set": [*COMMON, phase(HORIZONS[-1], warmup)], "out": str(out), "warmup": WARMUP, "seeds": SEEDS,
        "sizes": {str(hidden): shape(hidden) for hidden in SIZES}, "horizons": [f"{one} tokens" for one in HORIZONS],
    }  # fmt: skip
    file.write_text(yaml.safe_dump(ladder, sort_keys=False), encoding="utf-8")
    print(lmworks("ladder", "run", file, "--jobs", options.jobs))
    print(f"ladder: {(time.monotonic() - start) / 60:.1f} minutes")

    runs = resolve(file)
    largest = max(size * tokens for size, tokens in (size_and_tokens(arm.recipe) for arm in runs.arms.values()))
    data = runs.runs[0].directory
    commands: list[list[str]] = []
    for number, hidden in enumerate(TARGETS, 1):
        run_dir = folder / f"target-{number:02d}"
        tokenizer = f"tokenizer.path={data / 'tokenizer' / 'tokenizer.json'}"
        chosen = [*COMMON, *shape(hidden), tokenizer, f"run_dir={run_dir}", f"train.seed={number + 800}", "threads=1"]
        size = size_and_tokens(load_recipe("quickstart", [*chosen, phase(HORIZONS[-1], warmup)]).recipe)[0]
        words = ["quickstart", *overrides([*chosen, phase(-(-FACTOR * largest // (size * BATCH)) * BATCH, warmup)])]
        if not run_dir.exists():
            print(lmworks("ladder", "predict", out, *words), end="", flush=True)
        commands.append(words)
    for number in range(1, len(commands) + 1):
        for stage in ("corpus", "tokenizer", "shards"):
            if not (there := folder / f"target-{number:02d}" / stage).exists():
                link_tree(data / stage, there)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda words: lmworks("pretrain", *words), commands))
    print(lmworks("ladder", "score", out))
    print(f"together: {(time.monotonic() - start) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
