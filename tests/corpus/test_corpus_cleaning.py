"""Cleaning: what is mended, what is left alone."""

from __future__ import annotations

import pydoc_data.topics
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_documents import outcomes_of, step_of
from test_corpus_rules import ARTICLE

from lmworks.corpus.document import Document
from lmworks.corpus.transform.cleaning import clean, comparison_form, fix_mojibake
from lmworks.recipe.schema.steps import Clean


def test_line_ends_controls_and_spaces() -> None:
    assert clean("a\r\nb\rc\u2028d\x85e") == "a\nb\nc\nd\ne"
    assert clean("\ufeffin\u00advisi\u200bble\x00\x1b[0m\x7f") == "invisible[0m"
    assert clean("10\u00a0km\u202fweit\u2003hier") == "10 km weit hier"
    assert clean("if a:   \n\tb  \n\n\n\n\n\nc\n\n") == "if a:\n\tb\n\n\nc"


def test_unicode_becomes_composed() -> None:
    assert clean("cafe\u0301") == "caf\u00e9"
    assert clean("か\u3099") == "が"


def test_direction_overrides_go_and_joiners_stay() -> None:
    assert clean("access\u202eresu\u202c = 1\u2066\u2069") == "accessresu = 1"
    assert clean("می\u200cخواهم 👩\u200d💻") == "می\u200cخواهم 👩\u200d💻"


def test_word_borders_stay_where_a_script_has_no_others() -> None:
    for text in ("ภาษา\u200bไทย", "ភាសា\u200bខ្មែរ", "မြန်မာ\u200bစာ", "ภาษา\u200bABC"):
        assert clean(text) == text
    assert clean("ไทย\u200b\u200b\u200bไทย") == "ไทย\u200bไทย"
    assert clean("ไทย\u200b\xad\u200bไทย A\u200bB 東\u200b京") == "ไทย\u200bไทย AB 東京"


def test_indentation_and_wide_spaces_stay() -> None:
    assert clean("def f():\n    return 1") == "def f():\n    return 1"
    assert clean("東京\u3000大阪") == "東京\u3000大阪"


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_cleaning_twice_is_cleaning_once_and_gives_composed_text(text: str) -> None:
    once = clean(text)
    assert clean(once) == once
    assert unicodedata.is_normalized("NFC", once)
    assert "\r" not in once
    assert "\x00" not in once


def test_equal_up_to_case_and_blanks() -> None:
    assert comparison_form("The  Same\n\nText ") == comparison_form("the same text")
    assert comparison_form("a+b") != comparison_form("a-b")


@pytest.mark.parametrize(
    ("mangled", "whole"),
    [
        ("schÃ¶n und groÃŸ", "schön und groß"),
        ("itâ€™s â€œquotedâ€\x9d", "it’s “quoted”"),
        ("РїСЂРёРІРµС‚ РјРёСЂ", "привет мир"),
        ("caf√© con leche", "café con leche"),
        ("å\x93\x81è´¨", "品质"),
    ],
)
def test_mojibake_is_mended_where_asked(mangled: str, whole: str) -> None:
    assert clean(f"one line\n{mangled}\nanother", mojibake=True) == f"one line\n{whole}\nanother"
    assert clean(mangled) != whole


def test_letters_that_look_like_controls_are_kept() -> None:
    """Code page 850 between letters, Windows-1252 elsewhere: both are met as Latin-1."""
    assert clean("sch\x84tzte, h\x94ren, M\x81ller, gar\x87on") == "schätzte, hören, Müller, garçon"
    assert clean("don\x92t say \x93yes\x94 \x96 mu\x9aka, \x80 5") == "don’t say “yes” – muška, € 5"


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "cp1250", "cp1251", "cp1254", "cp1257", "iso8859-2", "mac-roman", "cp437"])
def test_all_that_ftfy_mends_is_mended(encoding: str) -> None:
    import ftfy

    mended = 0
    for text in ARTICLE.values():
        for line in text.split(". "):
            mangled = "".join(bytes([byte]).decode(encoding, "ignore") or chr(byte) for byte in line.encode())
            whole = ftfy.fix_encoding(mangled)
            mended += whole != mangled
            assert fix_mojibake(mangled) == whole
    assert mended > 10


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
@pytest.mark.parametrize("language", ["cs", "da", "de", "es", "fi", "fr", "it", "pt", "sv", "tr"])
def test_real_text_survives_being_mangled(language: str, encoding: str) -> None:
    text = ARTICLE[language]
    mangled = text.encode().decode(encoding, errors="replace")
    if "\ufffd" not in mangled and mangled != text:
        assert clean(mangled, mojibake=True) == text


def test_text_that_is_well_is_left_alone() -> None:
    odd = ["café” said »é”", "РСФСР и США", "naïve Ñandú", "Ã is a letter, â too", "√2 ≈ 1.41", "10 Â°C is mangled, 10 °C is not"[-13:]]
    for text in [*ARTICLE.values(), *odd]:
        assert clean(text, mojibake=True) == clean(text)
    for topic in pydoc_data.topics.topics.values():
        assert clean(topic, mojibake=True) == clean(topic)


@settings(max_examples=300)
@given(st.lists(st.sampled_from([*"Ã¶Â°â€™œ\x9dРїСЂ√© é\n\xa0a1\u0301", "ï»¿", "schÃ¶n", "Ãƒ\x83Â¶"]), max_size=16).map("".join))
def test_mending_twice_is_mending_once(text: str) -> None:
    once = clean(text, mojibake=True)
    assert clean(once, mojibake=True) == once


def test_the_step_and_exact_code() -> None:
    code = "x = 1  \r\n\n\n\n\n# schÃ¶n\n"
    mended, exact = (outcomes_of(step_of(Clean(exact_code=kept)), [code], domain="code")[0] for kept in (False, True))
    assert isinstance(mended, Document) and mended.text == "x = 1\n\n\n# schön"
    assert isinstance(exact, Document) and exact.text == code
    prose = outcomes_of(step_of(Clean(exact_code=True, mojibake=False)), [code])[0]
    assert isinstance(prose, Document) and prose.text == "x = 1\n\n\n# schÃ¶n"


@pytest.mark.parametrize("unit", [" ", "\t \n", "\n", "Ã¶", "\u200b", "e\u0301", "\xa0", "Ã"])
def test_hostile_text_of_a_megabyte(unit: str) -> None:
    """A pattern that backtracks over its input would be here until the test times out."""
    text = unit * (1_000_000 // len(unit)) + "x"
    assert clean(text, mojibake=True).endswith("x")
