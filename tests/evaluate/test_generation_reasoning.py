from __future__ import annotations

import pytest

from late import require_package
from lmworks.corpus.contamination import Question
from lmworks.errors import UserError
from lmworks.evaluate.generation.interface import Judged, Prompt, Reply
from lmworks.evaluate.generation.scoring import Reasoning, generate_tasks, judge, questions, score_of
from lmworks.recipe.schema.evaluate import Generator
from lmworks.verify.marks import stated

require_package("reasoning_gym", "reasoning-gym is not installed")

NAMES = [
    "basic_arithmetic", "chain_sum", "leg_counting", "spell_backward", "letter_counting", "number_sorting", "calendar_arithmetic",
    "count_bits",
]  # fmt: skip


def named(name: str, **options: object) -> Generator:
    return Generator(name=name, options=options)


def judged(asked: Reasoning, replies: list[str], truncated: bool = False) -> list[Judged]:
    """The judgments of one reply to each question."""
    prompts = asked.prompts(len(replies), 0, NO_LIMIT)
    return [asked.judge(prompt, [Reply(reply, truncated)])[0] for prompt, reply in zip(prompts, replies, strict=True)]


class NoLimit:
    context = None

    def length(self, prompt: Prompt) -> int:
        return len(prompt.text)


NO_LIMIT = NoLimit()


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_are_solved_and_wrong_ones_are_not(name: str) -> None:
    asked = Reasoning(named(name), 8)
    answers = [prompt.answer for prompt in asked.prompts(8, 0, NO_LIMIT)]
    right = judged(asked, [f"The answer is {answer}." if "\n" not in answer else answer for answer in answers])
    assert all(j.correct and j.mark == 1 for j in right), [(j.extracted, a) for j, a in zip(right, answers, strict=True) if not j.correct]
    wrong = judged(asked, ["", "I do not know", "<answer>4711000</answer>", *(f"{answer} or 77 or so" for answer in answers[3:])])
    assert not any(j.correct for j in wrong)
    assert [j.failure for j in wrong[:3]] == ["no answer", "wrong", "wrong"]
    assert judged(asked, ["I do not"], truncated=True)[0].failure == "truncated"


def test_part_marks_are_not_solutions() -> None:
    asked = Reasoning(named("chain_sum"), 1)
    prompt, = asked.prompts(1, 0, NO_LIMIT)
    one, = asked.judge(prompt, [Reply(f"{prompt.answer}, I think")])
    assert 0 < one.mark < 1  # the package pays for a right number inside a longer text
    assert not one.correct
    assert asked.values([(prompt, [one])]) == {"": {prompt.id: 0.0}}


def test_huge_answers_are_not_given_to_the_verifier() -> None:
    one, = judged(Reasoning(named("spell_backward"), 1), ["a" * 1_000_000])
    assert (one.correct, one.failure) == (False, "format")


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("42", "42"), (" 42\n", "42"), ("**42**", "42"), ('"deew"', "deew"), ("The answer is 42.", "42."), ("answer: 42", "42"),
        ("First 40.\nThen 2.\nFinal answer: 42", "42"), ("<answer>42</answer>", "42"),
        ("<think>it is 41</think><answer> 42 </answer> or so", "42"),
        ("so \\boxed{42}", "42"), ("The answer is 1. No, the answer is 42", "42"), ("<think>41 and no end", ""), ("", ""), ("3.5", "3.5"),
        ("a\nb", "a\nb"), ("the answer is: is it", "is it"), ("['1', '2']", "['1', '2']"), ("'1', '2'", "1', '2"),
    ],
)  # fmt: skip
def test_extraction(reply: str, answer: str) -> None:
    assert stated(reply) == answer


def test_questions_are_fixed_and_none_is_a_tuning_seed() -> None:
    assert generate_tasks(named("chain_sum"), 5) == generate_tasks(named("chain_sum"), 8)[:5]
    evaluation = {t.id for t in generate_tasks(named("chain_sum"), 50)}
    tuning = {t.id for t in generate_tasks(named("chain_sum"), 50, seed=1)}
    assert not evaluation & tuning
    asked = [Question(t.id, t.question, t.answer) for t in generate_tasks(named("chain_sum"), 5)]
    assert list(questions([named("chain_sum")], 5)) == asked


def test_the_baseline_is_the_commonest_answer() -> None:
    asked = Reasoning(named("syllogism"), 40)
    prompts = asked.prompts(None, 0, NO_LIMIT)
    answers = [prompt.answer for prompt in prompts]
    constant = max(sorted(set(answers)), key=answers.count)
    marks = [j.mark for j in judged(asked, [constant] * len(prompts))]
    score = score_of(marks, asked.baseline(prompts))
    assert score["score"] == score["baseline"] >= 0.3
    assert score["verdict"] == "not above baseline"  # a model that always says the same has shown nothing


def test_an_unknown_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="'chain_sun'; did you mean chain_sum"):
        generate_tasks(named("chain_sun"), 1)


def test_options_reach_the_generator() -> None:
    short = named("needle_haystack", min_num_statements=3, max_num_statements=3)
    asked = generate_tasks(short, 20)
    assert all(task.question.count(". ") == 3 for task in asked)
    assert all(j.correct for j in judged(Reasoning(short, 20), [task.answer for task in asked]))
    assert max(task.question.count(". ") for task in generate_tasks(named("needle_haystack"), 20)) > 3


@pytest.mark.parametrize("options", [{"min_num_statement": 3}, {"min_num_statements": 0}])
def test_options_that_the_generator_does_not_take_are_named(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"evaluate\.tasks\.needle_haystack\.options: reasoning-gym rejects them \(.*min_num_statement"):
        generate_tasks(named("needle_haystack", **options), 1)
    with pytest.raises(UserError, match=r"evaluate\.tasks\.aiw\.options: reasoning-gym rejects them"):  # raised by its first item
        generate_tasks(named("aiw", task_types=["siblings"], task_type_weights=[1.0]), 1)


def test_a_verifier_that_raises_gives_no_mark() -> None:
    class Fragile:
        def score_answer(self, answer: str, entry: dict) -> float:
            raise ValueError("cannot parse")

    task, = generate_tasks(named("chain_sum"), 1)
    assert judge(Fragile(), task, Reply("anything")).mark == 0
