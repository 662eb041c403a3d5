"""Cleaning: what is mended, what is left alone."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from lmworks.corpus.cleaning import clean, encodable, fingerprint_form


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


def test_half_a_surrogate_pair_is_no_text() -> None:
    assert not encodable("broken \ud83d")
    assert encodable("whole 😀")


def test_equal_up_to_case_and_blanks() -> None:
    assert fingerprint_form("The  Same\n\nText ") == fingerprint_form("the same text")
    assert fingerprint_form("a+b") != fingerprint_form("a-b")
