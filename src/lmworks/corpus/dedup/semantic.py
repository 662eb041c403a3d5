"""Semantic deduplication: nearest neighbors among embeddings, searched inside clusters (SemDeDup, Abbas et al. 2023).

An embedding is either a random projection of the document's word counts (Achlioptas 2003), which needs no model and is robust to another
order and some other words, or the output of a sentence-embedding model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from lmworks.corpus.dedup.near import StackedArrays
from lmworks.corpus.document import Document
from lmworks.corpus.units import Units, mix, symbolic, units
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Semantic

Embed = Callable[[Sequence[Document], Units], np.ndarray]
"""(documents, the units of their texts) -> (D, dimensions) float16, of length 1; all 0 for a document without words."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 2048
_ROUNDS, _SAMPLE_PER_CLUSTER = 10, 32
_MODEL_BATCH, _MODEL_TOKENS = 16, 512


def embedding(node: Semantic, folder: Path) -> Embed:
    """The embedding function of the recipe. Raises `UserError` if its model cannot be loaded."""
    if node.model is None:
        return lambda documents, words: _word_embedding(documents, words, node.dimensions)
    return _model_embedding(folder / node.model)


def _word_embedding(documents: Sequence[Document], words: Units, dimensions: int) -> np.ndarray:
    """The random projection of each document: of its words or, for code and formulas, which differ in their operators, with its symbols.

    The whole text decides, and not each line as in other comparisons: reordered text has other lines.
    """
    found = random_projection(words, dimensions)
    texts = [document.text for document in documents]
    places = np.flatnonzero(symbolic(texts))
    if len(places):
        found[places] = random_projection(units([texts[place] for place in places.tolist()], "all"), dimensions)
    return found


def random_projection(units: Units, dimensions: int) -> np.ndarray:
    """(D, dimensions) float16: random projection of word counts. Each word is a random vector of +1 and -1, weighted by 1 + log of its
    count.
    """
    words, place = np.unique(units.hashes, return_inverse=True)
    streams = np.arange(-(-dimensions // 64), dtype=np.uint64) * _ODD
    bits = np.unpackbits(mix(words[:, None] + streams).astype("<u8").view(np.uint8), axis=1)[:, :dimensions]
    signs = bits.astype(np.float32) * 2 - 1
    found = np.zeros((units.documents, dimensions), np.float32)
    for document, (first, last) in enumerate(zip(units.bounds, units.bounds[1:], strict=False)):
        if last > first:
            mine, counts = np.unique(place[first:last], return_counts=True)
            found[document] = (1 + np.log(counts, dtype=np.float32)) @ signs[mine]
    return _normalize(found).astype(np.float16)


def semantic_duplicates(vectors: StackedArrays, node: Semantic, seed: int, originals: np.ndarray | None = None) -> np.ndarray:
    """(N,) for each row, the first kept row of its cluster with a cosine similarity of at least `threshold`; itself if there is none.

    Rows are compared with kept rows only, so that similarity is not chained from neighbor to neighbor. Up to `documents_per_cluster` rows
    are all compared with each other. More rows are first clustered by k-means into clusters of about this size, and pairs in different
    clusters are not found. Rows with equal values in `originals` are not compared with each other.
    """
    threshold = node.threshold
    labels = _kmeans(vectors, max(1, -(-len(vectors) // node.documents_per_cluster)), seed)
    order = np.argsort(labels, kind="stable")
    first_of = np.arange(len(vectors))
    for cluster in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1) if len(order) else ():
        kept, kept_rows = np.zeros((0, 0), np.float32), cluster[:0]
        for start in range(0, len(cluster), _BLOCK):
            rows = cluster[start : start + _BLOCK]
            block = vectors[rows].astype(np.float32)
            if len(kept_rows):
                alike = block @ kept.T >= threshold
                if originals is not None:
                    alike &= originals[rows][:, None] != originals[kept_rows]
                copy = alike.any(axis=1)
                first_of[rows[copy]] = kept_rows[alike[copy].argmax(axis=1)]
                rows, block = rows[~copy], block[~copy]
            alike = np.tril(block @ block.T >= threshold, -1)
            if originals is not None:
                alike &= originals[rows][:, None] != originals[rows]
            mine = np.ones(len(rows), dtype=bool)
            for row in np.flatnonzero(alike.any(axis=1)):
                if (earlier := np.flatnonzero(alike[row] & mine)).size:
                    mine[row] = False
                    first_of[rows[row]] = rows[earlier[0]]
            kept = np.concatenate((kept, block[mine])) if len(kept_rows) else block[mine]
            kept_rows = np.concatenate((kept_rows, rows[mine]))
    return first_of


def _kmeans(vectors: StackedArrays, count: int, seed: int) -> np.ndarray:
    """(N,) cluster of each row: spherical k-means (Dhillon and Modha 2001) on a sample, then each row joins its nearest center.

    scikit-learn is not used, because its threads add in varying order, and a corpus must be reproducible.
    """
    if count == 1:
        return np.zeros(len(vectors), dtype=np.int64)
    draw = np.random.default_rng(seed)
    sample = vectors[np.sort(draw.choice(len(vectors), min(len(vectors), count * _SAMPLE_PER_CLUSTER), replace=False))].astype(np.float32)
    centers = sample[draw.choice(len(sample), count, replace=False)]
    for _ in range(_ROUNDS):
        nearest = _nearest(sample, centers)
        sums = np.zeros_like(centers)
        np.add.at(sums, nearest, sample)
        centers = np.where(np.bincount(nearest, minlength=count)[:, None] > 0, _normalize(sums), centers)
    starts = range(0, len(vectors), _BLOCK)
    blocks = (vectors[np.arange(start, min(start + _BLOCK, len(vectors)))].astype(np.float32) for start in starts)
    return np.concatenate([_nearest(block, centers) for block in blocks])


def _nearest(rows: np.ndarray, centers: np.ndarray) -> np.ndarray:
    return np.concatenate([(rows[start : start + _BLOCK] @ centers.T).argmax(axis=1) for start in range(0, len(rows), _BLOCK)])


def _normalize(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)


def _model_embedding(folder: Path) -> Embed:
    """Mean of the last hidden states of an encoder on disk, the default pooling of sentence-transformers. Only the first 512 tokens are
    read.
    """
    try:
        import torch
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise UserError("dedup.semantic with a model needs transformers: pip install 'lmworks[export]'") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"dedup.semantic.model: {folder} has no config.json; give the folder of an embedding model in transformers' format")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, trust_remote_code=False).eval()
    except (OSError, ValueError) as error:
        raise UserError(f"dedup.semantic.model: {folder} cannot be loaded ({' '.join(str(error).split())[:200]})") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    def embed(documents: Sequence[Document], units: Units) -> np.ndarray:
        found = []
        for start in range(0, len(documents), _MODEL_BATCH):
            texts = [document.text for document in documents[start : start + _MODEL_BATCH]]
            inputs = tokenizer(texts, padding=True, truncation=True, max_length=_MODEL_TOKENS, return_tensors="pt")
            with torch.inference_mode():
                states_BTD = model(**inputs).last_hidden_state.float()
            there_BT1 = inputs["attention_mask"].unsqueeze(-1)
            found.append(((states_BTD * there_BT1).sum(1) / there_BT1.sum(1).clamp(min=1)).numpy())
        return _normalize(np.concatenate(found)).astype(np.float16)

    return embed
