"""Near-duplicates: what is found of what is there, how fast, and what it costs at scale: python benchmarks/minhash.py

1. Recall and precision against exact Jaccard similarity of word 5-grams, threshold 0.8, on the quickstart's sources with copies planted
   at every likeness from 0.55 to 1 (words replaced, passages left out, passages put in). The truth is complete: all pairs, found by their
   rarest shingles (prefix filtering, Bayardo et al. 2007). A document counts as a near-duplicate if an earlier one is alike.
   rensa and datasketch take the same documents where they are installed (`pip install rensa datasketch`), each with 256 permutations,
   the bands it takes by itself (rensa: ours), and a check of each candidate by its own estimate.
2. Seconds per million documents and bytes held per document of each stage, on synthetic sketches, doubling their number.
"""

# mypy: disable-error-code="misc"
# (lambdas with defaults)
from __future__ import annotations

import argparse
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from lmworks.corpus.dedup.near import (
    Clusters,
    Sketching,
    StackedArrays,
    band_keys,
    candidates,
    classify_pairs,
    distinct_shingles,
    jaccard,
    shingles,
    sketches,
    unique_pairs,
)
from lmworks.corpus.dedup.signatures import find_copies
from lmworks.corpus.read import Part, parts, read
from lmworks.corpus.transform.cleaning import clean
from lmworks.corpus.units import units
from lmworks.errors import Unavailable
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.corpus import Source

THRESHOLD, NGRAM, VALUES = 0.8, 5, 256


def real_texts(recipe: Path, count: int) -> list[str]:
    """Documents of the recipe's sources in turn, the long ones cut to 6,000 characters."""
    readers: list[Iterator[str]] = []
    for source in load_recipe(recipe).recipe.corpus.sources:
        try:
            readers.append(_texts(source, parts(source, 1 << 24)))
        except Unavailable as reason:
            print(f"  without {source.name}: {reason}")
    share = -(-count // len(readers))
    return list(dict.fromkeys(text for reader in readers for text in islice(reader, share)))


def _texts(source: Source, found: list[Part]) -> Iterator[str]:
    for part in found:
        for item in read(source, part, 1 << 24):
            if item.reason is None and len(item.text) > 200:
                yield clean(item.text)[:6000]


def altered(text: str, random_: random.Random) -> str:
    """A near copy: some words replaced, or a passage left out, or one put in."""
    words = text.split(" ")
    share, kind = random_.random(), random_.randrange(3)
    first = random_.randrange(len(words))
    if kind == 0:
        return " ".join(str(random_.random()) if random_.random() < 0.065 * share else word for word in words)
    span = int(len(words) * 0.4 * share)
    if kind == 1:
        return " ".join(words[:first] + words[first + span :])
    return " ".join(words[:first] + [random_.choice(words) for _ in range(span)] + words[first:])


def all_alike(texts: list[str]) -> set[int]:
    """The documents that are exactly alike to an earlier one."""
    values, bounds = sets_of(texts)
    _, rank = np.unique(values, return_inverse=True)
    commonness = np.bincount(rank)[rank]
    postings: dict[int, list[int]] = {}
    pairs: set[tuple[int, int]] = set()
    for document in range(len(texts)):
        span = slice(bounds[document], bounds[document + 1])
        order = np.lexsort((values[span], commonness[span]))
        prefix = len(order) - int(np.ceil(THRESHOLD * len(order))) + 1
        for shingle in values[span][order[:prefix]].tolist():
            earlier = postings.setdefault(shingle, [])
            pairs.update((other, document) for other in earlier)
            earlier.append(document)
    every = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
    alike = jaccard(every, np.arange(len(texts)), values, bounds) >= THRESHOLD
    return set(every[alike, 1].tolist())


def sets_of(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return distinct_shingles(*shingles(units(texts), NGRAM, range(len(texts))))


def ours(texts: list[str]) -> tuple[set[int], dict[str, float]]:
    """The documents found, and CPU seconds by stage."""
    sketching = Sketching.of(NGRAM, VALUES, None, THRESHOLD)
    times: dict[str, float] = {}
    begin = time.process_time()
    split = [units(texts[first : first + 200]) for first in range(0, len(texts), 200)]
    times["words"] = time.process_time() - begin
    begin = time.process_time()
    table = np.concatenate([sketches(batch, sketching) for batch in split])
    keys = band_keys(table, sketching)
    times["sketches"] = time.process_time() - begin
    begin = time.process_time()
    limits, stacked = np.full(len(texts), THRESHOLD), StackedArrays([table])
    found, doubtful = set(), []
    for band in keys:
        sure, open_ = classify_pairs(candidates(band), stacked, limits, sketching)
        found.update(sure[:, 1].tolist())
        doubtful.append(open_)
    times["bands"] = time.process_time() - begin
    begin = time.process_time()
    pairs = unique_pairs(np.concatenate(doubtful))
    pairs = pairs[~np.isin(pairs[:, 1], list(found))]
    rows = np.unique(pairs)
    chosen = [sets_of([texts[row] for row in rows[first : first + 200]]) for first in range(0, len(rows), 200)]
    bounds = np.concatenate(([0], np.cumsum(np.concatenate([np.diff(ends) for _, ends in chosen]))))
    alike = jaccard(pairs, rows, np.concatenate([values for values, _ in chosen]), bounds) >= THRESHOLD
    found.update(pairs[alike, 1].tolist())
    times[f"exactly, {len(pairs):,} pairs"] = time.process_time() - begin
    return found, times


def _token_sets(texts: list[str]) -> list[list[str]]:
    """The same shingles for the peers, as strings."""
    words = []
    for text in texts:
        split = units([text])
        words.append([text[start:end].lower() for start, end in zip(split.starts.tolist(), split.ends.tolist(), strict=True)])
    return [list({" ".join(some[place : place + NGRAM]) for place in range(max(len(some) - NGRAM + 1, 1))}) for some in words]


def rensa(texts: list[str]) -> set[int]:
    from rensa import RMinHash, RMinHashLSH

    made = RMinHash.from_token_sets(_token_sets(texts), num_perm=VALUES, seed=1)
    index, found = RMinHashLSH(threshold=THRESHOLD, num_perm=VALUES, num_bands=32), set()
    for number, one in enumerate(made):
        if any(made[other].jaccard(one) >= THRESHOLD for other in index.query(one)):
            found.add(number)
        index.insert(number, one)
    return found


def datasketch(texts: list[str]) -> set[int]:
    from datasketch import MinHash, MinHashLSH

    made = list(MinHash.generator([[token.encode() for token in tokens] for tokens in _token_sets(texts)], num_perm=VALUES))
    index, found = MinHashLSH(threshold=THRESHOLD, num_perm=VALUES), set()
    for number, one in enumerate(made):
        if any(made[other].jaccard(one) >= THRESHOLD for other in index.query(one)):
            found.add(number)
        index.insert(number, one)
    return found


def quality(recipe: Path, count: int) -> None:
    rng = random.Random(1)
    originals = real_texts(recipe, count)
    texts = originals + [altered(text, rng) for text in originals for _ in range(2)]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    begin = time.process_time()
    truth = all_alike(texts)
    spent = time.process_time() - begin
    print(f"{len(texts):,} documents, {megabytes:.1f} MB, {len(truth):,} alike to an earlier one (truth in {spent:.0f} s)")
    print("one core, CPU seconds")

    def tell(name: str, found: set[int], seconds: float) -> None:
        right = len(found & truth)
        rates = f"recall {right / len(truth):.4f}  precision {right / max(len(found), 1):.4f}"
        print(f"  {name:<12}{rates}  {len(texts) / seconds:9,.0f} documents/s  {megabytes / seconds:6.1f} MB/s")

    found, times = ours(texts)
    tell("lmworks", found, sum(times.values()))
    print("    " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()))
    for peer in (rensa, datasketch):
        begin = time.process_time()
        try:
            found = peer(texts)
        except ImportError:
            print(f"  {peer.__name__:<12}not installed")
            continue
        tell(peer.__name__, found, time.process_time() - begin)


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds, bytes allocated at most)."""
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, float(peak)


def scale(millions: list[float]) -> None:
    sketching = Sketching.of(NGRAM, VALUES, None, THRESHOLD)
    print(f"At scale, on synthetic sketches of which a tenth have a near copy; {VALUES} values, {sketching.bands} bands")
    with tempfile.TemporaryDirectory() as folder:
        for number in millions:
            count = int(number * 1e6)
            table = np.lib.format.open_memmap(Path(folder) / "sketches.npy", mode="w+", dtype=np.uint8, shape=(count, VALUES))
            rng = np.random.default_rng(0)
            for first in range(0, count, 1 << 18):
                table[first : first + (1 << 18)] = rng.integers(0, 256, (min(1 << 18, count - first), VALUES), dtype=np.uint8)
            original, copy = np.split(rng.permutation(count)[: count // 5], 2)
            for first in range(0, len(copy), 1 << 18):
                some = table[original[first : first + (1 << 18)]]
                changed = rng.random(some.shape, dtype=np.float32) < 0.12
                some[changed] += 1
                table[copy[first : first + (1 << 18)]] = some
            text_keys = rng.integers(0, 2**63, (count, 2), dtype=np.uint64)
            band = np.ascontiguousarray(table[:, : sketching.rows]).view(np.uint64).ravel()
            limits, stacked = np.full(count, THRESHOLD, dtype=np.float32), StackedArrays([table])
            pairs = classify_pairs(candidates(band), stacked, limits, sketching)[0]

            def join(count: int = count, pairs: np.ndarray = pairs) -> None:
                Clusters(count).join(pairs)

            stages: dict[str, Callable[[], object]] = {
                "equal texts": lambda keys=text_keys: find_copies(keys),
                "a band": lambda band=band, stacked=stacked, limits=limits: classify_pairs(candidates(band), stacked, limits, sketching),
                "clusters": join,
            }
            told = []
            for name, work in stages.items():
                seconds, peak = measured(work)
                told.append(f"{name} {seconds / number:5.2f} s per million, {peak / count:5.1f} bytes per document")
            print(f"  {number:4g} million: " + "; ".join(told))
    print(f"  on disk {VALUES + 8 * sketching.bands + 32} bytes per document")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "recipes" / "quickstart.yaml")
    options.add_argument("--documents", type=int, default=4000, help="before copies are planted, two of each")
    options.add_argument("--millions", type=float, nargs="*", default=[1, 2, 4])
    given = options.parse_args()
    quality(given.recipe, given.documents)
    scale(given.millions)


if __name__ == "__main__":
    main()
