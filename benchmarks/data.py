"""Speed of the data path, on the standard library's own text: python benchmarks/data.py

1. Shard writing (read parquet, encode, shuffle, write, hash) in MB of text per second, beside encoding the same text with
   `tokenizers` alone (its `encode_batch_fast`, the quickest way it has), which writes nothing. The two take turns in one run; medians
   are printed, by the clock and by CPU time, which a busy machine distorts less.
2. The batch pipeline in tokens per second on one core, at steps drawn at random over the whole run.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.recipe.recipe import Recipe
from lmworks.shards.batch import Batches
from lmworks.shards.build import build
from lmworks.tokenizer import load
from lmworks.tokenizer.train import train


def library_texts(megabytes: float) -> list[str]:
    """Python files of the standard library, in the order of their names."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or size >= megabytes * 1e6:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            texts.append(text)
            size += len(text.encode())
    return texts


def write_corpus(folder: Path, texts: list[str]) -> None:
    for split, part in (("train", texts), ("validation", texts[:20])):
        (folder / split / "code").mkdir(parents=True)
        names = [f"code/{number}" for number in range(len(part))]
        table = {"id": names, "text": part, "origin": names} | {key: [key] * len(part) for key in ("source", "domain", "language")}
        pq.write_table(pa.table(table), folder / split / "code" / "00000.parquet")


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of CPU time over all threads."""
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - cpu


def recipe_of(length: int, batch: int, vocab_size: int) -> Recipe:
    phase = {"name": "all", "tokens": "100M", "mixture": {"code": 1.0}, "sequence_length": f"{length} tokens", "batch": f"{batch} tokens"}
    return Recipe.model_validate({
        "name": "benchmark", "tokenizer": {"vocab_size": vocab_size, "sample_bytes": "4MB"}, "shards": {"max_epochs": 1000.0},
        "train": {"phases": [phase]},
    })


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megabytes", type=float, default=12.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--vocab-size", type=int, default=8192)
    options.add_argument("--batch", type=int, default=16_384, help="tokens per step")
    given = options.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = library_texts(given.megabytes)
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        write_corpus(folder / "corpus", texts)
        recipe = recipe_of(512, given.batch, given.vocab_size)
        train(recipe, folder / "corpus", folder / "tokenizer")
        tokenizer = load(folder / "tokenizer")
        tokenizer.encode_batch(texts[:2])
        peer = tokenizer.reference

        times: dict[str, list[tuple[float, float]]] = {"tokenizers alone": [], "lmworks encode_batch": [], "lmworks shards, complete": []}
        for number in range(given.rounds):
            times["tokenizers alone"].append(seconds(lambda: peer.encode_batch_fast(texts, add_special_tokens=False)))
            times["lmworks encode_batch"].append(seconds(lambda: tokenizer.encode_batch(texts)))
            out = folder / f"shards-{number}"
            written = seconds(lambda out=out: build(recipe, folder / "corpus", folder / "tokenizer", out))
            times["lmworks shards, complete"].append(written)
        print(f"Shard writing: {megabytes:.1f} MB of text, {len(texts):,} documents, median of {given.rounds}")
        alone = [statistics.median(taken) for taken in zip(*times["tokenizers alone"], strict=True)]
        for name, taken in times.items():
            clock, cpu = (statistics.median(part) for part in zip(*taken, strict=True))
            by_clock = f"{megabytes / clock:7.1f} MB/s ({alone[0] / clock:5.2f} x)"
            print(f"  {name:<26}{by_clock}{megabytes / cpu:7.1f} MB per CPU second ({alone[1] / cpu:5.2f} x)")

        print(f"Batches: {given.batch:,} tokens per step, one core")
        for length in (512, 2048, 8192):
            batches = Batches(recipe_of(length, max(given.batch, length), given.vocab_size), folder / "shards-0")
            steps = np.random.default_rng(0).integers(0, batches.steps, 200).tolist()
            spent, _ = seconds(lambda batches=batches, steps=steps: [batches.batch(step) for step in steps])
            rate = 200 * max(given.batch, length) / spent
            print(f"  T = {length:<6}{rate / 1e6:8.1f} M tokens/s, 50 times what a trainer of {rate / 50:,.0f} tokens/s eats")


if __name__ == "__main__":
    main()
