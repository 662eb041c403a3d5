"""Words as the published filters count them: punctuation is separate, case is kept.

The thresholds of Gopher, C4 and FineWeb were set with a linguistic tokenizer, in which a full stop is a word too. This one gives nearly the
same words for English and other languages with spaces; in scripts without spaces each character, with its marks, is a word. Each distinct
run of text between blanks is split once and cached, so that a batch takes one look-up per run and some numpy.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import regex

from lmworks.corpus.units import mix
from lmworks.text.letters import ATTACHED, SENTENCE_ENDS, SPACELESS, characters

_ODD = 0x9E3779B97F4A7C15
_MOST_CHARACTERS = 1 << 24  # in the cache; when it is full, it is emptied
_PUNCTUATION = "".join(characters(r"[\p{Terminal_Punctuation}--\p{ASCII}]"))
_OPEN = re.compile(r"\.\.+|…|[\"'“”‘’„«»`´(\[{<*#&§%=¿¡,:;!?\])}>_$£€¥₹—–。、，！？：；「」『』（）《》【】·]|\+(?!\d)")
_CLOSERS = frozenset("\"'“”‘’„«»`´([{<)]}>*#&…,:;!?¿¡$£€_—–。、，！？：；「」『』（）《》【】·").union(_PUNCTUATION)
_CLITIC = re.compile(r"(?<=.)(?:n['’]t|['’](?:s|m|d|ll|re|ve))$", re.IGNORECASE)
_UNIT = re.compile(r"(?<=\d)(?:%|\+|km|m|cm|mm|kg|g|mg|lb|mph|kmh|hz|kb|mb|gb|tb|h|am|pm)$", re.IGNORECASE)
_STOP = regex.compile(r"(?V1)(?:[\d%²+\-\"'“”‘’`´()\[\]{}<>_#*\&,:;!?…]|[[\p{L}\p{M}]--[A-Z]]|[A-Z]{2})\.$")
_INFIX = regex.compile(
    r"\.\.+|…|(?<=[\p{L}\p{M}\p{N}])(?:-{1,3}|[–—~]|——)(?=\p{L})|(?<=\d)[-+*^](?=[\d-])"
    r"|(?<=[\p{L}\p{M}\p{N}])[:<>=/](?=\p{L})|(?<=[\p{L}\p{M}]),(?=\p{L})|(?<=[a-z\"'”’])\.(?=[A-Z\"'“‘])"
    rf"|[{_PUNCTUATION}「」『』（）《》【】·]"
)
_SINGLE = regex.compile(f"(?V1)({SPACELESS}{ATTACHED}*)")
_ADDRESS = re.compile(r"(?:[a-z]+://|www\.)[\w-]+(?:\.[\w-]+)+\S*|[\w.-]+\.(?:com|org|net|edu|gov|io|de|uk|fr)(?:/\S*)?", re.IGNORECASE)
_ABBREVIATIONS = (
    "Mr. Mrs. Ms. Dr. St. Jr. Sr. Prof. Gen. Gov. Rep. Sen. Rev. Co. Corp. Inc. Ltd. Bros. vs. e.g. i.e. a.m. p.m. "
    "Jan. Feb. Mar. Apr. Jun. Jul. Aug. Sep. Sept. Oct. Nov. Dec."
)
_TITLES = frozenset(_ABBREVIATIONS.split())
_CONTRACTED = {
    "cannot": ("can", "not"), "Cannot": ("Can", "not"), "gonna": ("gon", "na"), "gotta": ("got", "ta"), "im": ("i", "m"), "Im": ("I", "m"),
    "id": ("i", "d"), "Id": ("I", "d"), "ive": ("i", "ve"), "dont": ("do", "nt"), "doesnt": ("does", "nt"), "cant": ("ca", "nt"),
}  # fmt: skip
_WHOLE = frozenset("'s 'm 'd 'll 're 've 'em n't ’s ’m ’d ’ll ’re ’ve".split())  # noqa: SIM905
# pairs of marks that form one word: emoticons, and empty quotes
_JOINED_MARKS = frozenset([(")", ":"), (":", ")"), (":", "]"), ("(", ":"), (":", "("), ("[", ":"), ("'", "'"), ("=", ")"), (";", ")")])


def split(chunk: str) -> Iterator[str]:
    """Split a run of text without blanks into words. Linear in its length."""
    if chunk.isalpha() and (chunk.isascii() or not _SINGLE.search(chunk)):
        yield from _CONTRACTED.get(chunk, (chunk,))
        return
    before = ""
    for word in _split_marks(chunk):
        if (before, word) in _JOINED_MARKS:
            before += word
            continue
        if before:
            yield before
        before = word
    if before:
        yield before


def _split_marks(chunk: str) -> Iterator[str]:
    start, end, tail = 0, len(chunk), []
    while start < end and (found := _OPEN.match(chunk, start, end)):
        if end - start < 4 and chunk[start:end] in _WHOLE:
            break
        yield found.group()
        start = found.end()
    while start < end and (cut := _suffix(chunk, start, end)):
        tail.append(chunk[end - cut : end])
        end -= cut
    if start < end:
        yield from _split_infixes(chunk[start:end])
    yield from reversed(tail)


def _suffix(chunk: str, start: int, end: int) -> int:
    """The number of characters at the end of `chunk[start:end]` that form a word of their own; 0 if there are none."""
    if end - start < 6 and (chunk[start:end] in _TITLES or chunk[start:end] in _WHOLE):
        return 0
    last = chunk[end - 1]
    if last in _CLOSERS:
        return 1
    if last == ".":
        cut = 1
        while end - cut > start and chunk[end - cut - 1] == ".":
            cut += 1
        return cut if cut > 1 or _STOP.search(chunk[max(start, end - 3) : end]) else 0
    near = chunk[max(start, end - 5) : end]
    ending = _CLITIC.search(near) or _UNIT.search(near)
    return len(ending.group()) if ending else 0


def _split_infixes(core: str) -> Iterator[str]:
    if _ADDRESS.fullmatch(core):
        yield core
        return
    place = 0
    for found in _INFIX.finditer(core):
        if found.start() > place:
            yield from _characters(core[place : found.start()])
        yield found.group()
        place = found.end()
    if place < len(core):
        yield from _characters(core[place:])


def _characters(word: str) -> Iterator[str]:
    if not _SINGLE.search(word):
        yield word
        return
    yield from (part for part in _SINGLE.split(word) if part)


@dataclass(frozen=True)
class Words:
    """The words of a text as numbers; equal words have equal numbers."""

    text: str
    numbers: np.ndarray  # (W,) int64
    lengths: np.ndarray  # (W,) characters
    letters: np.ndarray  # (W,) bool, contains a letter
    symbols: np.ndarray  # (W,) bool, consists of punctuation
    ends: np.ndarray  # (W,) bool, can end a sentence
    stops: np.ndarray  # (S,) the numbers of the stop words

    @cached_property
    def hashes(self) -> np.ndarray:
        """(W,) uint64: the numbers as hashes, from which n-grams are built."""
        return mix((self.numbers + 1).astype(np.uint64) * np.uint64(_ODD))

    @property
    def sentences(self) -> int:
        """Number of sentences. One begins with the first word, and with each word after an end mark, ignoring quotes and brackets."""
        if not len(self.numbers):
            return 0
        places = np.flatnonzero(self.ends | ~self.symbols)
        ends = self.ends[places]
        return 1 + int((ends[:-1] & ~ends[1:]).sum())


class Vocabulary(dict[str, int]):
    """Numbers runs of text without blanks, with the words of each, and the properties of each word that the rules use."""

    def __init__(self, stop_words: Sequence[str] = ()) -> None:
        super().__init__()
        self._stop_words = stop_words
        self._reset()

    def _reset(self) -> None:
        self.clear()
        self._number: dict[str, int] = {}
        self._characters = 0
        self._bounds, self._words, self._lengths = array("q", [0]), array("q"), array("q")
        self._letters, self._symbols, self._ends = array("b"), array("b"), array("b")
        self._stops = np.array([self._number_of(word) for word in self._stop_words], dtype=np.int64)

    def __missing__(self, chunk: str) -> int:
        for word in split(chunk):
            self._words.append(self._number_of(word))
        self._bounds.append(len(self._words))
        self._characters += len(chunk)
        self[chunk] = number = len(self)
        return number

    def _number_of(self, word: str) -> int:
        known = self._number.get(word)
        if known is None:
            known = self._number[word] = len(self._number)
            self._lengths.append(len(word))
            self._letters.append(any(map(str.isalpha, word)))
            self._symbols.append(all(unicodedata.category(char)[0] in "PSC" for char in word))
            self._ends.append(word in SENTENCE_ENDS)
        return known

    def words(self, texts: Sequence[str]) -> list[Words]:
        """The words of each text."""
        if self._characters > _MOST_CHARACTERS:
            self._reset()
        chunks = [np.array(list(map(self.__getitem__, text.split())), dtype=np.int64) for text in texts]
        bounds, words, lengths = (np.array(values, dtype=np.int64) for values in (self._bounds, self._words, self._lengths))
        letters, symbols, ends = (np.array(values, dtype=bool) for values in (self._letters, self._symbols, self._ends))
        found = []
        for text, own in zip(texts, chunks, strict=True):
            counts = bounds[own + 1] - bounds[own]
            before = np.cumsum(counts) - counts
            numbers = words[np.repeat(bounds[own] - before, counts) + np.arange(counts.sum())]
            found.append(Words(text, numbers, lengths[numbers], letters[numbers], symbols[numbers], ends[numbers], self._stops))
        return found
