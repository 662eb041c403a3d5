"""The published rule sets Gopher, C4 and FineWeb, with their own definitions of words and lines.

Gopher: Rae et al. 2021, A1.1 and table A1. C4: Raffel et al. 2020, 2.2, with the phrases of its code. FineWeb: Penedo et al. 2024, 3.6.
They are made for web text; the rules per domain in `table` cover everything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from lmworks.corpus.document import Drop
from lmworks.corpus.transform.published_words import Vocabulary, Words
from lmworks.corpus.transform.rule_table import Rule, first_broken
from lmworks.corpus.units import extend_ngrams, in_repeated_ngram, mix
from lmworks.text.letters import SENTENCE_ENDS

_PARAGRAPHS = re.compile(r"\n{2,}")


def _prose_words(doc: Words) -> float:
    return float((~doc.symbols).sum())


def _mean_length(doc: Words) -> float:
    return float(doc.lengths[~doc.symbols].mean())


def _hashes(doc: Words) -> float:
    return doc.text.count("#") / len(doc.numbers)


def _ellipses(doc: Words) -> float:
    return (doc.text.count("...") + doc.text.count("…")) / len(doc.numbers)


def _bullets(doc: Words) -> float:
    lines = doc.text.splitlines()
    return sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)


def _ellipsis_lines(doc: Words) -> float:
    lines = doc.text.splitlines()
    return sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)


def _lettered(doc: Words) -> float:
    return float(doc.letters.mean())


def _stop_words(doc: Words) -> float:
    """Number of distinct stop words that occur in lower case; two for languages without a list."""
    return float(np.isin(doc.stops, doc.numbers).sum()) if len(doc.stops) else 2.0


def _repeats(parts: Sequence[str]) -> tuple[float, int]:
    """(fraction of repeated parts, their characters)"""
    again = len(parts) - len(unique := set(parts))
    return again / len(parts), sum(map(len, parts)) - sum(map(len, unique)) if again else 0


def _paragraphs(doc: Words) -> float:
    return _repeats(_PARAGRAPHS.split(doc.text.strip()))[0]


def _paragraph_characters(doc: Words) -> float:
    return _repeats(_PARAGRAPHS.split(doc.text.strip()))[1] / len(doc.text)


def _split_lines(text: str) -> list[str]:
    """Equal to `re.split("\\n+", text)`, but many times faster."""
    lines = [line for line in text.split("\n") if line]
    return [*([""] if text[:1] == "\n" else []), *lines, *([""] if text[-1:] == "\n" else [])]


def _lines(doc: Words) -> float:
    return _repeats(_split_lines(doc.text))[0]


def _line_characters(doc: Words) -> float:
    return _repeats(_split_lines(doc.text))[1] / len(doc.text)


def _grams(doc: Words, n: int) -> np.ndarray:
    """Hashes of the runs of n words. They are extended from the previous n, because rules use increasing n."""
    known, grams = doc.__dict__.get("_grams", (1, doc.hashes))
    if known > n:
        known, grams = 1, doc.hashes
    grams = grams.copy()
    for length in range(known + 1, n + 1):
        extend_ngrams(grams := grams[: max(len(doc.hashes) - length + 1, 0)], doc.hashes, length)
    doc.__dict__["_grams"] = n, grams
    return mix(grams.copy())


class _Top:
    """Characters of the most frequent n-gram, blanks included, times its count, as a fraction of all characters."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __call__(self, doc: Words) -> float:
        if len(doc.numbers) < self._n:
            return 0.0
        _, first, counts = np.unique(_grams(doc, self._n), return_index=True, return_counts=True)
        most = counts.max()
        place = first[counts == most].min()
        return float(most * (doc.lengths[place : place + self._n].sum() + self._n - 1) / len(doc.text))


class _Repeated:
    """Characters of repeated n-grams as a fraction of all characters, scanning from left to right and continuing after each repeated
    n-gram.

    The characters in any repeated n-gram are an upper bound: if their fraction does not exceed `high`, it is returned instead.
    """

    def __init__(self, n: int, high: float) -> None:
        self._n, self._high = n, high

    def __call__(self, doc: Words) -> float:
        grams = _grams(doc, self._n)
        if not len(grams):
            return 0.0
        share = float(doc.lengths[in_repeated_ngram(grams, self._n)].sum() / len(doc.text))
        return share if share <= self._high else self._scan(doc, grams)

    def _scan(self, doc: Words, grams: np.ndarray) -> float:
        """The exact definition. Only n-grams with an earlier equal one are visited; an n-gram counts if an equal one was scanned before.

        The first occurrence was scanned unless it lies inside a repeated n-gram.
        """
        n, total, behind = self._n, 0, 0
        ends = np.concatenate([[0], np.cumsum(doc.lengths)])
        _, first, kind = np.unique(grams, return_index=True, return_inverse=True)
        heads = first[kind]
        places = np.flatnonzero(heads != np.arange(len(grams)))
        passed = bytearray(len(grams) + n)
        read: set[int] = set()
        for place, head in zip(places.tolist(), heads[places].tolist(), strict=True):
            if place < behind:
                continue
            gram = int(grams[place])
            if passed[head] and gram not in read:
                read.add(gram)
                continue
            total += int(ends[place + n] - ends[place])
            behind = place + n
            passed[place:behind] = b"\1" * n
        return total / len(doc.text)


def _punctuated_lines(doc: Words) -> float:
    lines = _nonblank_lines(doc)
    return sum(line[-1] in SENTENCE_ENDS for line in lines) / len(lines)


def _short_lines(doc: Words) -> float:
    lines = _nonblank_lines(doc)
    return sum(len(line) <= 30 for line in lines) / len(lines)


def _repeated_line_characters(doc: Words) -> float:
    return _repeats(_nonblank_lines(doc))[1] / len(doc.text.replace("\n", ""))


def _newlines(doc: Words) -> float:
    return doc.text.count("\n") / len(doc.numbers)


def _nonblank_lines(doc: Words) -> list[str]:
    return [line for line in doc.text.split("\n") if line.strip()]


GOPHER = (
    Rule("gopher_word_count", _prose_words, "A1.1", low=50),
    Rule("gopher_too_many_words", _prose_words, "A1.1", high=100_000),
    Rule("gopher_mean_word_length", _mean_length, "A1.1", low=3, high=10),
    Rule("gopher_hash_signs", _hashes, "A1.1", high=0.1),
    Rule("gopher_ellipses", _ellipses, "A1.1", high=0.1),
    Rule("gopher_bullet_lines", _bullets, "A1.1", high=0.9),
    Rule("gopher_ellipsis_lines", _ellipsis_lines, "A1.1", high=0.3),
    Rule("gopher_alphabetic_words", _lettered, "A1.1", low=0.8),
    Rule("gopher_stop_words", _stop_words, "A1.1", low=2),
    Rule("gopher_paragraphs", _paragraphs, "table A1", high=0.30),
    Rule("gopher_paragraph_characters", _paragraph_characters, "table A1", high=0.20),
    Rule("gopher_lines", _lines, "table A1", high=0.30),
    Rule("gopher_line_characters", _line_characters, "table A1", high=0.20),
    *(Rule(f"gopher_top_{n}gram", _Top(n), "table A1", high=high) for n, high in ((2, 0.20), (3, 0.18), (4, 0.16))),
    *(
        Rule(f"gopher_repeated_{n}grams", _Repeated(n, high), "table A1", high=high)
        for n, high in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
    ),
)
FINEWEB = (
    Rule("fineweb_punctuated_lines", _punctuated_lines, "3.6", low=0.12),
    Rule("fineweb_short_lines", _short_lines, "3.6", high=0.67),
    Rule("fineweb_repeated_line_characters", _repeated_line_characters, "3.6", high=0.01),
    Rule("fineweb_newlines", _newlines, "3.6, as in its code", high=0.3),
)

_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_LINE_END = SENTENCE_ENDS.union("\"'")  # C4 names those of ASCII
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_LONGEST_WORD = 1000
_FEWEST_WORDS = 3
_FEWEST_SENTENCES = 5


def c4(texts: Sequence[str], vocabulary: Vocabulary) -> list[tuple[str, Drop | None]]:
    """Per text, the lines that C4 keeps, and the drop if C4 drops the document.

    C4 keeps lines that end like a sentence, have at least three words and no word over 1,000 characters, and mention neither JavaScript nor
    cookies and terms; citation marks are removed.
    """
    halves = [_c4_lines(text) for text in texts]
    kept = [line for lines, _ in halves for line in lines]
    counts = np.array([words.sentences for words in vocabulary.words(kept)], dtype=np.int64)
    bounds = np.cumsum([0, *(len(lines) for lines, _ in halves)])
    found: list[tuple[str, Drop | None]] = []
    for index, (lines, drop) in enumerate(halves):
        sentences = int(counts[bounds[index] : bounds[index + 1]].sum())
        if drop is None and sentences < _FEWEST_SENTENCES:
            drop = Drop("c4_sentences", f"{sentences}, at least {_FEWEST_SENTENCES}")
        found.append(("\n".join(lines).strip(), drop))
    return found


def _c4_lines(text: str) -> tuple[list[str], Drop | None]:
    kept = []
    for line in map(str.strip, text.splitlines()):
        words = line.split()
        if len(line) > _LONGEST_WORD and max(map(len, words)) > _LONGEST_WORD:
            continue
        if "[" in line:
            line = _CITATION.sub("", line)
        if line[-1:] not in _LINE_END or line.endswith("...") or len(words) < _FEWEST_WORDS:
            continue
        lower = line.lower()
        if "lorem ipsum" in lower:
            return [], Drop("c4_lorem_ipsum")
        if "javascript" in lower:
            continue
        if "{" in line:
            return [], Drop("c4_curly_bracket")
        if any(phrase in lower for phrase in _POLICY):
            continue
        kept.append(line)
    return kept, None


def gopher(doc: Words) -> Drop | None:
    """The drop by the first of Gopher's rules that the document breaks."""
    return first_broken(doc, GOPHER) if len(doc.numbers) else Drop("gopher_word_count", "no words")


def fineweb(doc: Words) -> Drop | None:
    """The drop by the first of FineWeb's rules that the document breaks."""
    return first_broken(doc, FINEWEB) if len(doc.numbers) else Drop("fineweb_punctuated_lines", "no words")
