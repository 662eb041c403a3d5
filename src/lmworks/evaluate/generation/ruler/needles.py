"""RULER's retrieval tasks: needles, sentences that give a key its value, hidden in a haystack (arXiv:2404.06654, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal
from uuid import UUID

from lmworks.evaluate.generation.ruler.drafts import Draft
from lmworks.evaluate.generation.ruler.texts import Haystack, essays, words

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
