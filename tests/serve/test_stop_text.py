"""Stop strings and characters, however the text is cut into tokens."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.inference.generate import Token
from lmworks.serve.vocabulary import Assembler, Piece


class Bytes:
    """Tokens that are given byte strings."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces, self._utf8 = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._pieces[token])

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def assemble(pieces: list[bytes], stops: list[str]) -> list[Piece]:
    assembler = Assembler(Bytes(pieces), stops)
    shown = []
    for number in range(len(pieces)):
        shown.append(assembler.push(Token(number, -1.0)))
        if shown[-1].stopped:
            return shown
    return [*shown, assembler.finish()]


def first_stop(text: str, stops: list[str]) -> str:
    """The rule, on the whole text: the stop string that is complete first, the longest of several that end there."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[list[bytes], list[str]]:
    raw = draw(st.text("ab é漢😀", max_size=24)).encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[i:j] for i, j in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    return pieces, draw(st.lists(st.text("ab é漢", min_size=1, max_size=4), max_size=3))


@given(cut_texts())
def test_what_is_shown_does_not_depend_on_the_cuts(case: tuple[list[bytes], list[str]]) -> None:
    pieces, stops = case
    text = b"".join(pieces).decode()
    shown = assemble(pieces, stops)
    assert "".join(piece.text for piece in shown) == first_stop(text, stops)
    assert shown[-1].stopped == any(stop in text for stop in stops)


@given(cut_texts())
def test_each_token_comes_with_the_text_that_it_begins(case: tuple[list[bytes], list[str]]) -> None:
    pieces, stops = case
    at, seen = 0, []
    for piece in assemble(pieces, stops):
        for placed in piece.tokens:
            assert at <= placed.offset <= at + len(piece.text)
            seen.append(placed.token.id)
        at += len(piece.text)
    assert seen == list(range(len(seen)))
    if not stops:
        assert len(seen) == len(pieces)


def test_nothing_of_a_stop_string_is_shown_before_it_is_decided() -> None:
    shown = assemble([b"so", b" EN", b"D", b"?"], ["END!"])
    assert [piece.text for piece in shown] == ["so", " ", "", "END?", ""]
    assert [piece.text for piece in assemble([b"so", b" EN", b"D", b"!x"], ["END!"])] == ["so", " ", "", ""]


@pytest.mark.parametrize("tail", [b"\xe6", b"\xe6\xbc", b"\xf0\x9f\x98"])
def test_a_character_never_completed_becomes_one_replacement(tail: bytes) -> None:
    assert "".join(piece.text for piece in assemble([b"a", tail], [])) == "a�"
