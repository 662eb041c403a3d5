"""RULER's aggregation tasks: common words extraction (cwe) and frequent words extraction (fwe) (arXiv:2404.06654, section 3.3)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from random import Random
from string import ascii_lowercase

from lmworks.evaluate.generation.ruler.drafts import Draft
from lmworks.evaluate.generation.ruler.texts import words

COMMON = 10
_LONG = 4096  # tokens from which on words are repeated as often as in the paper
_CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_ALPHA = 2.0  # of the Zipf distribution
_ZETA = math.pi**2 / 6
_LETTERS = 6  # of a coded word


def common_words(rng: Random, length: int, folder: str | None) -> tuple[Draft, ...]:
    """A numbered list in which ten words are more frequent than all others, after one small solved example.

    From 4,096 tokens on a common word appears 30 times and any other 3 times, below 6 times and once. The second draft is for tokenizers
    to which a list with the higher numbers is too long.
    """
    small = _common(rng.getrandbits(64), 6, 1, example=(10, 3, 1))
    return (_common(rng.getrandbits(64), 30, 3, example=(30, 10, 3)), small) if length >= _LONG else (small,)


def _common(seed: int, often: int, rarely: int, example: tuple[int, int, int]) -> Draft:
    """`example`: uncommon words of the solved example, and how often its common and uncommon words appear."""
    rng = Random(seed)
    drawn = _words(rng)
    shown, answers = list(islice(drawn, COMMON)), list(islice(drawn, COMMON))
    uncommon, often_shown, rarely_shown = example
    entries = [*(shown * often_shown), *(list(islice(drawn, uncommon)) * rarely_shown)]
    rng.shuffle(entries)
    solved = f"{_list_task(entries)}{_CWE_PREFIX} {_numbered(shown)}\n"
    others: list[str] = []

    def render(size: int) -> str:
        while len(others) * rarely < size:
            others.append(next(drawn))
        entries = [*(answers * often), *[word for word in others for _ in range(rarely)][:size]]
        Random(f"{seed}/{size}").shuffle(entries)
        return solved + _list_task(entries)

    return Draft(render, _CWE_PREFIX, tuple(answers), least=0)


def _words(rng: Random) -> Iterator[str]:
    """English words, each once, in random order; behind them pairs of words, without end."""
    single = words().all
    yield from rng.sample(single, len(single))
    drawn: set[str] = set()
    while True:
        pair = f"{rng.choice(single)}-{rng.choice(single)}"
        if pair not in drawn:
            drawn.add(pair)
            yield pair


def _numbered(entries: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))


def _list_task(entries: list[str]) -> str:
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n"
        f"{_numbered(entries)}\nQuestion: What are the 10 most common words in the above list?"
    )


def frequent_words(rng: Random, length: int, folder: str | None) -> tuple[Draft, ...]:
    """Coded words whose frequencies follow a Zipf distribution. The most frequent one is replaced by dots; the next three are asked
    for."""
    drawn: set[str] = set()
    while len(drawn) < max(50, length // 50):
        drawn.add("".join(rng.choices(ascii_lowercase, k=_LETTERS)))
    coded = sorted(drawn)
    rng.shuffle(coded)
    coded[0] = "..."
    seed = rng.getrandbits(64)

    def render(size: int) -> str:
        counts = (int(size * rank**-_ALPHA / _ZETA) for rank in range(1, len(coded) + 1))
        entries = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        Random(f"{seed}/{size}").shuffle(entries)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words."
            f" {' '.join(entries)}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?"
        )

    prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"
    return (Draft(render, prefix, tuple(coded[1:4]), least=_DISTINCT),)


_DISTINCT = 53  # from this size on the counts of the three words differ, and any other word is less frequent
