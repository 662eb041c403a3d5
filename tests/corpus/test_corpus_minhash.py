"""Sketches against exact Jaccard similarity, the search in bands, and pairs and clusters against what was planted."""

from __future__ import annotations

import random
import sysconfig
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.corpus.dedup.near import (
    Clusters,
    Sketching,
    StackedArrays,
    band_keys,
    candidate_probability,
    candidates,
    classify_pairs,
    distinct_shingles,
    jaccard,
    shingles,
    similarity,
    sketches,
)
from lmworks.corpus.units import ngrams, units

SKETCHING = Sketching.of(5, 256, None, 0.8)


def real_texts(count: int) -> list[str]:
    """Pieces of about 200 words of the standard library."""
    words = " ".join(path.read_text("utf-8") for path in sorted(Path(sysconfig.get_path("stdlib"), "email").glob("*.py"))).split()
    return [" ".join(words[start : start + 200]) for start in range(0, 200 * count, 200)]


def altered(text: str, share: float, random_: random.Random) -> str:
    return " ".join(f"changed{random_.random()}" if random_.random() < share else word for word in text.split())


@cache
def _ngrams(text: str) -> frozenset[int]:
    return frozenset(ngrams(units([text]).hashes, 5).tolist())


def exact(left: str, right: str) -> float:
    a, b = _ngrams(left), _ngrams(right)
    return len(a & b) / len(a | b)


def sets_of(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    return distinct_shingles(*shingles(units(texts), 5, range(len(texts))))


def near(texts: list[str], threshold: float) -> set[tuple[int, int]]:
    """All pairs that the search calls alike."""
    sketching = Sketching.of(5, 256, None, threshold)
    table = sketches(units(texts), sketching)
    limits = np.full(len(texts), threshold)
    found: set[tuple[int, int]] = set()
    for keys in band_keys(table, sketching):
        sure, doubtful = classify_pairs(candidates(keys), StackedArrays([table]), limits, sketching)
        alike = jaccard(doubtful, np.arange(len(texts)), *sets_of(texts)) >= threshold
        found |= {tuple(pair) for pair in np.concatenate((sure, doubtful[alike])).tolist()}
    return found


@pytest.mark.parametrize("words", [12, 40, 200, 3000])
def test_the_estimate_is_that_of_256_values_whatever_the_length(words: int) -> None:
    """The standard deviation of an estimate is about sqrt(J(1-J)/256) <= 0.031; short documents throw their shingles many times."""
    rng = random.Random(1)
    every = " ".join(real_texts(150)).split()
    texts = [" ".join(every[start : start + words]) for start in range(0, len(every) - words, max(words, (len(every) - words) // 60))]
    pairs = [(text, altered(text, share, rng)) for text in texts for share in (0.02, 0.1)]
    rows = sketches(units([text for pair in pairs for text in pair]), SKETCHING)
    error = similarity(rows[::2], rows[1::2]) - np.array([exact(*pair) for pair in pairs])
    assert len(pairs) > 15
    assert np.sqrt((error**2).mean()) < 0.033
    assert abs(error.mean()) < 0.08 / np.sqrt(len(pairs))


def test_unlike_texts_are_estimated_as_unlike() -> None:
    rows = sketches(units(real_texts(60)), SKETCHING)
    left, right = np.array(list(combinations(range(60), 2))).T
    assert similarity(rows[left], rows[right]).mean() < 0.01


def test_sketches_do_not_depend_on_the_batch() -> None:
    texts = [*real_texts(5), "too short", "", "a b c d e f g h"]
    together = sketches(units(texts), SKETCHING)
    alone = np.concatenate([sketches(units([text]), SKETCHING) for text in texts])
    assert np.array_equal(together, alone)
    assert np.array_equal(sketches(units(texts), SKETCHING, [1, 3]), together[[1, 3]])
    assert np.array_equal(sketches(units(texts * 40), SKETCHING), np.concatenate([together] * 40))


def test_texts_without_words_are_near_to_nothing() -> None:
    keys = band_keys(sketches(units(["!!!", "???", "", "one", "one"]), SKETCHING), SKETCHING)
    assert all(candidates(band).tolist() == [[3, 4]] for band in keys)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_bands_find_99_percent_at_the_threshold_and_are_as_selective_as_that_allows(threshold: float) -> None:
    found = Sketching.of(5, 256, None, threshold)
    assert candidate_probability(threshold, found.bands, found.rows) >= 0.99
    assert candidate_probability(threshold, 256 // (found.rows + 1), found.rows + 1) < 0.99


def test_pairs_found_are_the_pairs_there_are() -> None:
    """Recall and precision on real text with copies of graded likeness, many right at the threshold."""
    rng = random.Random(2)
    texts = real_texts(60)
    texts += [altered(text, share, rng) for text in texts for share in (0.01, 0.015, 0.02, 0.025, 0.03, 0.05)]
    wanted = {(a, b) for a, b in combinations(range(len(texts)), 2) if (a % 60 == b % 60 or a < 60) and exact(texts[a], texts[b]) >= 0.8}
    found = {(a, b) for a, b in near(texts, 0.8) if a % 60 == b % 60 or a < 60}
    close = [pair for pair in wanted if exact(texts[pair[0]], texts[pair[1]]) < 0.84]
    assert len(wanted) > 150
    assert len(close) > 15
    assert len(wanted & found) >= 0.97 * len(wanted)
    assert found <= wanted


def test_chinese_is_compared_by_characters() -> None:
    text = (
        "您是飯店的禮賓服務員我們的化妝鏡設計考慮使用者便利性包括易於安裝的壁掛支"
        "架可調高度桌鏡折疊式旅行鏡以及智慧感應鏡功能自動亮度調整語音啟動指令"
    )
    rows = sketches(units([text, text.replace("智慧", "普通", 1), text[::-1]]), SKETCHING)
    assert similarity(rows[:1], rows[1:2])[0] > 0.6
    assert similarity(rows[:1], rows[2:])[0] < 0.1


def test_a_crowded_bucket_costs_less_than_its_square_and_stays_together() -> None:
    keys = np.full(500, 7, dtype=np.uint64)
    pairs = candidates(keys)
    clusters = Clusters(500)
    clusters.join(pairs)
    assert len(pairs) < 500 * 34
    assert not clusters.firsts.any()


def test_the_later_row_decides_how_alike_is_alike() -> None:
    rng = random.Random(3)
    text = real_texts(1)[0]
    texts = [text, altered(text, 0.04, rng)]
    table = sketches(units(texts), SKETCHING)
    likeness = exact(*texts)
    assert 0.55 < likeness < 0.85
    pair = np.array([[0, 1]])
    for limits, expected in (([0.99, 0.3], 1), ([0.3, 0.99], 0), ([0.3, np.inf], 0), ([np.inf, 0.3], 1)):
        sure, doubtful = classify_pairs(pair, StackedArrays([table]), np.array(limits), SKETCHING)
        assert (len(sure), len(doubtful)) == (expected, 0)


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(0, 29)), max_size=40), st.integers(1, 5))
def test_clusters_are_connected_components_in_any_order(count: int, edges: list[tuple[int, int]], pieces: int) -> None:
    pairs = np.array([sorted((a % count, b % count)) for a, b in edges], dtype=np.int64).reshape(-1, 2)
    first = list(range(count))
    for _ in range(count):
        for a, b in pairs.tolist():
            first[a] = first[b] = min(first[a], first[b])
    clusters = Clusters(count)
    for piece in np.array_split(pairs[::-1], pieces):
        clusters.join(piece)
    assert clusters.firsts.tolist() == first
    assert not len(clusters.apart(pairs))


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_stacked_parts_are_one_array(sizes: list[int]) -> None:
    whole = np.arange(2 * sum(sizes)).reshape(-1, 2)
    stacked = StackedArrays(np.split(whole, np.cumsum(sizes)[:-1]))
    rows = np.random.default_rng(0).integers(0, len(whole), 20)
    assert len(stacked) == len(whole)
    assert np.array_equal(stacked[rows], whole[rows])


def test_exact_similarity_of_many_pairs_is_that_of_each() -> None:
    rng = random.Random(4)
    texts = [altered(text, 0.1 * (number % 4), rng) for number, text in enumerate(real_texts(12) * 2)]
    pairs = np.array(list(combinations(range(24), 2)))
    found = jaccard(pairs, np.arange(24), *sets_of(texts))
    assert found == pytest.approx([exact(texts[a], texts[b]) for a, b in pairs.tolist()])
