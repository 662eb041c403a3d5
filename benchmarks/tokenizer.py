"""A full vocabulary on real text: python benchmarks/tokenizer.py

Trains a byte-level tokenizer of 151,552 entries, 256 of them special, on the Python text that is installed here (the standard library
and the packages beside this one), beside the trainer of `tokenizers` on the same text: time, peak memory, and whether the merges are the
same ones. Then encodes held-out files with it, through tiktoken as lmworks does and through `tokenizers`. Each trainer has a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sysconfig
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import load, special
from lmworks.tokenizer.train import train

LONGEST = 10**9  # `tokenizers` measures its limit in other units, so none is set for the comparison


def texts(megabytes: float) -> tuple[list[str], list[str]]:
    """Text to learn from, and every fiftieth file held out; without characters so new that the two regex engines disagree on them."""
    found: tuple[list[str], list[str]] = ([], [])
    size = 0
    for folder in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")):
        for number, path in enumerate(sorted(Path(folder).rglob("*.py"))):
            if size < megabytes * 1e6:
                text = path.read_text(encoding="utf-8", errors="ignore")
                if not text.isascii() and any(unicodedata.category(char) == "Cn" for char in text):
                    continue
                size += len(text.encode())
                found[number % 50 == 0].append(text)
    return found


def write_corpus(folder: Path, learn: list[str], held: list[str]) -> None:
    for split, part in (("train", learn), ("validation", held)):
        (folder / split / "code").mkdir(parents=True)
        columns = {key: ["code"] * len(part) for key in ("source", "domain", "language")}
        pq.write_table(pa.table({"text": part, **columns}), folder / split / "code" / "00000.parquet", row_group_size=500)


def ours(folder: Path, size: int) -> dict[str, Any]:
    from lmworks.tokenizer import train as module

    module._LONGEST_TOKEN = LONGEST
    options = {"vocab_size": size, "num_special_tokens": 256, "sample_bytes": "100GB"}
    report = train(Recipe.model_validate({"name": "benchmark", "tokenizer": options}), folder / "corpus", folder / "ours")
    return {"words": report["distinct_words"], "entries": report["vocab_size"], "merges": report["merges"], "seconds": report["seconds"]}


def theirs(folder: Path, size: int) -> dict[str, Any]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    def documents() -> Iterator[str]:
        yield from pq.read_table(folder / "corpus" / "train" / "code" / "00000.parquet").column("text").to_pylist()

    begin = time.perf_counter()
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(special.SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(documents(), trainers.BpeTrainer(
        vocab_size=size - 256, min_frequency=2, show_progress=False, initial_alphabet=alphabet))
    learner.save(str(folder / "theirs.json"))
    return {"timeout": round(time.perf_counter() - begin, 2)}


def alone(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `work` returns, with CPU seconds and the peak memory of the process that did it."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (work, arguments))


def _measured(work: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> dict[str, Any]:
    found = work(*arguments)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return found | {"cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1), "peak_mb": round(usage.ru_maxrss / 1000)}


def merges(path: Path) -> list[list[str]]:
    return [list(pair) for pair in json.loads(path.read_text(encoding="utf-8"))["model"]["merges"]]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megabytes", type=float, default=80.0)
    options.add_argument("--vocab-size", type=int, default=151_552)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        learn, held = texts(given.megabytes)
        write_corpus(folder / "corpus", learn, held)
        print(f"Training: {sum(len(text.encode()) for text in learn) / 1e6:.1f} MB of Python, {len(learn):,} files")
        for name, work in (("lmworks", ours), ("tokenizers", theirs)):
            print(f"  {name:<12}{json.dumps(alone(work, folder, given.vocab_size))}")
        mine, other = merges(folder / "ours" / "tokenizer.json"), merges(folder / "theirs.json")
        print(f"  the same merges, in the same order: {mine == other} ({len(mine):,} and {len(other):,})")

        tokenizer = load(folder / "ours")
        peer = tokenizer.reference
        megabytes = sum(len(text.encode()) for text in held) / 1e6
        spent: dict[str, list[float]] = {"lmworks": [], "tokenizers": []}
        encoders: dict[str, Callable[[], object]] = {
            "lmworks": lambda: tokenizer.encode_batch(held), "tokenizers": lambda: peer.encode_batch_fast(held, add_special_tokens=False)}
        tokenizer.encode_batch(held[:2])
        for _ in range(given.rounds):
            for name, encode in encoders.items():
                begin = time.process_time()
                encode()
                spent[name].append(time.process_time() - begin)
        tokens = sum(map(len, tokenizer.encode_batch(held)))
        print(f"Encoding: {megabytes:.1f} MB held out, {megabytes * 1e6 / tokens:.2f} bytes per token, median of {given.rounds}")
        for name, taken in spent.items():
            print(f"  {name:<12}{megabytes / statistics.median(taken):6.1f} MB per CPU second")


if __name__ == "__main__":
    main()
