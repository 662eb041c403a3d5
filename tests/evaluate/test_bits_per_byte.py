from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmworks.evaluate.bits_per_byte import ANSWERS, OVERALL, DocumentBits, bits_per_byte, by_domain, windows
from lmworks.evaluate.logprobs import BatchedLogProbs

DOCUMENTS = {"prose": ["Four score and seven years ago.", "a", "naïve, 中文"], "code": ["def f(x):\n    return x\n"]}


@given(st.integers(1, 400), st.integers(2, 64))
def test_windows_score_each_token_once_with_enough_context(tokens: int, length: int) -> None:
    ids = list(range(tokens))
    scored: list[int] = []
    for context, continuation in windows(ids, length):
        start = context[0]
        assert [*context, *continuation] == ids[start : start + len(context) + len(continuation)]  # contiguous, nothing skipped
        assert len(context) + len(continuation) - 1 <= length  # inputs fit the context
        assert len(context) >= length // 4 or start == 0
        scored += continuation
    assert scored == ids[1:]


def direct(model, tokenizer, text: str) -> float:
    """Bits of a document from one forward pass, by the definition."""
    ids = tokenizer.encode(text)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids]))[0].double().log_softmax(-1)
    return math.log2(tokenizer.vocab_size) - sum(logprobs[t, ids[t + 1]].item() for t in range(len(ids) - 1)) / math.log(2)


def test_equals_the_direct_computation(small_transformer, byte_tokenizer) -> None:
    measured = bits_per_byte(DOCUMENTS, byte_tokenizer, byte_tokenizer.vocab_size, BatchedLogProbs(small_transformer), 96)
    for domain, texts in DOCUMENTS.items():
        bits = sum(direct(small_transformer, byte_tokenizer, text) for text in texts)
        # fp32 logits batched in another shape: relative 1e-5
        assert measured[domain].value == pytest.approx(bits / sum(len(t.encode()) for t in texts), rel=1e-5)
    assert measured["prose"].bytes == len("".join(DOCUMENTS["prose"]).encode())
    total = measured["overall"]
    assert total.bytes == measured["prose"].bytes + measured["code"].bytes
    assert total.bits == pytest.approx(measured["prose"].bits + measured["code"].bits)
    assert total.documents == 4


@pytest.mark.parametrize("prefix", [(256,), (257, 256)])
@pytest.mark.parametrize("length", [8, 96])
def test_a_token_before_every_text_costs_nothing_and_is_not_counted(bigram, byte_tokenizer, prefix: tuple[int, ...], length: int) -> None:
    byte_tokenizer.prefix, encode = prefix, byte_tokenizer.encode
    byte_tokenizer.encode = lambda text: [*prefix, *encode(text)]
    texts = ["a", "the quick brown fox jumps over the lazy dog. " * 5]
    measured = bits_per_byte({"d": texts}, byte_tokenizer, byte_tokenizer.vocab_size, BatchedLogProbs(bigram), length)["d"]
    table = bigram.embedding.weight / math.log(2)
    assert measured.bits == pytest.approx(-sum(table[a, b].item() for text in texts for a, b in pairwise([256, *encode(text)])))
    assert measured.tokens == measured.bytes == sum(map(len, texts))


@pytest.mark.parametrize("length", [2, 3, 8, 17, 64])
def test_windows_count_each_byte_once(bigram, byte_tokenizer, length: int) -> None:
    """The bigram model sees one token back only, so any window must give the bits of the whole document."""
    text = "the quick brown fox jumps over the lazy dog. " * 5
    measured = bits_per_byte({"d": [text]}, byte_tokenizer, byte_tokenizer.vocab_size, BatchedLogProbs(bigram), length)["d"]
    assert measured.bits == pytest.approx(direct(bigram, byte_tokenizer, text), rel=1e-12)
    assert (measured.bytes, measured.tokens) == (len(text), len(text))


def test_answers_are_measured_and_no_part_of_the_overall_figure() -> None:
    found = by_domain([DocumentBits("a", "web", 30.0, 10, 5), DocumentBits("b", f"{ANSWERS}chat", 999.0, 10, 5)])
    assert {domain: one.bits for domain, one in found.items()} == {"web": 30.0, f"{ANSWERS}chat": 999.0, OVERALL: 30.0}
