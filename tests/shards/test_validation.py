from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from lmworks.errors import UserError
from lmworks.shards.batch import IGNORE
from lmworks.shards.batches import Batches
from lmworks.tokenizer import Tokenizer, load


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return load(tokenizer_dir)


def held_out(corpus: Path, *sources: str) -> dict[str, str]:
    rows = [row for source in sources for row in pq.read_table(corpus / "validation" / source / "00000.parquet").to_pylist()]
    return {row["id"]: row["text"] for row in rows}


def segments(batch) -> list[tuple[list[int], list[int]]]:
    """(tokens, labels) between boundaries."""
    tokens, labels = batch.tokens.reshape(-1), batch.labels.reshape(-1)
    bounds = batch.cu_seqlens.tolist()
    return [(tokens[a:b].tolist(), labels[a:b].tolist()) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("length", [16, 64, 5000])
def test_every_token_but_the_first_is_predicted_once_in_its_document(
    batches: Batches, corpus: Path, tokenizer: Tokenizer, length: int
) -> None:
    validation = batches.validation("docs", length, sequences=4)
    texts = held_out(corpus, "docs", "words")
    expected: Counter[tuple[int, ...]] = Counter()
    for text in texts.values():
        ids = [*tokenizer.encode(text), tokenizer.eos_id]
        for at in range(0, len(ids) - 1, length):
            expected[tuple(ids[at : at + length + 1])] += 1
    found: Counter[tuple[int, ...]] = Counter()
    for batch in validation:
        assert batch.tokens.shape == (4, length)
        for tokens, labels in segments(batch):
            if all(label == IGNORE for label in labels):
                continue
            assert tokens[1:] == labels[:-1]
            found[(*tokens, labels[-1])] += 1
    assert found == expected
    assert {span.id for span in validation.documents()} == set(texts)


def test_bytes_are_those_of_the_predicted_text(batches: Batches, corpus: Path, tokenizer: Tokenizer) -> None:
    validation = batches.validation("docs", 64, sequences=4)
    exact = 0
    for text in held_out(corpus, "docs", "words").values():
        exact += len(text.encode()) - len(tokenizer.decode(tokenizer.encode(text)[:1]).encode())
    assert validation.text_bytes == exact
    assert sum(batch.text_bytes for batch in validation) == exact
    assert sum(batch.rows(row, row + 1).text_bytes for batch in validation for row in range(4)) == exact


def test_a_limit_in_bytes_cuts_the_last_document_of_each_source_only(batches: Batches, corpus: Path, tokenizer: Tokenizer) -> None:
    limit = 900
    validation = batches.validation("docs", 64, sequences=2, max_bytes=limit)
    assert 0.9 * limit < validation.text_bytes <= limit
    assert sum(batch.text_bytes for batch in validation) == validation.text_bytes
    texts = held_out(corpus, "docs", "words")
    cut = 0
    for span in validation.documents():
        ids = [*tokenizer.encode(texts[span.id]), tokenizer.eos_id]
        assert span.start == 0
        assert span.stop <= len(ids)
        cut += span.stop < len(ids)
    assert cut <= 2
    assert {span.id.split("/")[0] for span in validation.documents()} == {"docs", "words"}


def test_it_is_the_same_every_time(batches: Batches) -> None:
    one, other = (batches.validation("code", 64, sequences=3, max_bytes=5000) for _ in range(2))
    assert len(one) == len(other) > 1
    for first, second in zip(one, other, strict=True):
        assert np.array_equal(first.tokens, second.tokens)
        assert np.array_equal(first.labels, second.labels)
        assert np.array_equal(first.cu_seqlens, second.cu_seqlens)


def test_an_unknown_domain_is_refused(batches: Batches) -> None:
    assert batches.manifest.domains() == ["code", "docs"]
    with pytest.raises(UserError, match="no held-out text of domain math; available: code, docs"):
        batches.validation("math", 64, sequences=2)
