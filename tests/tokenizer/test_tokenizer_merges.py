from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_texts import ARTICLE, library, write_source

from lmworks.tokenizer import special
from lmworks.tokenizer.evaluate import draw_sample, shares
from lmworks.tokenizer.merges import WordCounts, count_words, learn_merges, to_symbols
from lmworks.tokenizer.tokenizer_json import BYTE_OF

STAND_INS = sorted(BYTE_OF)
NO_LIMIT = 10**9


def ours(words: Counter[str], most: int, longest: int = NO_LIMIT) -> list[tuple[str, str]]:
    table = np.zeros(256, dtype=np.int32)
    table[[BYTE_OF[char] for char in STAND_INS]] = np.arange(256)
    texts = list(words)
    symbols, owner = to_symbols(texts, table, "utf-8")
    pieces = list(STAND_INS)
    found = []
    for a, b in learn_merges(symbols, owner, np.array([words[text] for text in texts], dtype=np.int64), [1] * 256, most, longest):
        found.append((pieces[a], pieces[b]))
        pieces.append(pieces[a] + pieces[b])
    return found


def theirs(texts: list[str], most: int) -> list[tuple[str, str]]:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(special.SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=256 + most, min_frequency=2, show_progress=False, initial_alphabet=alphabet))
    return [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]


def test_merges_are_those_of_tokenizers_on_real_text() -> None:
    texts = [*library("argparse", "ast", "calendar", "datetime", "inspect", "turtle"), *list(ARTICLE.values()) * 3]
    merges = ours(count_words(texts, special.SPLIT, NO_LIMIT).counts, 6000)
    assert len(merges) > 4000
    assert merges == theirs(texts, 6000)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(alphabet="ab", max_size=12), max_size=8))
def test_merges_are_those_of_tokenizers_on_runs_and_ties(texts: list[str]) -> None:
    """Two letters give every way in which pairs overlap, run on and tie."""
    assert ours(count_words(texts, special.SPLIT, NO_LIMIT).counts, 40) == theirs(texts, 40)


def test_counts_beyond_32_bits_are_exact() -> None:
    """`ab` occurs more often than 2**32 times, `cd` less often; a count that wraps would turn them round."""
    assert ours(Counter({"ab": 2**33 + 1, "cd": 2**32, "ef": 2**40}), 3) == [("e", "f"), ("a", "b"), ("c", "d")]


def test_no_merge_is_longer_than_the_limit_and_none_is_seen_once() -> None:
    words = Counter({"-" * 40: 9, "abcdefgh": 5, "once": 1})
    merged = ["".join(pair) for pair in ours(words, 100, longest=6)]
    assert max(map(len, merged)) <= 6
    assert "----" in merged and "abcd" in merged
    assert not any("o" in piece for piece in merged)


def test_words_are_counted_within_a_bound() -> None:
    texts = [f"common word{n} rare{n}x " for n in range(500)]
    everything = count_words(texts, r"\w+|\s", NO_LIMIT)
    assert (len(everything.counts), everything.lost, everything.counts["common"]) == (1002, 0, 500)
    bounded = count_words(texts, r"\w+|\s", 100)
    assert len(bounded.counts) <= 100
    assert (bounded.counts["common"], bounded.counts[" "]) == (500, 1500)
    assert bounded.lost + bounded.counts.total() == bounded.occurrences == everything.occurrences


def test_a_word_is_cut_where_it_has_what_is_no_symbol() -> None:
    table = np.full(0x110000, -1, dtype=np.int32)
    table[[ord(char) for char in "ab"]] = (7, 8)
    symbols, owner = to_symbols(["ab人a", "", "b"], table, "utf-32-le")
    assert symbols.tolist() == [-1, 7, 8, -1, 7, -1, -1, 8, -1]
    assert owner[[1, 2, 4, 7]].tolist() == [0, 0, 0, 2]
    assert learn_merges(symbols, owner, np.array([5, 1, 1]), [1] * 9, 10, NO_LIMIT) == [(7, 8)]
    assert isinstance(WordCounts(Counter()).occurrences, int)


def languages(tmp_path: Path) -> dict[str, float]:
    for name, language, size in (("web", "en", 8000), ("web-de", "de", 1000), ("code", "code", 3000)):
        write_source(tmp_path, name, ["x" * 100] * (size // 100), language=language)
    return {"web": 0.64, "web-de": 0.04, "code": 0.32}


@pytest.mark.parametrize(("balance", "english"), [(1.0, 0.64), (0.5, 0.68 * 4 / 5), (0.0, 0.34)])
def test_languages_are_balanced_and_code_keeps_its_share(tmp_path: Path, balance: float, english: float) -> None:
    found = shares(tmp_path, languages(tmp_path), balance, seed=1)
    assert found == pytest.approx({("web", "en"): english, ("web-de", "de"): 0.68 - english, ("code", "code"): 0.32})


def test_languages_within_a_source_are_told_apart(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [(f"{'en' if n % 10 else 'de'} {n:03d} " + "x" * 93, "en" if n % 10 else "de") for n in range(400)]
    (tmp_path / "train" / "web").mkdir(parents=True)
    table = pa.table({"text": [text for text, _ in rows], "language": [language for _, language in rows]})
    pq.write_table(table, tmp_path / "train" / "web" / "00000.parquet", row_group_size=25)
    found = shares(tmp_path, {"web": 1.0}, 0.5, seed=1)
    assert found == pytest.approx({("web", "en"): 0.75, ("web", "de"): 0.25})
    used = Counter[str]()
    for source, language, text in draw_sample(tmp_path, found, 8000, seed=1):
        assert source == "web"
        assert text.startswith(language) or len(text) < 100
        used[language] += len(text)
    assert used == {"en": 6000, "de": 2000}
    short = Counter[str]()  # there are 4,000 bytes of German: what is missing is given by the other
    for _, language, text in draw_sample(tmp_path, found, 30_000, seed=1):
        short[language] += len(text)
    assert short == {"de": 4000, "en": 26_000}
