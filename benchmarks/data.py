"""Speed of the data path, on the standard library's own text: python benchmarks/data.py

1. Shard writing (read parquet, encode, shuffle, write, hash) in MB of text per second on one and on all cores, beside encoding the same
   text with `tokenizers` alone on as many (its `encode_batch_fast`, the quickest way it has), which writes nothing. They take turns in one
   run; medians are printed, by the clock and by CPU time of all processes, which a busy machine distorts less.
2. The batch pipeline in tokens per second on one core, at steps drawn at random over the whole run, for both packings, and what these
   cut and pad.
3. Starting with 500 sources of 20 shards: seconds and memory up to the first batch.
4. Waiting for data behind storage of 50 MB/s and 5 ms per request, at the rate of the quickstart and at a hundred times that.
"""

# mypy: disable-error-code="misc"
# (lambdas with defaults)
from __future__ import annotations

import argparse
import os
import resource
import statistics
import sysconfig
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.io.run_layout import part_path
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batches import Batches, Prefetch
from lmworks.shards.build import build_shards
from lmworks.shards.indexed import IndexedWriter, fingerprints
from lmworks.shards.manifest import Manifest, Shard, SourceShards, Split
from lmworks.shards.remote import Folder
from lmworks.tokenizer import load
from lmworks.tokenizer.train import train

PARTS = 16


def library_texts(megabytes: float) -> list[str]:
    """Python files of the standard library, in the order of their names, again and again."""
    paths = [path for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")) if "site-packages" not in path.parts]
    texts = [text for path in paths if (text := path.read_text(encoding="utf-8", errors="ignore")).strip()]
    taken: list[str] = []
    size = 0
    while size < megabytes * 1e6:
        text = texts[len(taken) % len(texts)]
        taken.append(text)
        size += len(text.encode())
    return taken


def write_corpus(folder: Path, texts: list[str]) -> None:
    for split, some in (("train", texts), ("validation", texts[:20])):
        for part in range(PARTS if split == "train" else 1):
            mine = some[part::PARTS] if split == "train" else some
            names = [f"code/{part}/{number}" for number in range(len(mine))]
            table = {"id": names, "text": mine, "origin": names} | {key: [key] * len(mine) for key in ("source", "domain", "language")}
            path = part_path(folder, split, "code", part)
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(table), path)


def cpu_seconds() -> float:
    """Of this process and of those it started that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of CPU time."""
    begin, cpu = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - begin, cpu_seconds() - cpu


def recipe_of(length: int, batch: int, vocab_size: int, mixture: dict[str, float], **shards: object) -> Recipe:
    phase = {
        "name": "all",
        "tokens": "100M",
        "mixture": mixture,
        "sequence_length": f"{length} tokens",
        "global_batch_tokens": f"{batch} tokens",
    }
    return Recipe.model_validate({
        "name": "benchmark", "tokenizer": {"vocab_size": vocab_size, "sample_bytes": "4MB"}, "shards": {"max_epochs": 1e6, **shards},
        "train": {"phases": [phase]},
    })


def writing(folder: Path, recipe: Recipe, texts: list[str], rounds: int) -> None:
    megabytes, cores = sum(len(text.encode()) for text in texts) / 1e6, len(os.sched_getaffinity(0))
    tokenizer = load(folder / "tokenizer")
    peer = tokenizer.reference
    tokenizer.encode_batch(texts[:2])
    times: dict[str, list[tuple[float, float]]] = {}
    for number, workers in product(range(rounds), sorted({1, cores})):
        os.environ["RAYON_NUM_THREADS"] = str(workers)
        out, mine = folder / f"shards-{workers}-{number}", recipe.model_copy(update={"threads": workers})
        for name, work in (
            ("tokenizers alone, all cores", lambda: peer.encode_batch_fast(texts, add_special_tokens=False)),
            (
                f"lmworks shards, {workers} processes",
                lambda out=out, mine=mine: build_shards(mine, folder / "corpus", folder / "tokenizer", out),
            ),
        ):
            times.setdefault(name, []).append(seconds(work))
    print(f"Shard writing: {megabytes:.1f} MB of text, {len(texts):,} documents, median of {rounds}; {cores} cores")
    alone = [statistics.median(taken) for taken in zip(*times["tokenizers alone, all cores"], strict=True)]
    for name, taken in times.items():
        clock, cpu = (statistics.median(part) for part in zip(*taken, strict=True))
        by_clock = f"{megabytes / clock:7.1f} MB/s ({alone[0] / clock:5.2f} x)"
        print(f"  {name:<28}{by_clock}{megabytes / cpu:7.1f} MB per CPU second ({alone[1] / cpu:5.2f} x)")


def reading(shards: Path, batch: int, vocab_size: int) -> None:
    print(f"Batches: {batch:,} tokens per step, one core")
    for length, packing in product((512, 2048, 8192), ("concatenate", "best_fit")):
        batches = Batches(recipe_of(length, max(batch, length), vocab_size, {"code": 1.0}, packing=packing), shards)
        steps = np.random.default_rng(0).integers(0, batches.steps, 200).tolist()
        spent, _ = seconds(lambda source=batches, steps=steps: [source.batch(step) for step in steps])
        rate, lost = 200 * max(batch, length) / spent, batches.waste()["code", length]
        cost = f"cuts {lost.cut:.1%} of the documents that fit" if packing == "concatenate" else f"pads {lost.padding:.2%} of the tokens"
        print(f"  T = {length:<6}{packing:<13}{rate / 1e6:8.1f} M tokens/s; {cost}")


def starting(folder: Path, sources: int, shards: int) -> None:
    """Shards that hold little, since what is measured must not depend on it."""
    name = "train/s-00000"
    with IndexedWriter(folder / name, np.dtype("<u2")) as writer:
        for _ in range(200):
            writer.add(np.arange(600))
    _, sums = fingerprints(folder / f"{name}.bin")
    (folder / f"{name}.crc").write_bytes(sums.tobytes())
    one = described(folder, name, writer.tokens, writer.documents)
    made: dict[str, list[Shard]] = {}
    for source, number in product(range(sources), range(shards)):
        prefix = f"train/s{source:03d}-{number:05d}"
        for ending in one.size:
            os.link(folder / f"{name}{ending}", folder / f"{prefix}{ending}")
        made.setdefault(f"s{source:03d}", []).append(one.model_copy(update={"prefix": prefix}))
    write_manifest(folder, made)
    recipe = recipe_of(512, 262_144, 60_000, dict.fromkeys(made, 1 / sources))
    for path in folder.glob("train/*.idx"):
        path.rename(path.with_suffix(".away"))  # so that a start that opened one would fail
    Batches(recipe, folder)  # imports and the table of the mixture
    spent, _ = seconds(lambda: Batches(recipe, folder))
    tracemalloc.start()
    Batches(recipe, folder)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for path in folder.glob("train/*.away"):
        path.rename(path.with_suffix(".idx"))
    batches = Batches(recipe, folder)
    first, again = seconds(lambda: batches.batch(0))[0], seconds(lambda: batches.batch(1))[0]
    size = (folder / "manifest.json").stat().st_size
    print(f"Starting: {sources} sources of {shards} shards, manifest {size / 1e6:.1f} MB, no index opened")
    print(f"  {spent:.2f} s, at most {memory / 1e6:.0f} MB; first batch of 512 sequences {first:.2f} s, second {again:.2f} s")


class Slow(Folder):
    """Storage of so many bytes per second, and so long a wait for each request."""

    def __init__(self, path: Path, rate: float, latency: float) -> None:
        super().__init__(path)
        self._rate, self._latency, self._free, self._lock = rate, latency, time.monotonic(), threading.Lock()

    def read(self, name: str, start: int, stop: int) -> bytes:
        data = super().read(name, start, stop)
        with self._lock:
            self._free = max(self._free, time.monotonic()) + len(data) / self._rate
            until = self._free + self._latency
        time.sleep(max(0.0, until - time.monotonic()))
        return data


def waiting(folder: Path, rate: float, length: int, batch: int) -> None:
    """100M tokens, so that hardly a block is read twice. The first quarter of the steps, in which it gets ahead, is told apart."""
    print(f"Waiting for data: storage of 50 MB/s, 5 ms a request; training at {rate:,.0f} tokens/s, {batch:,} a step of {length:,}")
    for ahead in (0, 64):
        settings = {"dir": str(folder / f"cache-{rate:.0f}-{ahead}"), "max_bytes": "200MB", "prefetch": f"{ahead} steps"}
        storage = Slow(folder, 50e6, 0.005)
        batches = Batches(recipe_of(length, batch, 60_000, {"long": 1.0}, cache=settings), folder, storage=storage)
        steps = max(24, int(6 * rate / batch))
        waits = []
        with Prefetch(batches.batch, 0, steps) as ready:
            for _ in range(steps):
                next(ready)
                waits.append(ready.waited)
                time.sleep(batch / rate)
        share = statistics.mean(waits[steps // 4 :]) / (batch / rate)
        print(f"  read ahead {ahead:>2} steps: waited {share:.2%} of the step time (before that {sum(waits[: steps // 4]):.2f} s)")


def long_source(folder: Path) -> None:
    (folder / "train").mkdir(parents=True)
    name, rng = "train/long-00000", np.random.default_rng(0)
    with IndexedWriter(folder / name, np.dtype("<u2")) as writer:
        while writer.tokens < 100e6:
            writer.add(rng.integers(0, 60_000, int(rng.integers(50, 20_000))))
    _, sums = fingerprints(folder / f"{name}.bin")
    (folder / f"{name}.crc").write_bytes(sums.tobytes())
    shard = described(folder, name, writer.tokens, writer.documents)
    write_manifest(folder, {"long": [shard]})


def described(folder: Path, name: str, tokens: int, documents: int) -> Shard:
    files = {ending: folder / f"{name}{ending}" for ending in (".bin", ".idx", ".crc")}
    sha256 = {ending: fingerprints(path)[0] for ending, path in files.items()}
    size = {ending: path.stat().st_size for ending, path in files.items()}
    return Shard(prefix=name, tokens=tokens, documents=documents, sha256=sha256, size=size)


def write_manifest(folder: Path, sources: dict[str, list[Shard]]) -> None:
    listed = []
    for name, shards in sources.items():
        tokens, documents = sum(shard.tokens for shard in shards), sum(shard.documents for shard in shards)
        split = Split(tokens=tokens, bytes=tokens, documents=documents, inputs=name, shards=tuple(shards))
        listed.append(SourceShards(name=name, domain="d", train=split))
    about = {"seed": 1, "vocab_size": 60_000, "dtype": "uint16", "tokenizer_sha256": "0" * 64, "token_bytes_sha256": "0" * 64}
    Manifest(**about, sources=tuple(listed)).save(folder / "manifest.json")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megabytes", type=float, default=32.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--vocab-size", type=int, default=8192)
    options.add_argument("--batch", type=int, default=16_384, help="tokens per step")
    options.add_argument("--sources", type=int, default=500)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = library_texts(given.megabytes)
        write_corpus(folder / "corpus", texts)
        recipe = recipe_of(512, given.batch, given.vocab_size, {"code": 1.0})
        train(recipe, folder / "corpus", folder / "tokenizer")
        writing(folder, recipe, texts, given.rounds)
        reading(folder / "shards-1-0", given.batch, given.vocab_size)
        (folder / "many" / "train").mkdir(parents=True)
        starting(folder / "many", given.sources, 20)
        long_source(folder / "long")
        waiting(folder / "long", 8_700, 512, given.batch)
        waiting(folder / "long", 1e6, 2048, given.batch)


if __name__ == "__main__":
    main()
