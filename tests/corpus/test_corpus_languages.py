"""Ordinary prose of 27 languages is kept and planted junk of each is dropped; texts are compared in their folded form."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_documents import outcomes_of, step_of

from lmworks.corpus.document import Document, Drop
from lmworks.corpus.transform.published_words import Vocabulary, split
from lmworks.corpus.units import Symbols, units
from lmworks.recipe.schema.steps import Rules
from lmworks.text.letters import (
    FOLDED,
    LINE_ENDS,
    SENTENCE_ENDS,
    SPACELESS_LANGUAGES,
    characters,
    fold,
    fold_character,
    main_language,
    words,
)
from paragraphs import PARAGRAPHS

LANGUAGES = sorted(PARAGRAPHS)
EQUAL = {
    "case": ("Straße ÉTAT", "STRASSE état"),
    "capitals without accents": ("ETAT ΚΑΛΗΜΕΡΑ ёлка", "état καλημέρα елка"),
    "final sigma": ("ΟΔΟΣ ΤΗΣ ΠΟΛΗΣ", "οδος της πολης"),
    "Turkish capitals": ("İSTANBUL ILIK", "istanbul ılık"),
    "full-width forms": ("Ｈｅｌｌｏ　１２３", "hello 123"),
    "half-width kana": ("ｶﾞｷﾞｸﾞ ﾊﾟ", "ガギグ パ"),
    "full-width symbols": ("ａ＋ｂ＝（ｃ－２）", "a+b=(c-2)"),
    "ligatures": ("ﬁne oﬀer", "fine offer"),
    "Arabic presentation forms": ("ﻻ ﻣﺤﻤﺪ", "لا محمد"),
    "Arabic vowels and bars": ("كَتَبَ الوَلَـــدُ", "كتب الولد"),
    "Arabic hamza and Persian letters": ("أحمد یک", "احمد يك"),
    "Hebrew points": ("שָׁלוֹם", "שלום"),
    "joiners": ("क्\u200dया मि\u200cत्र نمی\u200cشود", "क्या मित्र نمیشود"),
    "invisible characters": ("w\u200bo\u2060r\u00add\ufeff", "word"),
    "tags of language": ("wo\U000e0041rd", "word"),
    "variation selectors": ("字\ufe00❤\ufe0f", "字❤"),
    "digits": ("१२३ ٤٥٦ ๗", "123 456 7"),
    "decomposed": ("e\u0301tat 한국 が", "état 한국 が"),
    "mathematical letters": ("𝐖𝐨𝐫𝐝 ℌ", "word h"),
}


def hashes_of(text: str, symbols: Symbols = "") -> list[int]:
    return units([text], symbols).hashes.tolist()


@pytest.mark.parametrize("what", EQUAL)
def test_what_writers_vary_makes_no_difference(what: str) -> None:
    one, other = EQUAL[what]
    assert hashes_of(one, "all") == hashes_of(other, "all")
    assert fold(one).split() == fold(other).split()


def test_no_other_characters_fold() -> None:
    usual = set(characters(r"[\p{L}\p{M}\p{N}\p{S}\p{P}\p{C}--[\p{Script=Han}\p{Script=Hangul}]]")) - set(characters(FOLDED))
    assert len(usual) > 10_000 and [char for char in usual if fold_character(char) != char] == []


@pytest.mark.parametrize(("one", "other"), [("कि", "की"), ("ก่า", "ก้า"), ("が", "か"), ("مكتب", "كتب"), ("بات", "باب"), ("fein", "fern")])
def test_letters_and_vowels_that_tell_words_apart_do(one: str, other: str) -> None:
    assert hashes_of(one) != hashes_of(other)


PIECES = ["a", "É", "ß", " ", "ﬁ", "\u200d", "क", "\u094d", "१", "ก", "\u0e48", "ｶﾞ", "한", "ᄒ\u1161", ".", "\n", "漢", "\U000e0041", "x²"]


@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), min_size=1, max_size=6))
def test_folding_is_that_of_single_characters_and_places_are_in_the_text(texts: list[str]) -> None:
    batch = units(texts)
    for document, text in enumerate(texts):
        span = slice(batch.bounds[document], batch.bounds[document + 1])
        alone = units([text])
        assert np.array_equal(batch.hashes[span], alone.hashes)
        assert np.array_equal(batch.hashes[span], units([fold(text)]).hashes)
        places = list(zip(batch.starts[span].tolist(), batch.ends[span].tolist(), strict=True))
        assert all(0 <= start < end <= len(text) for start, end in places)
        assert all(one[0] <= other[0] for one, other in pairwise(places))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("हिन्दी में क्या", ["हिन्दी", "में", "क्या"]),
        ("ที่รู้กัน ๑๒", ["ที่", "รู้", "กั", "น", "๑๒"]),
        ("ကိုယ် နှင့်", ["ကို", "ယ်", "နှ", "င့်"]),
        ("ภาษาThai5", ["ภ", "า", "ษ", "า", "Thai5"]),
        ("日本語のガ", ["日", "本", "語", "の", "ガ"]),
    ],
)
def test_marks_belong_to_their_letter(text: str, expected: list[str]) -> None:
    batch = units([text])
    assert [text[start:end] for start, end in zip(batch.starts, batch.ends, strict=True)] == expected
    assert batch.letters.tolist() == [sum(not char.isdigit() for char in word) for word in expected]
    assert batch.lengths.tolist() == list(map(len, expected))


def test_sentences_end_in_every_script() -> None:
    assert set(".!?।॥۔؟።።။។。！？｡։") <= SENTENCE_ENDS
    assert set(".:;…”»)」।༎፡") <= LINE_ENDS and LINE_ENDS.isdisjoint(",،、]a")
    for text in ("यह एक है। वह दो है।", "ذهب الولد. هل عاد؟", "これは本。あれは木。", "இது ஒன்று. அது இரண்டு."):
        assert Vocabulary().words([text])[0].sentences == 2, text
    assert list(split("(है)।")) == ["(", "है", ")", "।"] and list(split("ที่รู้")) == ["ที่", "รู้"]


def test_words_of_icu_keep_their_marks() -> None:
    text = "สงครามโลกครั้งที่สอง है।"
    assert [text[start:end] for start, end in words(text, "th")][-1] == "है"
    assert [main_language(tag) for tag in ("zh-Hant", "pt_BR", "nb", "sr-Latn")] == ["zh", "pt", "no", "sr"]


def judged(text: str, language: str, domain: str) -> str | None:
    (outcome,) = outcomes_of(step_of(Rules(), domain=domain), [text], domain=domain, language=language)
    return outcome.reason if isinstance(outcome, Drop) else None


@pytest.mark.parametrize("domain", ["prose", "web"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_ordinary_prose_is_kept(language: str, domain: str) -> None:
    assert judged(PARAGRAPHS[language], language, domain) is None


@pytest.mark.parametrize("language", [language for language in LANGUAGES if language in SPACELESS_LANGUAGES])
def test_a_script_without_spaces_is_seen_where_the_language_is_not_known(language: str) -> None:
    assert judged(PARAGRAPHS[language], "und", "web") is None


def planted(language: str) -> dict[str, str]:
    """Junk made of the words of the language."""
    rng, text = random.Random(language), PARAGRAPHS[language]
    own = [text[start:end] for start, end in words(text, language)]
    sep = "" if language in SPACELESS_LANGUAGES else " "
    lines = [part for part in re.split(rf"(?<=[{re.escape(''.join(SENTENCE_ENDS))}])\s*|\n", text) if part.strip()]
    phrase = sep.join(sorted(own, key=len)[-3:])
    found = {
        "symbols": "\n".join("".join(rng.choices("#*=-|~+<>/^_@$%&", k=40)) + " " + rng.choice(own) for _ in range(60)),
        "a repeated line": "\n".join([lines[0]] * 6 + lines + [lines[0]] * 6),
        "a repeated phrase": sep.join(word for _ in range(40) for word in (phrase, *rng.sample(own, 2))),
        "unfinished lines": "\n".join(sep.join(rng.sample(own, 8)) + "..." for _ in range(12)),
        "hash signs": " ".join(f"#{word}" for word in own),
        "numbers": " ".join(str(rng.randrange(10**5)) + f" {word}" for word in own * 2),
        "a few words": sep.join(own[:20]),
    }
    if language not in ("zh", "ja"):  # whose characters with spaces between them are still text
        found["letters"] = " ".join(char for word in own for char in word if char.isalpha())
    return found


def menu(language: str) -> str:
    """Short lines without sentences, as in a menu of a web page."""
    rng, text = random.Random(language), PARAGRAPHS[language]
    own = sorted({text[start:end] for start, end in words(text, language)}, key=len)[-20:]
    return "\n".join(rng.choice(own) for _ in range(120))


@pytest.mark.parametrize("domain", ["prose", "web"])
@pytest.mark.parametrize("language", LANGUAGES)
def test_planted_junk_is_dropped_as_in_english(language: str, domain: str) -> None:
    assert [what for what, text in planted(language).items() if judged(text, language, domain) is None] == []
    assert judged(menu(language), language, "web") is not None


@pytest.mark.parametrize("language", ["zh", "ja", "th", "km"])
def test_the_shape_of_lines_counts_in_scripts_without_spaces(language: str) -> None:
    text = PARAGRAPHS[language].replace(" ", "").replace("\n", "")
    lines = "\n".join(text[start : start + 8] for start in range(0, len(text), 8))
    assert judged(lines, language, "prose") is None and judged(lines, language, "web") in ("short_lines", "ended_lines")


def test_both_scripts_of_a_language_are_known() -> None:
    text = (
        "Kada smo stigli u selo, kiša je već prestala i deca su se opet igrala na ulici. Stara kuća moga strica bila je na kraju puta, iza "
        "reda visokih topola. On nas je čekao pred vratima sa velikim osmehom, a u kuhinji je supa odavno bila gotova. Uveče nam je "
        "pričao kako je reka odnela most u zimu kada je on još bio mali, i kako dve nedelje niko nije mogao da ode u grad."
    )
    assert judged(text, "sr-Latn", "prose") is None


def test_text_in_another_language_than_said_is_dropped() -> None:
    assert judged(PARAGRAPHS["de"], "hi", "prose") == "stop_words"
    assert judged(PARAGRAPHS["zh"], "en", "prose") is not None
    assert isinstance(outcomes_of(step_of(Rules()), [PARAGRAPHS["en"]])[0], Document)
