"""Documents that say the same: embeddings of real text, greedy keep-first against the plain way, and the whole stage."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow.parquet as pq
import pytest

from lmworks.corpus import prepare
from lmworks.corpus.dedup.near import StackedArrays
from lmworks.corpus.dedup.semantic import embedding, random_projection, semantic_duplicates
from lmworks.corpus.document import Document
from lmworks.corpus.units import units
from lmworks.errors import UserError
from lmworks.io.run_layout import corpus_files
from lmworks.recipe.schema.corpus import Corpus, Dedup, Semantic, Source
from lmworks.recipe.schema.recipe import Recipe


def texts() -> list[str]:
    """Stretches of the language reference of about 800 letters."""
    found, held = [], ""
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            held += paragraph + "\n\n"
            if len(held) > 800:
                found.append(held)
                held = ""
    return list(dict.fromkeys(found))


def reordered(text: str, draw: random.Random, lost: float = 0.05) -> str:
    """The same sentences in another order, with some words left out."""
    sentences = text.replace("\n", " ").split(". ")
    draw.shuffle(sentences)
    return " ".join(word for word in ". ".join(sentences).split() if draw.random() > lost)


def brute_force(vectors: np.ndarray, threshold: float) -> np.ndarray:
    """Keep-first deduplication over all rows, without clusters."""
    vectors, kept, first = vectors.astype(np.float32), [], []
    for row, vector in enumerate(vectors):
        same = [earlier for earlier in kept if vectors[earlier] @ vector >= threshold]
        first.append(same[0] if same else row)
        if not same:
            kept.append(row)
    return np.array(first)


def test_another_order_and_lost_words_are_seen_through_and_other_texts_are_not_alike() -> None:
    draw, originals = random.Random(0), texts()[:400]
    vectors = random_projection(units(originals), 256).astype(np.float32)
    again = random_projection(units([reordered(text, draw) for text in originals]), 256).astype(np.float32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-2)
    same, others = (vectors * again).sum(1), np.tril(vectors @ vectors.T, -1)
    assert np.mean(same >= 0.95) > 0.95
    assert np.quantile(others.max(axis=1), 0.9) < 0.8
    for a, b in np.argwhere(others >= 0.95):  # some passages of the reference stand in it twice
        words = [Counter(originals[one].lower().split()) for one in (a, b)]
        assert (words[0] & words[1]).total() / (words[0] | words[1]).total() > 0.75
    assert not random_projection(units(["", "?"]), 64).any()
    alone = random_projection(units(originals[3:4]), 256)[0]
    assert np.array_equal(alone, random_projection(units(originals), 256)[3])  # whatever its batch


@pytest.mark.parametrize("block", [7, 2048])
def test_it_is_the_plain_way_where_all_are_compared(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.corpus.dedup.semantic._BLOCK", block)
    draw = np.random.default_rng(1)
    centers = draw.normal(size=(300, 64))
    rows = centers[draw.integers(0, 300, 1200)] + draw.normal(size=(1200, 64)) * draw.uniform(0, 0.6, (1200, 1))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)
    found = semantic_duplicates(StackedArrays([rows[:700], rows[700:701], rows[701:]]), Semantic(threshold=0.9,
        documents_per_cluster=5000), 0)
    assert np.array_equal(found, brute_force(rows, 0.9))
    assert 200 < (found != np.arange(1200)).sum() < 1000


def test_clusters_find_what_comparing_all_finds_at_a_fraction_of_the_pairs() -> None:
    draw, originals = random.Random(2), texts()
    everything = [*originals, *(reordered(text, draw) for text in originals[::2])]
    vectors = StackedArrays([random_projection(units(everything), 256)])
    whole = semantic_duplicates(vectors, Semantic(documents_per_cluster=10_000), 0)
    parted = semantic_duplicates(vectors, Semantic(documents_per_cluster=60), 0)
    assert np.array_equal(parted, semantic_duplicates(vectors, Semantic(documents_per_cluster=60), 0))
    dropped = whole != np.arange(len(everything))
    assert dropped.sum() > 0.4 * len(originals)
    assert ((parted != np.arange(len(everything))) & dropped).sum() > 0.97 * dropped.sum()


def test_a_chain_of_neighbours_does_not_swallow_its_far_end() -> None:
    angles = np.deg2rad([0, 20, 40, 60])
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float16)
    assert semantic_duplicates(StackedArrays([rows]), Semantic(threshold=0.9), 0).tolist() == [0, 0, 2, 2]


def recipe(folder: Path, **dedup: object) -> Recipe:
    common = {"kind": "jsonl", "license": "test", "rules": "none"}
    sources = [Source.model_validate({"name": name, "path": str(folder / f"{name}.jsonl"), **common}) for name in ("web", "books")]
    node = Dedup.model_validate({"semantic": {"threshold": 0.95}, "priority": ["books"], **dedup})
    return Recipe(name="r", corpus=Corpus(sources=sources, dedup=node, processes=1, decontaminate=None))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    draw, originals = random.Random(3), texts()[:120]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in originals[:60]))
    web = [reordered(text, draw) for text in originals[:30]] + originals[60:] + [reordered(originals[100], draw)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in web))
    return tmp_path


def test_the_stage_drops_the_copy_of_lower_priority_and_says_of_which(folder: Path) -> None:
    out = folder / "corpus"
    report = prepare(recipe(folder), out).as_json()
    rows = pq.read_table(out / "decisions").to_pylist()
    dropped = [row for row in rows if row["reason"] == "semantic_duplicate"]
    assert 25 <= len(dropped) <= 35 and all(row["id"].startswith("web/") for row in dropped)
    assert sum(row["copy_of"] == f"books/0/{int(row['id'].split('/')[2])}" for row in dropped) >= 25
    assert any(row["copy_of"].startswith("web/") for row in dropped)
    assert "semantic_duplicate" in json.dumps(report)
    files = [path for split in ("train", "validation") for paths in corpus_files(out, split).values() for path in paths]
    assert sum(pq.read_metadata(path).num_rows for path in files) == 60 + 91 - len([row for row in rows if row["reason"]])
    prepare(recipe(folder, semantic=None), out)
    assert not [row for row in pq.read_table(out / "decisions").to_pylist() if row["reason"] == "semantic_duplicate"]


def test_functions_that_differ_in_all_operators_stay(tmp_path: Path) -> None:
    signs = ("+", "-", "*", "/", "%", "^", "|", "&", "<", ">", "=", "@")
    rows = [f"def f(a, b, c):\n    x = a {sign} b {sign} c\n    return x {sign} a {sign} b {sign} c\n" for sign in signs]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (tmp_path / "books.jsonl").write_text(json.dumps({"text": texts()[0]}) + "\n")
    prepare(recipe(tmp_path, minhash=None), tmp_path / "corpus")
    assert not [row for row in pq.read_table(tmp_path / "corpus" / "decisions").to_pylist() if row["reason"]]


def test_a_model_on_disk_makes_the_embeddings(folder: Path) -> None:
    """A small encoder with random weights and a real tokenizer: what is tested is that it is loaded, pooled and used."""
    transformers = pytest.importorskip("transformers")
    import tokenizers
    import torch

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "[PAD]": 1, "the": 2, "of": 3, "a": 4, "is": 5}, "[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder / "m")
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=6, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = transformers.BertModel(config).eval()
    model.save_pretrained(folder / "m", safe_serialization=True)

    some = ["the law of a thing", "the", "is a is a is a"]
    documents = [Document(f"x/0/{number}", text, "x", "x", "web", "en") for number, text in enumerate(some)]
    found = embedding(Semantic(model="m"), folder)(documents, units(some)).astype(np.float32)
    for text, vector in zip(some, found, strict=True):
        ids = torch.tensor([[{"the": 2, "of": 3, "a": 4, "is": 5}.get(word, 0) for word in text.split()]])
        with torch.inference_mode():
            mean = model(ids).last_hidden_state[0].mean(0).numpy()
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=2e-3)
    prepared = prepare(recipe(folder, semantic={"model": str(folder / "m"), "threshold": 1.0}), folder / "corpus")
    assert prepared.as_json()
    with pytest.raises(UserError, match=r"none has no config\.json; give the folder of an embedding model"):
        embedding(Semantic(model="none"), folder)


def test_no_code_of_a_models_folder_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks at the terminal whether to trust such code; nobody is asked here."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    (folder / "m").mkdir()
    names = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoTokenizer": ["own.Words", None]}
    (folder / "m" / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (folder / "m" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Words", "auto_map": names}))
    (folder / "m" / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    with pytest.raises(UserError, match=r"m cannot be loaded"):
        embedding(Semantic(model="m"), folder)
    assert not (folder / "ran").exists()
