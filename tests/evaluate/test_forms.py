"""The three forms: prompts, judging of free answers, and the choice of a form."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from lmworks.evaluate.generation.replies import Reply
from lmworks.evaluate.logprobs import BatchedLogProbs, PlainLogProbs
from lmworks.evaluate.sets import forms
from lmworks.evaluate.sets.items import ChoiceItem, OpenItem, constant_level
from lmworks.evaluate.sets.scoring import LETTERS_FLOPS, Probes, choose
from lmworks.evaluate.statistics import Score


def item(number: int, choices: tuple[str, ...] = ("red", "dark blue", "green"), preamble: str = "") -> ChoiceItem:
    question = f"Question: color {number}?"
    rest, context = tuple(f" {choice}" for choice in choices), f"{question}\nAnswer:"
    return ChoiceItem("toy", str(number), "", question, choices, number % len(choices), (context,) * len(choices), rest, "", preamble)


def opened(metric: str, *answers: str) -> OpenItem:
    return OpenItem("own", "1", "", "Question: how many?", answers, metric, "")  # type: ignore[arg-type]


def test_prompts_in_each_form() -> None:
    asked, shown = item(2, preamble="Colors."), [item(0), item(1)]
    cloze = forms.cloze(asked, shown)
    assert cloze.contexts[0] == (
        "Question: color 0?\nAnswer: red\n\nQuestion: color 1?\nAnswer: dark blue\n\nQuestion: color 2?\nAnswer:"
    )  # fmt: skip
    assert cloze.continuations == (" red", " dark blue", " green")
    letters = forms.letters(asked, shown[:1])
    assert letters.contexts[0] == (
        "Colors.\n\nQuestion: color 0?\n A. red\n B. dark blue\n C. green\nAnswer: A\n\n"
        "Question: color 2?\n A. red\n B. dark blue\n C. green\nAnswer:"
    )  # fmt: skip
    assert letters.continuations == (" A", " B", " C")
    assert forms.free_text(asked, shown[:1]) == letters.contexts[0]
    listed = "\n A. red\n B. dark blue\n C. green\nAnswer with the letter of the right choice."
    assert forms.free_messages(asked, shown[:1]) == [
        {"role": "user", "content": f"Colors.\n\nQuestion: color 0?{listed}"}, {"role": "assistant", "content": "A"},
        {"role": "user", "content": f"Question: color 2?{listed}"},
    ]  # fmt: skip
    assert forms.free_messages(opened("exact", "three"), []) == [{"role": "user", "content": "how many?"}]
    assert forms.cloze(asked, []) is asked


def test_norms_by_hand(bigram: Any, byte_tokenizer: Any) -> None:
    """Token and unconditional, beside those of test_cloze_scoring: with one token per byte, token and byte differ by the space."""
    (answered,) = forms.answer([item(1)], byte_tokenizer, BatchedLogProbs(bigram), unconditional=True)
    table = bigram.embedding.weight
    for index, rest in enumerate(answered.item.continuations):
        ids = byte_tokenizer.encode("Answer:" + rest)
        alone = sum(table[a, b].item() for a, b in pairwise(ids[6:]))
        assert answered.scores("token")[index] == pytest.approx(answered.logprobs[index] / len(rest))
        assert answered.scores("unconditional")[index] == pytest.approx(answered.logprobs[index] - alone)
    assert answered.scores("unconditional") == pytest.approx([0, 0, 0])  # a bigram model sees the same token before both
    sentence = ChoiceItem("toy", "1", "", "q", ("a", "b"), 0, ("She sang", "He sang"), (" well", " well"), "")
    request = forms.without_question(byte_tokenizer, sentence.contexts[0], " well")
    assert request == ([byte_tokenizer.eos_id], byte_tokenizer.encode(" well"))


def test_letters_have_the_baseline_of_the_best_constant_letter(bigram: Any, byte_tokenizer: Any) -> None:
    three, two = [item(number) for number in (0, 3, 6, 1)], [item(0, ("yes", "no"))]
    formulated = [forms.letters(one, []) for one in (*three, *two)]
    assert constant_level(formulated) == 4 / 5  # A, also where some items have fewer letters
    assert constant_level([*three, *two]) == pytest.approx((4 / 3 + 1 / 2) / 5)  # choices differ: chance
    answered = forms.answer(formulated, byte_tokenizer, BatchedLogProbs(bigram))
    assert forms.score(answered).baseline == 4 / 5
    assert bigram.rows_run == 5  # all letters of an item are one row


CHOICES = ("a dog", "B", "the red house", "Paris, France")


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("B", 1), ("(c)", 2), ("C.", 2), ("C) the red house", 2), ("The answer is D.", 3), ("d", 3), ("A: a dog", 0), ("a dog", 0),
        ("Red house", 2), ("It is Paris, France, I think", 3), ("<answer>c</answer>", 2), ("**D**", 3), ("<think>B</think>C", 2),
        ("a dog or the red house", None), ("nothing of these", None), ("E", None), ("", None), ("Certainly not", None), ("a cat", None),
    ],
)  # fmt: skip
def test_a_choice_is_read_from_a_reply(reply: str, choice: int | None) -> None:
    asked = ChoiceItem("toy", "1", "", "q", CHOICES, 2, ("q",) * 4, tuple(f" {one}" for one in CHOICES), "")
    judged = forms.judge(asked, Reply(reply))
    assert judged.extracted == (None if choice is None else "ABCD"[choice])
    assert judged.correct == (choice == 2)


@pytest.mark.parametrize(
    ("reply", "choices", "choice"),
    [
        ("-1", ("1", "-1"), 1), ("It is 1.5.", ("15", "1.5"), 1), ("x-y", ("x+y", "x-y"), 1), ("?", ("!", "?"), 1),
        ("an", ("the", "a", "an"), 2), ("A.", ("of", "the", "a"), 0), ("", ("the", "a"), None),
        ("An.", ("the", "a", "an"), 2), ("us", ("US", "U.S."), None), ("X.", ("x", "y"), 0),
        ("The correct choice is B.", ("red", "blue"), 1), ("Option b", ("red", "blue"), 1), ("[B]", ("red", "blue"), 1),
        ("Ｂ。", ("red", "blue"), 1), ("B and C", ("red", "blue", "green"), None), ("A, B", ("red", "blue"), None),
        ("I think so", ("red",) * 12, None), ("B, I think", ("red", "blue"), 1),
        ("का", ("की", "का"), 1), ("İ", ("red", "blue"), None),
    ],
)  # fmt: skip
def test_choices_are_told_apart_by_their_signs(reply: str, choices: tuple[str, ...], choice: int | None) -> None:
    asked = ChoiceItem("toy", "1", "", "q", choices, 0, ("q",) * len(choices), choices, "")
    judged = forms.judge(asked, Reply(reply))
    assert judged.extracted == (None if choice is None else "ABC"[choice])
    assert reply or judged.failure == "no answer"


def test_failures_are_told_apart() -> None:
    asked = item(0)
    assert forms.judge(asked, Reply("B")).failure == "wrong"
    assert forms.judge(asked, Reply("")).failure == "no answer"
    assert forms.judge(asked, Reply("I do not know")).failure == "format"
    assert forms.judge(asked, Reply("Let me think about", truncated=True)).failure == "truncated"
    assert forms.judge(asked, Reply("A", truncated=True)).failure is None  # it answered first
    assert forms.failures([forms.judge(asked, Reply(text)) for text in ("B", "C", "", "A")]) == {"wrong": 2, "no answer": 1}


@pytest.mark.parametrize(
    ("metric", "accepted", "reply", "correct"),
    [
        ("exact", "The Nile", "nile.", True), ("exact", "Nile", "the river Nile", False), ("contains", "Nile", "the river Nile.", True),
        ("contains", "Nile", "the Niles", False), ("number", "1,234", "The answer is 1234.0", True), ("number", "12", "3 + 9 = 12", True),
        ("number", "12", "twelve", False), ("number", "-0.5", "it is -.50", True), ("number", "12", "12 apples and 3 pears", False),
        ("number", "1/2", "it is 2", False), ("number", "5", "from 15-5", True), ("exact", "+", "+", True), ("exact", "+", "-", False),
        ("contains", "==", "a == b", True), ("exact", "-5", "5", False), ("exact", "1.5", "15", False), ("exact", "3:30", "330", False),
        ("exact", "C++", "c", False), ("exact", "C#", "C", False), ("exact", "x + y", "x - y", False), ("exact", "10²", "102", False),
        ("contains", "1.5", "It is 15.", False), ("contains", "-5", "It is (5).", False), ("contains", "-5", "It is (−5).", True),
        ("exact", "काल", "कल", False), ("exact", "ไม่", "ไม้", False), ("exact", "café", "cafe\u0301", True),
        ("exact", "Straße", "STRASSE", True), ("exact", "1,000", "1000", True), ("exact", "$50", "50%", True),
        ("exact", "the U.S.", "US", True), ("exact", "A", "a.", True),
        ("exact", "Covid-19", "covid 19", False), ("exact", "2019–2020", "2019-2020", True),
    ],
)  # fmt: skip
def test_metrics_of_open_questions(metric: str, accepted: str, reply: str, correct: bool) -> None:
    assert forms.judge(opened(metric, *(["something else"] * (metric != "number")), accepted), Reply(reply)).correct == correct


def test_the_baseline_of_free_answers() -> None:
    right = [forms.judge(item(number), Reply("A")) for number in (0, 3, 6, 1)]
    score = forms.score_freely(right)
    assert (score.correct, score.chance, score.baseline) == (3, pytest.approx(1 / 3), 0.75)
    open_ = [forms.judge(OpenItem("own", str(n), "", "q", (text,), "exact", ""), Reply("x")) for n, text in enumerate("xxyz")]
    assert forms.score_freely(open_) == Score(2, 4, 0.0, 0.5)


def probes(letters: Score | None = None, readable: float | None = None) -> Probes:
    def unexpected(*_: object) -> Any:
        raise AssertionError("a probe that decides nothing was made")

    return Probes((lambda: letters) if letters is not None else unexpected, (lambda: readable) if readable is not None else unexpected)


def test_a_model_of_little_training_gets_cloze_without_a_probe() -> None:
    found = choose(False, LETTERS_FLOPS / 100, probes())
    assert found.forms == ("cloze",) and "trained with 1.0e+19 FLOPs" in found.reason


@pytest.mark.parametrize(("correct", "form"), [(28, "cloze"), (33, "cloze"), (60, "letters")])
@pytest.mark.parametrize("flops", [None, 1e22])
def test_the_probe_decides_where_training_does_not(correct: int, form: str, flops: float | None) -> None:
    found = choose(False, flops, probes(Score(correct, 100, 0.25, 0.27)))
    assert found.forms == (form,) and f"{correct} of 100 probe items are right in letter form" in found.reason


def test_a_chat_model_is_asked_freely_if_its_replies_can_be_read() -> None:
    assert choose(True, None, probes(readable=0.9)).forms == ("free",)
    unreadable = choose(True, 1e15, probes(readable=0.1))
    assert unreadable.forms == ("cloze",) and "10% of its replies" in unreadable.reason
    assert choose(True, None, probes(Score(60, 100, 0.25, 0.27), 0.1)).forms == ("letters",)
    paired = choose(True, 1e15, probes(readable=0.8), ("cloze",))
    assert paired.forms == ("cloze", "free") and paired.reason.startswith("cloze as the base model; tuned on conversations, and 80%")
    assert choose(True, 1e15, probes(readable=0.2), ("letters",)).forms == ("letters",)


def test_letter_form_is_the_same_one_at_a_time(small_transformer: Any, byte_tokenizer: Any) -> None:
    items = [forms.letters(item(number), []) for number in range(6)]
    fast = forms.answer(items, byte_tokenizer, BatchedLogProbs(small_transformer))
    plain = forms.answer(items, byte_tokenizer, PlainLogProbs(small_transformer))
    for one, other in zip(fast, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-5)  # fp32, batched in another shape
