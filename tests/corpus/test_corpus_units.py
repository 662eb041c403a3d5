"""Units against a plain twin written with `re` and per-character loops."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.corpus.units import Symbols, ngrams, ngrams_of, run_hash, symbolic, symbolic_stretches, units
from lmworks.text.letters import fold

HAN = "日本語の文章です"


def plain_units(text: str) -> list[str]:
    """One character at a time, what `units` does vectorised."""
    found, current = [], ""
    for char in text:
        single = "\u3040" <= char < "\u3100" or "\u4e00" <= char < "\ua000"
        if (char.isalnum() or char == "_") and not single:
            current += char
            continue
        found += [current] if current else []
        current = ""
        found += [char] if single and char.isalnum() else []
    return found + ([current] if current else [])


def words_of(text: str, symbols: Symbols = "") -> list[str]:
    batch = units([text], symbols)
    return [text[start:end] for start, end in zip(batch.starts, batch.ends, strict=True)]


def test_words_characters_and_positions() -> None:
    assert words_of("Hello, World! don't x_y 3.14") == ["Hello", "World", "don", "t", "x_y", "3", "14"]
    assert words_of("GLM-4は日本語 ok。") == ["GLM", "4", "は", "日", "本", "語", "ok"]
    assert words_of("") == []
    assert words_of("… — \n\t") == []


def test_marks_belong_to_their_word() -> None:
    assert words_of("हिन्दी भाषा") == ["हिन्दी", "भाषा"]


def test_case_is_folded_but_letters_are_told_apart() -> None:
    upper, lower, other, swapped = (units([text]).hashes[0] for text in ("STRASSE", "strasse", "strasze", "srtasse"))
    assert upper == lower
    assert len({lower, other, swapped}) == 3


@given(st.lists(st.text(alphabet="aB_9 ,.\nあ漢é", max_size=40), min_size=1, max_size=6))
def test_equal_to_the_plain_twin_and_independent_of_the_batch(texts: list[str]) -> None:
    batch = units(texts)
    assert batch.documents == len(texts)
    for document, text in enumerate(texts):
        span = slice(batch.bounds[document], batch.bounds[document + 1])
        assert [text[a:b] for a, b in zip(batch.starts[span], batch.ends[span], strict=True)] == plain_units(text)
        assert np.array_equal(batch.hashes[span], units([text]).hashes)


def test_no_two_words_of_the_standard_library_collide() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text("utf-8", "replace") for path in sorted(root.glob("*.py"))[:80]]
    words = {fold(word) for text in texts for word in words_of(text)}
    hashes = units(["\n".join(sorted(words))]).hashes
    assert len(words) > 5000
    assert len(set(hashes.tolist())) == len(words)


def test_ngrams_depend_on_order_and_length() -> None:
    one, other = units(["a b c d"]).hashes, units(["a c b d"]).hashes
    assert not np.isin(ngrams(one, 2), ngrams(other, 2)).any()
    assert len(ngrams(one, 5)) == 0
    assert run_hash(one)[0] == ngrams(one, 4)[0]


@pytest.mark.parametrize("lengths", [[1], [2, 5], [1, 3, 4, 9]])
def test_shared_work_gives_the_same_ngrams(lengths: list[int]) -> None:
    hashes = units(["the quick brown fox jumps over"]).hashes
    for n, grams in ngrams_of(hashes, lengths):
        assert np.array_equal(grams, ngrams(hashes, n))
        assert len(grams) == max(6 - n + 1, 0)


@pytest.mark.parametrize("count", [1, 2, 13, 400])
def test_whole_is_the_only_ngram_of_that_length(count: int) -> None:
    hashes = units([" ".join(map(str, range(count)))]).hashes
    assert np.array_equal(run_hash(hashes), ngrams(hashes, count))


def test_units_are_the_same_wherever_they_stand() -> None:
    """Letters are weighed by their place in all the text, over blocks of 2^15; a word of any length comes out the same."""
    text = "alpha beta " + "x" * 70_000 + " gamma " + "日本 " * 12_000 + "delta é " * 9_000
    batch = units(["pad " * 3, text])
    words = [text[start:end] for start, end in zip(batch.starts[3:], batch.ends[3:], strict=True)]
    expected = {word: units([word]).hashes[0] for word in set(words)}
    assert batch.hashes[3:].tolist() == [expected[word] for word in words]
    assert len(set(expected.values())) == 8


def test_symbols_are_units_in_lines_that_are_made_of_them() -> None:
    assert words_of("x = y + 1\nthe value x + y of the two is what it gives", "lines")[:5] == ["x", "=", "y", "+", "1"]
    assert "+" not in words_of("the value x + y of the two is what it gives", "lines")
    assert words_of("####.#\n😀😃❤️", "lines") == ["#", "#", "#", "#", ".", "#", "😀", "😃", "❤"]
    assert words_of("a, b-c. x=1", "all") == ["a", "b", "-", "c", ".", "x", "=", "1"]


@pytest.mark.parametrize("marked", ["# {}", "* **{}**", "> {}", "1) {}", "{}\n=======", "-----\n{}", "“{}”"])
def test_markup_of_prose_changes_nothing(marked: str) -> None:
    text = "The herons of the lower harbor stand where the tide, at noon, has left them (so we say)."
    plain = units([text]).hashes
    assert np.array_equal(units([marked.format(text)], "lines").hashes[-len(plain) :], plain)


@given(st.lists(st.text(alphabet="aB_ (+=.\nあ#", max_size=90), min_size=1, max_size=5))
def test_symbols_are_independent_of_the_batch(texts: list[str]) -> None:
    for symbols in ("lines", "all"):
        batch = units(texts, symbols)
        for document, text in enumerate(texts):
            assert np.array_equal(batch.hashes_of(document), units([text], symbols).hashes)
    assert symbolic(texts).tolist() == [bool(symbolic([text])[0]) for text in texts]


def test_a_stretch_of_symbols_is_seen_in_its_text() -> None:
    prose = "nothing but words, for quite a while. " * 8
    brackets = "([{([{([{([{x" * 9
    numbers, places = symbolic_stretches([prose, f"{prose} {brackets} {prose}", prose, prose])
    assert set(numbers.tolist()) == {1} and all(len(prose) - 64 < place < len(prose) + len(brackets) + 64 for place in places)
    assert 1 in symbolic_stretches(["", brackets, "", prose])[0]
    assert symbolic_stretches([])[0].tolist() == []
