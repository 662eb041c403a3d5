"""Repeated passages against a plain twin that compares every run with every other."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from lmworks.corpus.dedup.substring import anchors, candidate_runs, cut_runs, occurred_earlier, repeated_values, repeats_within
from lmworks.corpus.units import units

LENGTH = 16


def plain(texts: list[str], length: int) -> set[tuple[int, int]]:
    """(document, word) where a run begins that stood earlier."""
    seen: set[tuple[str, ...]] = set()
    found = set()
    for document, text in enumerate(texts):
        words = text.split()
        for place in range(len(words) - length + 1):
            run = tuple(words[place : place + length])
            if run in seen:
                found.add((document, place))
            seen.add(run)
    return found


def found_of(texts: list[str], length: int, sizes: int) -> set[tuple[int, int]]:
    """The same by anchors, in batches of `sizes` documents."""
    batches = [(first, units(texts[first : first + sizes])) for first in range(0, len(texts), sizes)]
    common = repeated_values(np.concatenate([anchors(batch, length)[:, 2] for _, batch in batches]))
    rows = np.concatenate([candidate_runs(batch, length, common) + np.array([first, 0, 0]) for first, batch in batches])
    return {(document, place) for document, place, _ in rows[occurred_earlier(rows[:, 2])].tolist()}


def mixed(seed: int) -> list[str]:
    """Documents of few different words, with passages of many lengths copied about, some twice in one."""
    rng = random.Random(seed)
    passages = [[f"p{number}x{rng.randrange(9)}" for _ in range(rng.randrange(8, 60))] for number in range(6)]
    texts = []
    for _ in range(rng.randrange(1, 25)):
        words = []
        for _ in range(rng.randrange(6)):
            words += [f"f{rng.randrange(10**6)}" for _ in range(rng.randrange(30))]
            if rng.random() < 0.5:
                words += rng.choice(passages)[rng.randrange(4) :]
        texts.append(" ".join(words))
    return texts


@pytest.mark.parametrize("seed", range(30))
def test_every_run_that_stood_earlier_is_found_and_no_other(seed: int) -> None:
    texts = mixed(seed)
    expected = plain(texts, LENGTH)
    assert found_of(texts, LENGTH, 3) == expected
    assert found_of(texts, LENGTH, 100) == expected


def test_there_is_something_to_find() -> None:
    assert sum(len(plain(mixed(seed), LENGTH)) for seed in range(30)) > 500


def test_anchors_are_few() -> None:
    text = " ".join(path.read_text("utf-8") for path in sorted(Path(sysconfig.get_path("stdlib"), "email").glob("*.py")))
    batch = units([text])
    assert len(anchors(batch, 50)) < 0.1 * len(batch.hashes)


def test_a_file_repeated_in_one_document_is_cut_to_one() -> None:
    source = Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text("utf-8")
    batch = units([f"{source}\n{source}\n{source}", source])
    assert not len(repeats_within(batch, 1, 50))
    left, share = cut_runs(f"{source}\n{source}\n{source}", batch.starts[: batch.bounds[1]], repeats_within(batch, 0, 50), 50)
    assert left.startswith(source.strip())
    assert len(left) < len(source) + 10  # the quotes before the first word of a copy
    assert share == pytest.approx(1 / 3, abs=0.01)


def test_what_is_cut_leaves_the_lines_around_it() -> None:
    passage = " ".join(f"word{number}" for number in range(20))
    text = f"Before.\n\n{passage}.\n\nBetween, too.\n{passage}!\nAfter."
    batch = units([text])
    left, share = cut_runs(text, batch.starts, repeats_within(batch, 0, 20), 20)
    assert left == f"Before.\n\n{passage}.\n\nBetween, too.\nAfter."
    assert share == pytest.approx(24 / 44)


@pytest.mark.parametrize("text", ["", "a", "a " * 15, "... --- ...", "b " * 17])
def test_short_and_odd_texts(text: str) -> None:
    batch = units([text])
    assert found_of([text], LENGTH, 1) == plain([text], LENGTH)
    assert len(repeats_within(batch, 0, LENGTH)) == len(plain([text], LENGTH))
    assert cut_runs(text, batch.starts, np.zeros(0, dtype=np.int64), LENGTH)[0] == text
