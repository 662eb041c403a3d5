"""Read, filter, MinHash-dedup and tokenize against datatrove, on the same real text in one run.

    python benchmarks/corpus.py --datatrove PYTHON [--megabytes 20] [--rounds 3] [--workers 2]

PYTHON is an interpreter with `datatrove tokenizers spacy nltk regex orjson tldextract "xxhash<4"` (its own environment: it need not share
ours). The text is English and code: speeches, chats, facts, dialogues and the standard library, cut to equal shares, and a tenth
of it again with 2% of the words replaced. Both sides apply Gopher's published rules, remove near-duplicates of word 5-grams
and encode with the same tokenizer. Documents per second are per second of CPU time, start-up included, which a busy machine distorts
less than the clock. Printed: medians, their ratio, and how far the kept documents agree.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from lmworks.corpus.read import parts as parts_of
from lmworks.corpus.read import read
from lmworks.recipe.load import load_recipe
from lmworks.tokenizer import load

FILES = 8
REPLACED = 0.02


def documents(megabytes: float) -> list[tuple[str, str]]:
    """(source, text) of the quickstart's sources, as equal in bytes as they go."""
    sources = [source for source in load_recipe("quickstart").recipe.corpus.sources if source.language in ("en", "code")]
    found = []
    for source in sources:
        left = megabytes * 1e6 / len(sources)
        for part in parts_of(source, 1 << 30):
            for item in read(source, part, 1 << 24):
                if item.reason is None and left > 0:
                    found.append((source.name, item.text))
                    left -= len(item.text.encode())
    return found


def with_copies(texts: list[tuple[str, str]], seed: int = 1) -> list[tuple[str, str]]:
    """A tenth of the documents once more, with some of their words replaced by others of the corpus."""
    rng = random.Random(seed)
    words = [word for _, text in rng.sample(texts, min(len(texts), 500)) for word in text.split()[:200]]
    copies = []
    for name, text in rng.sample(texts, len(texts) // 10):
        pieces = text.split(" ")
        for place in rng.sample(range(len(pieces)), int(len(pieces) * REPLACED)):
            pieces[place] = rng.choice(words)
        copies.append((name, " ".join(pieces)))
    mixed = [*texts, *copies]
    rng.shuffle(mixed)
    return mixed


def write_input(folder: Path, texts: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True)
    for number in range(FILES):
        rows = (
            json.dumps({"id": str(index), "text": text, "metadata": {"source": name}}, ensure_ascii=False)
            for index, (name, text) in enumerate(texts)
            if index % FILES == number
        )
        (folder / f"{number:05d}.jsonl").write_text("".join(row + "\n" for row in rows), encoding="utf-8")


def adopt_orphans() -> None:
    """Have processes whose parent is gone become children of this one, so that their CPU time is counted too (datatrove's fork server)."""
    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0):
        sys.exit("this system cannot count the CPU time of orphaned processes; run the benchmark on Linux")


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds by the clock and of CPU time, of the command and all it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8")
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - begin, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def recipe(folder: Path, source: Path, tokenizer: Path, workers: int) -> Path:
    """Our side: the same rules, the same shingles, nothing held out."""
    path = folder / "recipe.yaml"
    text = {"name": "all", "kind": "jsonl", "path": str(source / "*.jsonl"), "license": "mixed", "domain": "web", "keep": ["id"]}
    path.write_text(yaml.safe_dump({
        "name": "bench",
        "run_dir": str(folder / "run"),
        "corpus": {
            "sources": [text],
            "steps": [{"step": "rules", "sets": ["gopher"]}],
            "dedup": {"exact": False, "minhash": {"ngram_words": 5, "threshold": 0.8}},
            "decontaminate": None,
            "validation_fraction": 0.0,
            "processes": workers,
            "part_bytes": "4MB",
        },
        "tokenizer": {"path": str(tokenizer), "vocab_size": max(4096, load(tokenizer).vocab_size)},
        "model": {"preset": "glm-tiny"},
        "threads": workers,
        "train": {"phases": [{"name": "one", "tokens": "1M", "mixture": {"all": 1.0}, "sequence_length": "512 tokens",
        "global_batch_tokens": "8Ki"}]},
    }))  # fmt: skip
    return path


def kept_by_datatrove(folder: Path) -> set[str]:
    return {json.loads(line)["id"] for path in (folder / "kept").glob("*.jsonl") for line in path.open(encoding="utf-8")}


def kept_by_us(folder: Path) -> set[str]:
    tables = (pq.read_table(path, columns=["facts"]) for path in sorted((folder / "run" / "corpus" / "train").rglob("*.parquet")))
    return {str(json.loads(facts)["id"]) for table in tables for facts in table.column("facts").to_pylist()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datatrove", required=True, help="a Python interpreter that has datatrove")
    parser.add_argument("--tokenizer", required=True, type=Path, help="folder with a tokenizer.json, such as runs/quickstart/tokenizer")
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    adopt_orphans()
    texts = with_copies(documents(arguments.megabytes))
    size = sum(len(text.encode()) for _, text in texts) / 1e6
    tokenizer = arguments.tokenizer.resolve()
    results: dict[str, list[tuple[float, float]]] = {"lmworks": [], "datatrove": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "input"
        write_input(source, texts)
        for _ in range(arguments.rounds):
            shutil.rmtree(folder / "run", ignore_errors=True)
            shutil.rmtree(folder / "peer", ignore_errors=True)
            ours = [Path(sys.executable).with_name("lmworks"), "shards", "build", recipe(folder, source, tokenizer, arguments.workers)]
            results["lmworks"].append(timed([*map(str, ours)], folder))
            script = Path(__file__).with_name("corpus_datatrove.py").resolve()
            theirs = [arguments.datatrove, script, source, tokenizer / "tokenizer.json", folder / "peer", arguments.workers]
            results["datatrove"].append(timed([*map(str, theirs)], folder))
        ours_kept, theirs_kept = kept_by_us(folder), kept_by_datatrove(folder / "peer")
    print(f"{len(texts):,} documents, {size:.1f} MB, {arguments.workers} workers, median of {arguments.rounds}\n")
    print("| | seconds | CPU seconds | documents per CPU-second | MB per CPU-second |\n|---|---|---|---|---|")
    speeds = {}
    for arm, times in results.items():
        clock, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        speeds[arm] = len(texts) / cpu
        print(f"| {arm} | {clock:.1f} | {cpu:.1f} | {speeds[arm]:,.0f} | {size / cpu:.2f} |")
    print(f"\nlmworks is {speeds['lmworks'] / speeds['datatrove']:.1f} times as fast per core")
    agree = len(texts) - len(ours_kept ^ theirs_kept)
    print(f"kept: lmworks {len(ours_kept):,}, datatrove {len(theirs_kept):,}; the same decision for {100 * agree / len(texts):.2f}% of all")
    for label, ids in (("only lmworks keeps", ours_kept - theirs_kept), ("only datatrove keeps", theirs_kept - ours_kept)):
        print(f"{label}: {dict(Counter(texts[int(index)][0] for index in ids))}")


if __name__ == "__main__":
    main()
