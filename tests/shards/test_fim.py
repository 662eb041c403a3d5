"""Fill-in-the-middle: the pieces are those of the document, in an order that a reader of the tokens can undo, and nothing else changes."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Corpus, Fim, Source
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.build import build_shards
from lmworks.shards.encode import MIDDLE, PREFIX, SUFFIX, encode_documents, split_document
from lmworks.shards.manifest import Manifest
from lmworks.tokenizer import Tokenizer, load

BOTH = Fim(rate=0.5, spm_rate=0.5)


def undo(tokenizer: Tokenizer, tokens: np.ndarray) -> tuple[str, str, str, str]:
    """(order, prefix, middle, suffix) as read from the tokens; of SPM the prefix and the middle are one text."""
    text = [[] for _ in range(4)]  # before any special token, after <prefix>, after <suffix>, after <middle>
    at = 0
    names = {tokenizer.special[PREFIX]: 1, tokenizer.special[SUFFIX]: 2, tokenizer.special[MIDDLE]: 3}
    for token in tokens.tolist():
        if token in names:
            at = names[token]
        else:
            text[at].append(token)
    whole, prefix, suffix, middle = (tokenizer.decode(part) for part in text)
    if at == 0:
        return "whole", whole, "", ""
    second = [token for token in tokens.tolist() if token in names][1]
    first_two = tokens[:2].tolist() == [tokenizer.special[PREFIX], tokenizer.special[SUFFIX]]
    assert names[second] == 2 and whole == ""
    return ("spm" if first_two and not prefix else "psm"), prefix, middle, suffix


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return load(tokenizer_dir)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.integers(0, 2**40), st.floats(0, 1), st.floats(0, 1))
def test_the_pieces_are_the_text(text: str, number: int, rate: float, spm: float) -> None:
    found = split_document(f"code/0/{number}", text, Fim(rate=rate, spm_rate=spm), 1)
    assert found is None or "".join(found[:3]) == text
    assert split_document(f"code/0/{number}", text, Fim(rate=0, spm_rate=spm), 1) is None
    always = split_document(f"code/0/{number}", text, Fim(rate=1, spm_rate=1), 1)
    assert always is not None and always[3]


def test_places_are_drawn_evenly_and_as_often_as_asked() -> None:
    found = [split_document(f"code/0/{number}", "x" * 100, Fim(rate=0.3, spm_rate=0.7), 5) for number in range(8000)]
    taken = [one for one in found if one]
    assert len(taken) / 8000 == pytest.approx(0.3, abs=0.02)
    assert np.mean([one[3] for one in taken]) == pytest.approx(0.7, abs=0.03)
    for piece in range(3):  # two even places cut a line in three parts of equal mean length
        assert np.mean([len(one[piece]) for one in taken]) == pytest.approx(100 / 3, abs=2)
    assert found == [split_document(f"code/0/{number}", "x" * 100, Fim(rate=0.3, spm_rate=0.7), 5) for number in range(8000)]
    assert found != [split_document(f"code/0/{number}", "x" * 100, Fim(rate=0.3, spm_rate=0.7), 6) for number in range(8000)]


def test_a_reader_of_the_tokens_can_put_the_document_together(tokenizer: Tokenizer) -> None:
    source = inspect.getsource(inspect)
    texts = [source[start : start + 400 + start % 77] for start in range(0, 60_000, 300)]
    texts += ["", "中文 naïve 🙂", f"{PREFIX} is text {MIDDLE}"]
    ids = [f"code/0/{number}" for number in range(len(texts))]
    documents = encode_documents(tokenizer, ids, texts, BOTH, 3, 1)
    orders = []
    for identity, text, tokens in zip(ids, texts, documents, strict=True):
        order, prefix, middle, suffix = undo(tokenizer, tokens)
        orders.append(order)
        assert prefix + middle + suffix == text  # of SPM the third piece is prefix and middle together
        assert int(tokenizer.byte_lengths[tokens].sum()) == len(text.encode())
        found = split_document(identity, text, BOTH, 3)
        assert (order == "whole") == (found is None)
    counts = {order: orders.count(order) for order in ("whole", "psm", "spm")}
    assert min(counts.values()) > 30, counts
    whole = encode_documents(tokenizer, ids, texts, None, 3, 1)
    assert all(np.array_equal(a, b) for a, b in zip(whole, tokenizer.encode_batch(texts), strict=True))


def infilled(recipe: Recipe, name: str = "code") -> Recipe:
    source = Source(name=name, kind="text", path="unused", license="test", fim=Fim(rate=0.8))
    return recipe.model_copy(update={"corpus": Corpus(sources=[source])})


def test_shards_of_the_source_alone_are_cut_and_held_out_text_never(
    recipe: Recipe, corpus: Path, tokenizer_dir: Path, shards_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    plain, made = Manifest.load(shards_dir), build_shards(infilled(recipe), corpus, tokenizer_dir, tmp_path / "shards")
    assert made.source("docs") == plain.source("docs") and made.source("code").validation == plain.source("code").validation
    code = made.source("code").train
    assert code.bytes == plain.source("code").train.bytes and code.documents == plain.source("code").train.documents
    assert code.tokens > plain.source("code").train.tokens
    tokens = np.empty((1, code.tokens), np.int64)
    made.stream(tmp_path / "shards", "code").gather(np.array([0]), code.tokens, tokens)
    documents = np.split(tokens[0], np.flatnonzero(tokens[0] == tokenizer.eos_id) + 1)[:-1]
    texts = sorted("".join(undo(tokenizer, document[:-1])[1:]) for document in documents)
    assert texts == sorted(pq.read_table(corpus / "train" / "code")["text"].to_pylist())
    special = {name: int((tokens == tokenizer.special[name]).sum()) for name in (PREFIX, MIDDLE, SUFFIX)}
    assert len(set(special.values())) == 1 and 0 < special[PREFIX] <= code.documents
    again = build_shards(recipe, corpus, tokenizer_dir, tmp_path / "shards")
    assert again.source("code").train.shards == plain.source("code").train.shards  # taken back, the shards are what they were


def test_a_tokenizer_without_the_tokens_is_refused(recipe: Recipe, corpus: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "tokenizer"))
    spec = json.loads((folder / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["content"] = token["content"].replace(MIDDLE, "<|other|>")
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match=r"has no <\|code_middle\|>, which fim needs"):
        build_shards(infilled(recipe), corpus, folder, tmp_path / "shards")
