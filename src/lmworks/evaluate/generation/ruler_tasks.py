"""The items of RULER's tasks at any size, and the largest size that fits a number of tokens (arXiv:2404.06654).

Retrieval (section 3.1): needles, sentences that give a key its value, hidden in a haystack. Variable tracking (3.2): a chain of assignments
in noise, of which all variables with one value are asked for. Aggregation (3.3): common words extraction (cwe) and frequent words
extraction (fwe). Question answering (3.4): the documents that answer a question among others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Literal
from uuid import UUID

from lmworks.evaluate.generation.ruler_texts import Asked, Haystack, Library, essays, words

_FIRST = 64  # units of haystack from which the tokens per unit are known well enough


@dataclass(frozen=True)
class Draft:
    """An item before it has a length.

    `render(size)` is its text with so many units of haystack (words, sentences, entries, ...), and `prefix` the beginning of the answer,
    which RULER writes for the model. A larger size only adds to the haystack: needles, question and answers stay the same. `least` is the
    smallest size that holds them, and `most` the largest, if there is one.
    """

    render: Callable[[int], str]
    prefix: str
    answers: tuple[str, ...]
    least: int
    most: int | None = None


def largest(length: Callable[[int], int], limit: int, least: int, most: int | None = None) -> int | None:
    """The largest size from `least` to `most` with `length(size) <= limit`; None if even `least` is too long.

    `length` should grow with the size. If it does not everywhere, the result still fits, but a larger size might fit too. Sizes are
    guessed from the tokens per unit so far, so that a long text is encoded only a few times.
    """
    low, low_length = least, length(least)
    if low_length > limit or low == most:
        return low if low_length <= limit else None
    high: int | None = None  # a size that is too long
    guess = least + _FIRST
    while high is None or high - low > 1:
        size = max(low + 1, guess if high is None else min(guess, high - 1))
        size = size if most is None else min(size, most)
        found = length(size)
        per_unit = max((found - low_length) / (size - low), 1e-6)
        if found <= limit:
            low, low_length = size, found
            if size == most:
                return low
        else:
            high = size
        step = int((limit - low_length) / per_unit)
        if high is not None and step >= high - low:  # the guess does not narrow the range: halve it
            step = (high - low) // 2
        guess = low + max(1, step)
    return low


NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
_DEPTHS = 40  # evenly spaced places for needles in running text, from its beginning to its end


@dataclass(frozen=True)
class Needles:
    """One task. noise repeats `NOISE`; essay is running text; needle is other needles. `queries` of the `keys` are asked for."""

    haystack: Literal["noise", "essay", "needle"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def __call__(self, rng: Random, length: int, folder: str | None) -> tuple[Draft, ...]:
        drawn: set[str] = set()
        keys = [_draw(rng, self.key, drawn) for _ in range(self.keys)]
        values = {key: [_draw(rng, self.value, drawn) for _ in range(self.values)] for key in keys}
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        rng.shuffle(needles)
        asked = rng.sample(keys, self.queries)
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        one = self.queries * self.values == 1
        kind = self.value[:-1] if one else self.value
        before = (
            f"{'A' if one else 'Some'} special magic {kind} {'is' if one else 'are'} hidden within the following text. "
            f"Make sure to memorize it. I will quiz you about the {kind} afterwards.\n"
        )
        verb = "is" if one else "are"
        after = f"\nWhat {'is' if one else 'are all'} the special magic {kind} for {query} mentioned in the provided text?"
        prefix = f" The special magic {kind} for {query} mentioned in the provided text {verb}"
        hide = self._hide(rng, needles, drawn, folder)
        answers = tuple(value for key in asked for value in values[key])
        return (Draft(lambda size: before + hide(size) + after, prefix, answers, least=0),)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value} for {key} is: {value}."

    def _hide(self, rng: Random, needles: list[str], drawn: set[str], folder: str | None) -> Callable[[int], str]:
        """A function from a size to the haystack with the needles. They keep their relative places at every size."""
        if self.haystack == "essay":
            text = essays(folder)
            depths = sorted(depth / (_DEPTHS - 1) for depth in rng.sample(range(_DEPTHS), len(needles)))
            return lambda size: _in_text(text, size, needles, depths)
        places = sorted(rng.random() for _ in needles)
        if self.haystack == "noise":
            return lambda size: "\n".join(spread(noise_lines(size), needles, places))
        others: list[str] = []

        def among_others(size: int) -> str:
            while len(others) < size:
                others.append(self._needle(_draw(rng, self.key, drawn), _draw(rng, self.value, drawn)))
            return "\n".join(spread(others[:size], needles, places))

        return among_others


def noise_lines(size: int) -> list[str]:
    """So many sentences of noise, five in a line."""
    whole, rest = divmod(size, len(NOISE))
    return [" ".join(NOISE)] * whole + ([" ".join(NOISE[:rest])] if rest else [])


def spread(lines: list[str], inserted: list[str], places: list[float]) -> list[str]:
    """`lines` with the others in between, in order; `places` are their relative places, sorted."""
    out: list[str] = []
    done = 0
    for one, place in zip(inserted, places, strict=True):
        at = int(place * (len(lines) + 1))
        out += (*lines[done:at], one)
        done = at
    return [*out, *lines[done:]]


def _in_text(text: Haystack, size: int, needles: list[str], depths: list[float]) -> str:
    """Needles between the sentences of the first `size` words."""
    pieces: list[str] = []
    sentences, done = text.sentences(size), 0
    for needle, depth in zip(needles, depths, strict=True):
        at = min(size, text.start(int(sentences * depth)))
        pieces += (text.text(done, at), needle)
        done = at
    return " ".join(piece for piece in (*pieces, text.text(done, size)) if piece)


def _draw(rng: Random, kind: str, drawn: set[str]) -> str:
    """A key or value that was not drawn before: two words, seven digits or a UUID."""
    while True:
        if kind == "words":
            one = f"{rng.choice(words().adjectives)}-{rng.choice(words().nouns)}"
        elif kind == "numbers":
            one = str(rng.randrange(1_000_000, 10_000_000))
        else:
            one = str(UUID(int=rng.getrandbits(128), version=4))
        if one not in drawn:
            drawn.add(one)
            return one


HOPS = 4
_EXAMPLE_NOISE = 25  # sentences in the worked example


def variable_tracking(rng: Random, length: int, folder: str | None) -> tuple[Draft, ...]:
    """One chain. As in RULER, one small solved example precedes the item."""
    example_names, example_value, example_chain, example_places = _chain(rng, letters=3)
    names, value, chain, places = _chain(rng, letters=5)
    solved = _task(_EXAMPLE_NOISE, example_chain, example_places, example_value)
    solved += f"{_prefix(example_value)} {' '.join(example_names)}\n\n"
    return (Draft(lambda size: solved + _task(size, chain, places, value), _prefix(value), tuple(names), least=0),)


def _chain(rng: Random, letters: int) -> tuple[list[str], str, list[str], list[float]]:
    """Names, their value, the assignments, and their relative places in the text."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 100_000))
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {after} = VAR {before}" for before, after in pairwise(names))]
    return names, value, chain, sorted(rng.random() for _ in chain)


def _task(size: int, chain: list[str], places: list[float], value: str) -> str:
    context = "\n".join(spread(noise_lines(size), chain, places))
    return (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        f"Question: Find all variables that are assigned the value {value} in the text above."
    )


def _prefix(value: str) -> str:
    return (
        " Answer: According to the chain(s) of variable assignment in the text above, "
        f"{HOPS + 1} variables are assigned the value {value}, they are:"
    )


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


_INSTRUCTION = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class Answering:
    """Questions of a library, each item with one drawn at random.

    Documents are added until the length is reached, first those that are related to the gold ones, then others. The last one ends after any
    of its sentences. If all are used, they are repeated.
    """

    library: Callable[[str | None], Library]

    def __call__(self, rng: Random, length: int, folder: str | None) -> tuple[Draft, ...]:
        library = self.library(folder)
        asked = rng.choice(library.questions)
        others = _others(rng, library, asked)
        gold = [(rng.random(), library.documents[number]) for number in asked.gold]
        # where a document stands depends on neither the size nor the documents that come later
        added = [(rng.random(), _sentences(library.documents[number])) for number in others]
        total = sum(len(sentences) for _, sentences in added)

        def render(size: int) -> str:
            shown = list(gold)
            whole, left = divmod(size, total) if total else (0, 0)
            shown += [(place, "".join(sentences)) for place, sentences in added] * whole
            for place, sentences in added:
                if left <= 0:
                    break
                shown.append((place, "".join(sentences[:left]).rstrip()))
                left -= len(sentences)
            shown.sort()
            context = "\n\n".join(f"Document {number}:\n{document}" for number, (_, document) in enumerate(shown, 1))
            return (
                f"{_INSTRUCTION}\n\nThe following are given documents.\n\n{context}\n\n{_INSTRUCTION}\n\nQuestion: {asked.question}"
            )

        return (Draft(render, " Answer:", asked.answers, least=0, most=None if total else 0),)


def _others(rng: Random, library: Library, asked: Asked) -> list[int]:
    related = rng.sample(asked.related, len(asked.related))
    rest = sorted(set(range(len(library.documents))) - {*asked.gold, *related})
    return [*related, *rng.sample(rest, len(rest))]


def _sentences(document: str) -> list[str]:
    """The sentences of a document, with the spaces behind them."""
    return re.findall(r".+?(?:[.!?][\"')\]]{0,3}\s+|$)", document, re.DOTALL) or [document]
