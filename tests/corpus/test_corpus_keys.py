"""Documents that are the same by their text or by their address."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmworks.corpus.dedup.signatures import find_copies, in_slice, keys_of, normal_url, text_keys, url_keys


@pytest.mark.parametrize(
    "same",
    [
        ["https://www.example.com/a/", "http://example.com/a", "HTTP://Example.COM:80/a#top", "//example.com//a/index.html"],
        ["https://example.com/p?b=2&a=1&utm_source=x", "https://example.com/p?a=1&b=2&fbclid=y", "https://example.com:443/p?a=1&b=2"],
        ["https://example.com/caf%C3%A9", "https://example.com/café", "https://example.com/caf%c3%a9/"],
        ["http://пример.рф/я", "http://ПРИМЕР.рф/%D1%8F", "https://xn--e1afmkfd.xn--p1ai/%d1%8f/"],
        ["https://www.xn--fa-hia.de/a/?utm_source=x", "http://faß.de/a"],  # of IDNA 2008, which has ß
        ["http://xn--n3h.net/?fbclid=1", "http://☃.net"],
    ],
)
def test_one_page_has_one_address(same: list[str]) -> None:
    assert len({normal_url(url) for url in same}) == 1


def test_other_pages_have_other_addresses() -> None:
    urls = [
        "https://example.com/a", "https://example.com/A", "https://example.com/a?id=1", "https://example.com/a?id=2",
        "https://sub.example.com/a",
        "https://example.com:8080/a", "https://example.com/#!/a", "https://example.org/a", "https://example.com/a%2Fb", "https://example.com/a/b",
        "http://example.cn/%D6%D0", "http://example.cn/%B9%FA", "http://example.ru/?q=%EF%F0", "http://example.ru/?q=%F0%EF",
    ]  # fmt: skip
    assert len({normal_url(url) for url in urls}) == len(urls)


ODD = [
    "", "   ", "http://[::1", "not an address", "http://", "a" * 5000, "http://example.com:99999/", "\ud800", "xn--" + "a" * 99, "xn--é",
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_addresses_are_taken_as_they_are(odd: str) -> None:
    assert url_keys([odd]).shape == (1, 2)
    assert normal_url(normal_url(odd)) == normal_url(odd)


def test_the_key_of_a_text_sees_neither_case_nor_space_but_everything_else() -> None:
    keys = text_keys(["Two  words\n", "two words", "two, words", "2 + 2", "2 - 2"])
    assert find_copies(keys).tolist() == [[1, 0]]


def test_no_address_is_nobodys_copy() -> None:
    assert find_copies(url_keys([None, "", None, "example.com", "www.example.com/"])).tolist() == [[4, 3]]


@given(st.lists(st.sampled_from("abcde"), max_size=30), st.integers(1, 4))
def test_copies_name_the_first_and_slices_add_up(words: list[str], slices: int) -> None:
    keys = keys_of(words)
    expected = [[row, words.index(word)] for row, word in enumerate(words) if words.index(word) != row]
    assert find_copies(keys).tolist() == expected
    parts = []
    for number in range(slices):
        rows = np.flatnonzero(in_slice(keys, number, slices))
        parts += rows[find_copies(keys[rows])].tolist()
    assert sorted(parts) == expected
