"""Repeated lines and paragraphs, in a document and across the documents of a part."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from step_documents import documents, outcomes_of, step_of

from lmworks.corpus.document import Batch, Document, Drop
from lmworks.corpus.transform.filter_steps import Counters
from lmworks.recipe.schema.steps import Lines

LONG = "This line is long enough to be compared."
FOOTER = "Copyright 2024, all rights are reserved."


def read_texts(outcomes: list) -> list[str]:
    return [outcome.text if isinstance(outcome, Document) else outcome.reason for outcome in outcomes]


def test_a_line_stays_where_it_first_stood() -> None:
    text = f"{LONG}\n}}\nOther.\n}}\n\n  {LONG.upper()}  \nEnd."
    outcome = outcomes_of(step_of(Lines()), [text])[0]
    assert isinstance(outcome, Document)
    assert outcome.text == f"{LONG}\n}}\nOther.\n}}\n\nEnd.", "short lines are left alone, blanks and case do not count"
    assert 0.3 < outcome.facts["lines_dropped"] < 0.6


def test_paragraphs() -> None:
    one, two = f"{LONG}\nand more", f"{FOOTER}\nand more"
    step = step_of(Lines(unit="paragraph"))
    assert read_texts(outcomes_of(step, [f"{one}\n\n{two}\n\n\n{one}\n\nEnd."])) == [f"{one}\n\n{two}\n\n\nEnd."]
    assert read_texts(outcomes_of(step, [f"{one}\n\n{two}"])) == [f"{one}\n\n{two}"], "and more is no paragraph"


def test_boilerplate_across_documents_goes_after_so_many() -> None:
    texts = [f"Page {number} says something of its own.\n{FOOTER}" for number in range(6)]
    found = read_texts(outcomes_of(step_of(Lines(across_documents=3)), texts))
    assert found == [text if number < 3 else text.split("\n")[0] for number, text in enumerate(texts)]
    assert read_texts(outcomes_of(step_of(Lines()), texts)) == texts


def test_a_document_counts_a_line_once() -> None:
    step = step_of(Lines(across_documents=2, within=False))
    text = "\n".join([LONG] * 5)
    assert read_texts(outcomes_of(step, [text, text, text])) == [text, text, "only_repeated_lines"]


def test_batches_change_nothing_and_each_part_begins_anew() -> None:
    texts = [f"Page {number} says something of its own.\n{FOOTER}" for number in range(6)]
    expected = read_texts(outcomes_of(step_of(Lines(across_documents=2)), texts))
    step = step_of(Lines(across_documents=2))
    pieces = documents(texts)
    assert read_texts([outcome for piece in pieces for outcome in step(Batch([piece]))]) == expected
    assert read_texts(list(step(Batch(documents(texts))))) == expected, "the same part again"
    assert read_texts(list(step(Batch(documents(texts, part=1))))) == expected, "another part"


def test_code_and_other_sources_pass() -> None:
    text = f"{LONG}\n{LONG}"
    assert read_texts(outcomes_of(step_of(Lines(), domain="code"), [text])) == [text]
    assert read_texts(outcomes_of(step_of(Lines(sources=("books",))), [text])) == [text]
    assert read_texts(outcomes_of(step_of(Lines(sources=("web",))), [text])) == [LONG]


def test_nothing_left_is_a_drop() -> None:
    step = step_of(Lines(across_documents=1))
    outcomes = outcomes_of(step, [LONG, LONG])
    assert isinstance(outcomes[1], Drop) and outcomes[1].facts["lines_dropped"] == 1.0


@given(st.lists(st.sampled_from([LONG, FOOTER, "", "short", "  ", LONG + "\r"]), max_size=12))
def test_within_a_document_twice_is_once(lines: list[str]) -> None:
    for unit in ("line", "paragraph"):
        step = step_of(Lines(unit=unit))
        first = outcomes_of(step, ["\n".join(lines)])[0]
        assert isinstance(first, Document)
        again = outcomes_of(step, [first.text])[0]
        assert isinstance(again, Document) and again.text == first.text


def test_counters_count() -> None:
    draw = np.random.default_rng(0)
    values = draw.integers(0, 2**63, 50_000).tolist()
    counters = Counters()
    for times in range(3):
        assert (counters.add(values) >= times).all()
    assert (counters.add(draw.integers(0, 2**63, 50_000).tolist()) > 0).mean() < 0.001
    for _ in range(300):
        counters.add([7])
    assert counters.add([7]).tolist() == [255]
