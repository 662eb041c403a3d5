"""MinHash against exact Jaccard similarity, and clusters against what was planted."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np

from lmworks.corpus.minhash import candidates, duplicates, signatures, similarity
from lmworks.corpus.units import ngrams, units


def real_texts(count: int) -> list[str]:
    """Pieces of about 200 words of the standard library."""
    words = " ".join(path.read_text("utf-8") for path in sorted(Path(sysconfig.get_path("stdlib"), "email").glob("*.py"))).split()
    return [" ".join(words[start : start + 200]) for start in range(0, 200 * count, 200)]


def altered(text: str, share: float, random_: random.Random) -> str:
    return " ".join(f"changed{random_.random()}" if random_.random() < share else word for word in text.split())


def jaccard(left: str, right: str) -> float:
    a, b = (set(ngrams(units([text]).hashes, 5).tolist()) for text in (left, right))
    return len(a & b) / len(a | b)


def test_the_estimate_is_that_of_112_permutations() -> None:
    """The standard deviation of an estimate is sqrt(J(1-J)/112) <= 0.047, so the mean error over 120 pairs must be near 0.03."""
    rng = random.Random(1)
    texts = real_texts(60)
    pairs = [(text, altered(text, share, rng)) for text in texts for share in (0.01, 0.05)]
    rows = signatures(units([text for pair in pairs for text in pair]), 5, 112)
    order = np.arange(0, len(rows), 2)
    estimated = similarity(rows, order, order + 1)
    exact = np.array([jaccard(*pair) for pair in pairs])
    assert exact.min() < 0.75
    assert exact.max() > 0.9
    assert np.abs(estimated - exact).mean() < 0.04
    assert abs((estimated - exact).mean()) < 0.012


def test_signatures_do_not_depend_on_the_batch() -> None:
    texts = [*real_texts(5), "too short", ""]
    together = signatures(units(texts), 5, 112)
    alone = np.concatenate([signatures(units([text]), 5, 112) for text in texts])
    assert np.array_equal(together, alone)
    assert np.array_equal(signatures(units(texts), 5, 112, [1, 3]), together[[1, 3]])


def test_near_duplicates_are_found_and_the_first_is_kept() -> None:
    rng = random.Random(2)
    texts = real_texts(80)
    copies = [altered(text, 0.01, rng) for text in texts[:40]]
    similar = [place for place in range(40) if jaccard(texts[place], copies[place]) >= 0.85]
    found = duplicates(signatures(units(texts + copies), 5, 112), 14, 0.8)
    originals = found[:80]
    assert (originals == np.arange(80)).sum() >= 78  # the library itself repeats a licence here and there
    caught = sum(found[80 + place] != 80 + place for place in similar)
    assert len(similar) >= 30
    assert caught >= 0.9 * len(similar)
    assert all(found[80 + place] in (80 + place, place) for place in similar)


def test_clusters_are_transitive_and_named_by_their_first() -> None:
    base = np.arange(112, dtype=np.uint32)
    second, other = base.copy(), base + 1000
    second[:12] += 500  # 0.89 like the base
    third = second.copy()
    third[12:24] += 500  # 0.89 like the second, 0.79 like the base
    found = duplicates(np.stack([other, base, second, third]), 14, 0.85)
    assert found.tolist() == [0, 1, 1, 1]


def test_dissimilar_documents_in_one_bucket_are_kept_apart() -> None:
    rows = np.random.default_rng(0).integers(0, 2**32, (6, 112), dtype=np.uint32)
    rows[:, :8] = 7
    assert len(candidates(rows, 14)) == 15
    assert duplicates(rows, 14, 0.8).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_crowded_bucket_costs_less_than_its_square() -> None:
    rows = np.zeros((500, 112), dtype=np.uint32)
    assert len(candidates(rows, 14)) < 500 * 40
    assert duplicates(rows, 14, 0.8).tolist() == [0] * 500


def test_chinese_is_compared_by_characters() -> None:
    text = (
        "您是飯店的禮賓服務員我們的化妝鏡設計考慮使用者便利性包括易於安裝的壁掛支"
        "架可調高度桌鏡折疊式旅行鏡以及智慧感應鏡功能自動亮度調整語音啟動指令"
    )
    changed = text.replace("智慧", "普通", 1)
    rows = signatures(units([text, changed, text[::-1]]), 5, 112)
    assert similarity(rows, np.array([0]), np.array([1]))[0] > 0.6
    assert similarity(rows, np.array([0]), np.array([2]))[0] < 0.1
