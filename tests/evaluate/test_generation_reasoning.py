from __future__ import annotations

import pytest

from lmworks.corpus.contamination import Question
from lmworks.errors import UserError
from lmworks.evaluate import tasks
from lmworks.recipe.schema.evaluate import Generator

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

NAMES = [
    "basic_arithmetic", "chain_sum", "leg_counting", "spell_backward", "letter_counting", "number_sorting", "calendar_arithmetic",
    "count_bits",
]  # fmt: skip


def named(name: str, **options: object) -> Generator:
    return Generator(name=name, options=options)


@pytest.mark.parametrize("name", NAMES)
def test_right_answers_are_solved_and_wrong_ones_are_not(name: str) -> None:
    asked = tasks.generate_tasks(named(name), 8)
    right = tasks.judge(asked, [f"The answer is {task.answer}." if "\n" not in task.answer else task.answer for task in asked])
    assert all(j.solved for j in right), [(j.extracted, j.task.answer) for j in right if not j.solved]
    wrong = tasks.judge(asked, ["", "I do not know", "<answer>4711000</answer>", *(f"{t.answer} or 77 or so" for t in asked[3:])])
    assert not any(j.solved for j in wrong), [(j.reply, j.mark) for j in wrong if j.solved]


def test_part_marks_are_not_solutions() -> None:
    task = tasks.generate_tasks(named("chain_sum"), 1)[0]
    judged = tasks.judge([task], [f"{task.answer}, I think"])[0]
    assert 0 < judged.mark < 1  # the package pays for a right number inside a longer text
    assert not judged.solved


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
    assert tasks.extract(reply) == answer


def test_questions_are_fixed_and_none_is_a_tuning_seed() -> None:
    assert tasks.generate_tasks(named("chain_sum"), 5) == tasks.generate_tasks(named("chain_sum"), 8)[:5]
    evaluation = {t.id for t in tasks.generate_tasks(named("chain_sum"), 50)}
    tuning = {t.id for t in tasks.generate_tasks(named("chain_sum"), 50, seed=1)}
    assert not evaluation & tuning
    asked = [Question(t.id, t.question, t.answer) for t in tasks.generate_tasks(named("chain_sum"), 5)]
    assert list(tasks.questions([named("chain_sum")], 5)) == asked


def test_the_baseline_is_the_commonest_answer() -> None:
    asked = tasks.generate_tasks(named("syllogism"), 40)
    answers = [t.answer for t in asked]
    constant = max(sorted(set(answers)), key=answers.count)
    score = tasks.score(tasks.judge(asked, [constant] * len(asked)))
    assert score.accuracy == score.baseline >= 0.3
    assert score.verdict == "not above baseline"  # a model that always says the same has shown nothing


def test_an_unknown_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="'chain_sun'; did you mean chain_sum"):
        tasks.generate_tasks(named("chain_sun"), 1)


def test_options_reach_the_generator() -> None:
    short = named("needle_haystack", min_num_statements=3, max_num_statements=3)
    asked = tasks.generate_tasks(short, 20)
    assert all(task.question.count(". ") == 3 for task in asked)
    assert all(j.solved for j in tasks.judge(asked, [task.answer for task in asked]))
    assert max(task.question.count(". ") for task in tasks.generate_tasks(named("needle_haystack"), 20)) > 3


@pytest.mark.parametrize("options", [{"min_num_statement": 3}, {"min_num_statements": 0}])
def test_options_that_the_generator_does_not_take_are_named(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"evaluate\.tasks\.needle_haystack\.options: reasoning-gym rejects them \(.*min_num_statement"):
        tasks.generate_tasks(named("needle_haystack", **options), 1)
    with pytest.raises(UserError, match=r"evaluate\.tasks\.aiw\.options: reasoning-gym rejects them"):  # raised by its first item
        tasks.generate_tasks(named("aiw", task_types=["siblings"], task_type_weights=[1.0]), 1)


def test_a_verifier_that_raises_gives_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks.generate_tasks(named("chain_sum"), 1)[0]

    class Fragile:
        def score_answer(self, answer: str, entry: dict) -> float:
            raise ValueError("cannot parse")

    monkeypatch.setattr(tasks, "create", lambda *_: Fragile())
    assert tasks.judge([task], ["anything"])[0].mark == 0
