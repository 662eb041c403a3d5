"""RULER's tasks: lengths, contents, determinism, scoring, and the texts that they are made of."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.evaluate.conftest import ByteTokenizer

from generation_models import Scripted
from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.generation import ruler_texts
from lmworks.evaluate.generation.interface import Prompt, Reply
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.generation.ruler import TASKS, Ruler, match
from lmworks.evaluate.generation.ruler_tasks import largest, spread
from lmworks.evaluate.generation.scoring import measure
from lmworks.evaluate.records import EvaluationResults

UNITS = {  # bytes that one more unit of haystack may add
    "niah-single-1": 24, "niah-single-2": 40, "niah-single-3": 40, "niah-multikey-1": 40, "niah-multikey-2": 100, "niah-multikey-3": 150,
    "niah-multivalue": 40, "niah-multiquery": 40, "vt": 24, "cwe": 40, "fwe": 24, "qa-1": 700, "qa-2": 700,
}  # fmt: skip


class Lengths:
    """Counts by a function of the text."""

    def __init__(self, count: Callable[[str], int] = len, context: int | None = None) -> None:
        self.count, self.context = count, context

    def length(self, prompt: Prompt) -> int:
        return self.count(prompt.text)


@pytest.fixture(scope="module", autouse=True)
def material() -> None:
    try:
        ruler_texts.words()
        ruler_texts.squad(None)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("task", TASKS)
def test_items_are_as_long_as_they_may_be(task: str) -> None:
    """Never over the length, and less than one unit of haystack under it, for three kinds of tokens."""
    counts: dict[str, tuple[Callable[[str], int], int]] = {
        "bytes": (lambda text: len(text.encode()), 4096), "words": (lambda text: len(re.findall(r"\w+|[^\w\s]", text)), 1500),
        "pairs": (lambda text: -(-len(text.encode()) // 2), 5000),
    }  # fmt: skip
    for name, (count, length) in counts.items():
        for prompt in Ruler(task, [length]).prompts(2, 0, Lengths(count)):
            used = count(prompt.text) + prompt.max_new_tokens
            assert used <= length
            assert length - used < UNITS[task] / {"bytes": 1, "words": 4, "pairs": 2}[name], (name, length - used)


@pytest.mark.parametrize("task", TASKS)
def test_items_are_deterministic_and_hold_their_answers(task: str) -> None:
    chosen = Ruler(task, [3000, 6000])
    prompts = chosen.prompts(3, 0, Lengths())
    assert prompts == chosen.prompts(3, 0, Lengths()) and chosen.prompts(1, 0, Lengths())[0] == prompts[0]
    assert [prompt.id for prompt in prompts] == [f"{length}/{number}" for length in (3000, 6000) for number in range(3)]
    assert len({prompt.answer for prompt in prompts}) >= (5 if task.startswith("qa") else 6)
    other = Ruler(task, [3000]).prompts(3, 0, Lengths(lambda text: len(text) // 2))
    assert [one.answer for one in other] == [one.answer for one in prompts[:3]]  # of another tokenizer: more haystack, the same needles
    for prompt in prompts:
        expected = prompt.reference.answers
        assert prompt.text.startswith(prompt.messages[0]["content"]) and prompt.text.endswith(prompt.prefix)
        assert (any if task.startswith("qa") else all)(answer in prompt.text for answer in expected)
        assert chosen.judge(prompt, [Reply(" ".join(expected), True)])[0].correct  # at the limit of tokens or not
        assert not chosen.judge(prompt, [Reply("something else")])[0].correct


def lines_of(task: str, length: int = 3000) -> tuple[Prompt, list[str]]:
    prompt, = Ruler(task, [length]).prompts(1, 0, Lengths())
    return prompt, prompt.text.split("\n")


def test_needles_are_the_published_ones() -> None:
    prompt, lines = lines_of("niah-single-1")
    key, value = re.findall(r"One of the special magic numbers for (\S+-.+) is: (\d{7})\.", prompt.text)[0]
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number afterwards."
    )
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )
    assert prompt.reference.answers == (value,)
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    others = [line for line in lines[1:-1] if line != noise]
    assert f"One of the special magic numbers for {key} is: {value}." in others
    assert len(others) <= 2 and all(line.startswith("One of") or noise.startswith(line) for line in others)


@pytest.mark.parametrize(
    ("task", "needles", "asked", "answers"),
    [("niah-single-2", 1, 1, 1), ("niah-single-3", 1, 1, 1), ("niah-multikey-1", 4, 1, 1), ("niah-multivalue", 4, 1, 4),
     ("niah-multiquery", 4, 4, 4)],
)  # fmt: skip
def test_numbers_of_needles_in_running_text(task: str, needles: int, asked: int, answers: int) -> None:
    prompt, lines = lines_of(task)
    found = re.findall(r"One of the special magic (numbers|uuids) for (.+?) is: (\S+)\.", prompt.text)
    assert len(found) == needles and len({value for _, _, value in found}) == needles
    assert len(prompt.reference.answers) == answers
    question = lines[-1].partition("mentioned")[0]
    assert sum(key in question for key in {key for _, key, _ in found}) == asked
    assert {value for _, key, value in found if key in question} == set(prompt.reference.answers)
    parts = lines[1].split("One of the special magic ")
    assert all(re.search(r"[.!?][\"')\]]*$", part.rstrip()) for part in parts[:-1] if part.strip())  # a needle stands between sentences


@pytest.mark.parametrize(
    ("task", "pattern"), [("niah-multikey-2", r"\S+-.+ is: \d{7}"), ("niah-multikey-3", r"[0-9a-f-]{36} is: [0-9a-f-]{36}")]
)
def test_needles_among_needles_have_one_answer(task: str, pattern: str) -> None:
    _, lines = lines_of(task)
    assert all(re.fullmatch(rf"One of the special magic \w+ for {pattern}\.", line) for line in lines[1:-1])
    key = re.search(r"for (.+) mentioned in the provided text\?", lines[-1])
    assert key and sum(f" {key[1]} is:" in line for line in lines[1:-1]) == 1
    keys = [line.partition(" for ")[2].partition(" is:")[0] for line in lines[1:-1]]
    assert len(set(keys)) == len(keys) > 10


def test_needles_lie_at_all_depths() -> None:
    prompts = Ruler("niah-single-2", [4000]).prompts(60, 0, Lengths())
    depths = [prompt.text.index("One of the special magic numbers") / len(prompt.text) for prompt in prompts]
    counts = Counter(int(4 * depth) for depth in depths)
    assert all(counts[quarter] >= 5 for quarter in range(4)), counts


def test_a_chain_is_tracked_after_a_solved_example() -> None:
    prompt, _ = lines_of("vt")
    task = prompt.text.rpartition("Memorize and track")[2]
    chain = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", task, re.MULTILINE)
    assert [name for name, _ in chain] == list(prompt.reference.answers) and len(chain) == 5
    assert [value for _, value in chain[1:]] == [name for name, _ in chain[:-1]]
    assert f"assigned the value {chain[0][1]} in the text above" in task and chain[0][1].isdigit()
    example = prompt.text.partition("they are: ")
    assert example[2].split("\n")[0].split() == re.findall(r"^VAR ([A-Z]{3}) =", example[0], re.MULTILINE)
    assert prompt.text.count("Memorize and track") == 2 and prompt.prefix.endswith("they are:")


@pytest.mark.parametrize(("length", "often", "rarely"), [(3000, 6, 1), (40_000, 30, 3)])
def test_common_words_are_the_common_ones(length: int, often: int, rarely: int) -> None:
    prompt, _ = lines_of("cwe", length)
    example, task = prompt.text.split("\nBelow is a numbered list")
    entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\nQuestion)", task)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    assert dict(counts.most_common(10)) == dict.fromkeys(prompt.reference.answers, often)
    assert max(sorted(counts.values())[:-10]) == rarely and len(counts) > 50
    shown = Counter(word for _, word in re.findall(r"(\d+)\. (.+?)(?= \d+\. |\nQuestion)", example))
    solved = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", example.partition("in the list are: ")[2])
    assert len(shown) == (20 if rarely == 1 else 40) and {word for word, _ in shown.most_common(10)} == set(solved)


def test_a_long_list_that_does_not_fit_has_fewer_repetitions() -> None:
    prompt, = Ruler("cwe", [4096]).prompts(1, 0, Lengths())  # one token per character
    assert prompt.text.count(prompt.reference.answers[0]) >= 6
    with pytest.raises(Unavailable, match=r"ruler-cwe: 900 tokens do not hold item 0, which has [\d,]+ with its reply; set `lengths`"):
        Ruler("cwe", [900]).prompts(1, 0, Lengths())


def test_words_do_not_run_out() -> None:
    """A list of 200,000 words has more entries than the dictionary."""
    from lmworks.evaluate.generation.ruler_tasks import common_words

    draft = common_words(Random(1), 1 << 20, None)[0]
    listed = re.findall(r"\d+\. (.+?)(?= \d+\. |\nQuestion)", draft.render(60_000).split("\nBelow")[1])
    counts = Counter(listed)
    assert len(counts) == 20_010 > len(ruler_texts.words().all) and set(counts.values()) == {30, 3}


def test_frequent_words_are_ranked_below_the_dots() -> None:
    for length in (800, 3000, 20_000):
        prompt, _ = lines_of("fwe", length)
        counts = Counter(prompt.text.partition("coded words. ")[2].partition("\nQuestion")[0].split())
        ranked = [word for word, _ in counts.most_common(4)]
        assert ranked[0] == "..." and tuple(ranked[1:]) == prompt.reference.answers
        assert counts[ranked[3]] > sorted(counts.values())[-5]


def test_documents_hold_the_answer_among_others() -> None:
    prompt, lines = lines_of("qa-1", 8000)
    shown = [int(number) for number in re.findall(r"^Document (\d+):$", prompt.text, re.MULTILINE)]
    assert shown == list(range(1, len(shown) + 1)) and len(shown) > 5
    assert lines[-1].startswith("Question: ") and lines[-1].endswith("Answer:")
    library, places = ruler_texts.squad(None), []
    by_question = {(asked.question, asked.answers): library.documents[asked.gold[0]] for asked in library.questions}
    for one in Ruler("qa-1", [8000]).prompts(30, 0, Lengths()):
        question = one.text.rpartition("\nQuestion: ")[2].removesuffix(" Answer:")
        places.append(one.text.index(by_question[question, one.reference.answers]) / len(one.text))  # the whole document
    assert min(places) < 0.25 and max(places) > 0.6


def test_two_hops_need_both_documents() -> None:
    library = ruler_texts.two_hops(None)
    assert len(library.questions) > 100
    for one in library.questions:
        first, second = (library.documents[number] for number in one.gold)
        assert first != second and "#1" in one.question and any(answer in second for answer in one.answers)
        assert not any(answer.lower() in one.question.lower() for answer in one.answers)


def write_originals(folder: Path) -> None:
    folder.mkdir()
    (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": "An essay begins here. It goes on! Does it end? " * 20}))
    paragraph = {"context": "The river Foo is 12 km long. It ends in Bar.", "qas": [
        {"id": "a", "question": "How long is Foo?", "answers": [{"text": "12 km"}], "is_impossible": False},
        {"id": "b", "question": "Why?", "answers": [], "is_impossible": True},
    ]}  # fmt: skip
    more = [{"context": f"Another river, number {n}, is short.", "qas": []} for n in range(3)]
    (folder / "squad.json").write_text(json.dumps({"data": [{"title": "Rivers", "paragraphs": [paragraph, *more]}]}))
    hops = [{"_id": "h", "question": "Where does the river of Baz end?", "answer": "Bar",
             "context": [["Foo", ["Foo flows through Baz.", " It ends in Bar."]], ["Baz", ["Baz is a town."]]]}]
    (folder / "hotpotqa.json").write_text(json.dumps(hops))


def test_the_original_texts_of_a_folder_are_used(tmp_path: Path) -> None:
    write_originals(tmp_path / "json")
    folder = str(tmp_path / "json")
    essay, = Ruler("niah-single-2", [2000], folder).prompts(1, 0, Lengths())
    assert "An essay begins here. It goes on! Does it end?" in essay.text
    one, = Ruler("qa-1", [900], folder).prompts(1, 0, Lengths())
    assert one.reference.answers == ("12 km",)
    assert "The river Foo is 12 km long. It ends in Bar." in one.text and "Another river, number 2" in one.text
    hop, = Ruler("qa-2", [900], folder).prompts(1, 0, Lengths())
    assert hop.reference.answers == ("Bar",) and "Foo\nFoo flows through Baz. It ends in Bar." in hop.text and "Baz is a town." in hop.text
    with pytest.raises(UserError, match=r"cannot read .*squad.json: No such file"):
        Ruler("qa-1", [900], str(tmp_path)).prompts(1, 0, Lengths())
    (tmp_path / "json" / "squad.json").write_text('{"data": [{"paragraphs": 3}]}')
    ruler_texts.squad.cache_clear()
    with pytest.raises(UserError, match=r"squad.json is not RULER's file of this name"):
        Ruler("qa-1", [900], folder).prompts(1, 0, Lengths())
    (tmp_path / "json" / "squad.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"squad.json is not JSON"):
        Ruler("qa-1", [900], folder).prompts(1, 0, Lengths())


@pytest.mark.parametrize(
    ("reply", "how", "mark", "failure"),
    [
        (" 1234567 and 7654321.", "all", 1.0, None), ("1234567", "all", 0.5, "wrong"), ("nothing", "all", 0.0, "wrong"),
        ("", "all", 0.0, "no answer"), (" \0\n", "all", 0.0, "no answer"), ("7654321\0 1234567", "all", 1.0, None),
        ("1234567", "any", 1.0, None), ("none", "any", 0.0, "wrong"), ("12345677654321" * 100_000, "all", 1.0, None),
    ],
)  # fmt: skip
def test_scored_as_ruler_does(reply: str, how: str, mark: float, failure: str | None) -> None:
    one = match(reply, ("1234567", "7654321"), how)  # type: ignore[arg-type]
    assert (one.mark, one.failure, one.correct) == (mark, failure, mark == 1)
    assert match("BEST-WESTERN", ("best-western",), "all").correct


def test_each_length_is_a_score(byte_tokenizer: ByteTokenizer) -> None:
    chosen = Ruler("niah-multivalue", [2000, 3000])
    prompts = chosen.prompts(2, 0, Answerer(Scripted({}), byte_tokenizer, chat=False))
    replies = {prompts[0].text[-120:]: " " + prompts[0].answer, prompts[2].text[-120:]: f" {prompts[2].reference.answers[0]} only"}
    model, found = Scripted(replies, context=4000), EvaluationResults()
    measure(chosen, Answerer(model, byte_tokenizer, chat=False), 2, None, "base", found)
    assert {name: score["score"] for name, score in found.scores.items()} == {
        "ruler-niah-multivalue/generate/0-shot/2000": 0.5, "ruler-niah-multivalue/generate/0-shot/3000": 0.125,
    }  # fmt: skip
    assert [one["value"] for one in found.outcomes] == [1.0, 0.0, 0.25, 0.0]
    assert all(2900 < one["tokens"] + 128 <= 3000 for one in found.outcomes[2:])
    assert all(len(item["question"]) < 4100 for item in found.items)
    measure(Ruler("vt", [8000]), Answerer(model, byte_tokenizer, chat=False), 1, None, "base", found)
    why = "ruler-vt: 8,000 tokens are more than the model's context of 4,000; set `lengths` to at most 4,000"
    assert found.unavailable == {"ruler-vt": why}
    measure(Ruler("vt"), Answerer(model, byte_tokenizer, chat=False), 1, None, "base", found)  # as long as the model can read
    assert "ruler-vt/generate/0-shot/4000" in found.scores


def test_all_tasks_are_one_set(byte_tokenizer: ByteTokenizer) -> None:
    model, found = Scripted({"brown": ""}, context=6000), EvaluationResults()
    measure(Ruler(lengths=[5000]), Answerer(model, byte_tokenizer, chat=False), 1, None, "base", found)
    score = found.scores["ruler/generate/0-shot/5000"]
    assert score["n"] == 13 and set(score["by_subject"]) == set(TASKS) == {one["subject"] for one in found.outcomes}
    assert len({one["id"] for one in found.outcomes}) == 13
    alone, = Ruler("vt", [5000]).prompts(1, 0, Answerer(model, byte_tokenizer, chat=False))
    assert alone.text in {one.text for one in Ruler(lengths=[5000]).prompts(1, 0, Answerer(model, byte_tokenizer, chat=False))}


def test_the_largest_size_is_found_with_few_measurements() -> None:
    for slope, start, limit in ((1, 0, 100_000), (37, 500, 100_000), (0.2, 3, 5000), (1000, 0, 999), (1, 0, 0)):
        calls = []

        def length(size: int, slope: float = slope, start: int = start, calls: list[int] = calls) -> int:
            calls.append(size)
            return start + int(slope * size)

        best = largest(length, limit, 0)
        assert best is not None and length(best) <= limit < length(best + 1)
        assert len(calls) < 14 and max(calls) < 10 * (best + 64)
    assert largest(lambda size: size + 5, 4, 0) is None
    assert largest(lambda size: size, 10, 0, most=7) == 7 and largest(lambda size: size, 10, 3, most=3) == 3
    rough = largest(lambda size: 10 * size + size % 7 * 15, 1000, 0)
    assert rough is not None and 10 * rough + rough % 7 * 15 <= 1000 and rough > 80


def test_spread_keeps_order() -> None:
    assert spread(["a", "b"], ["1", "2", "3"], [0.0, 0.5, 0.99]) == ["1", "a", "2", "b", "3"]
    assert spread([], ["1", "2"], [0.1, 0.9]) == ["1", "2"]
