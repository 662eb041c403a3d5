"""RULER's variable tracking: a chain of assignments in noise, of which all variables with one value are asked for (section 3.2)."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from string import ascii_uppercase

from lmworks.evaluate.generation.ruler.drafts import Draft
from lmworks.evaluate.generation.ruler.needles import noise_lines, spread

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
