"""A document that holds a passage twice loses the later one."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from step_documents import outcomes_of, step_of

from lmworks.corpus.document import Document, Drop
from lmworks.recipe.schema.steps import Repeats

SOURCE = Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text("utf-8")


def test_a_file_that_is_in_it_three_times_is_in_it_once() -> None:
    (outcome,) = outcomes_of(step_of(Repeats()), [f"{SOURCE}\n{SOURCE}\n{SOURCE}"])
    assert isinstance(outcome, Document)
    assert outcome.text.startswith(SOURCE.strip())
    assert len(outcome.text) < len(SOURCE) + 10
    assert 0.66 < float(outcome.facts["repeated"]) < 0.67


def test_what_repeats_nothing_is_as_it_was() -> None:
    short = "one two three " * 10
    whole, other = outcomes_of(step_of(Repeats()), [SOURCE, short])
    assert isinstance(whole, Document) and isinstance(other, Document)
    assert (whole.text, whole.facts) == (SOURCE, {"repeated": 0.0})
    assert other.text == short


def test_documents_of_one_batch_do_not_know_of_each_other() -> None:
    outcomes = outcomes_of(step_of(Repeats()), [SOURCE, SOURCE])
    assert all(isinstance(outcome, Document) and outcome.text == SOURCE for outcome in outcomes)


def test_mostly_repetition_goes_on_request() -> None:
    dropped, kept = outcomes_of(step_of(Repeats(max_fraction=0.6)), [SOURCE * 3, SOURCE * 2])
    assert isinstance(dropped, Drop) and dropped.reason == "repeated"
    assert isinstance(kept, Document)


def test_chinese_counts_characters() -> None:
    passage = "新鮮果汁都是當場現榨絕對新鮮我特別推薦現榨柳橙汁選用台灣在地的甜橙酸甜平衡"
    (outcome,) = outcomes_of(step_of(Repeats(min_words=20)), [f"{passage}。\n您好。{passage}。"])
    assert isinstance(outcome, Document)
    assert outcome.text == f"{passage}。\n您好。"
