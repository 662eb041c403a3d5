"""The report of the shards: entropy of single tokens, and held-out text that training text contains."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lmworks.io.files import read_json
from lmworks.shards.indexed import IndexedWriter
from lmworks.shards.manifest import Manifest, Shard, SourceShards, Split
from lmworks.shards.report import REPORT, entropy, run_hashes, search, write_report

VOCABULARY, WINDOW = 300, 128


def write(folder: Path, prefix: str, tokens: np.ndarray) -> Split:
    (folder / prefix).parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(folder / prefix, np.dtype(np.uint16)) as writer:
        writer.add(tokens)
    nothing = {".bin": "0" * 64, ".idx": "0" * 64}
    shard = Shard(prefix=prefix, tokens=len(tokens), documents=1, sha256=nothing, size=dict.fromkeys(nothing, 0))
    return Split(tokens=len(tokens), bytes=2 * len(tokens), documents=1, inputs="", shards=(shard,))


def report(folder: Path, train: dict[str, np.ndarray], held_out: np.ndarray | None) -> dict[str, object]:
    sources = []
    for name, tokens in train.items():
        kept = None if held_out is None or sources else write(folder, "validation/held-00000", held_out)
        sources.append(SourceShards(name=name, domain="d", train=write(folder, f"train/{name}-00000", tokens), validation=kept))
    made = Manifest(
        seed=0, vocab_size=VOCABULARY, dtype="uint16", tokenizer_sha256="0" * 64, token_bytes_sha256="0" * 64, sources=tuple(sources)
    )
    found = write_report(folder, made, 1)
    assert read_json(folder / REPORT) == found and found["window_tokens"] == WINDOW
    return found


def text(seed: int, count: int = 20_000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.uint16)


def test_held_out_text_is_found_wherever_it_stands(tmp_path: Path) -> None:
    held_out = text(1)
    clean = report(tmp_path / "clean", {"a": text(2), "b": text(3)}, held_out)
    assert clean["held_out_found"] == 0.0 and clean["held_out_runs"] == pytest.approx(len(held_out) / 32, rel=0.2)
    half = np.concatenate([text(4, 70_001), held_out[:10_000], text(5, 3)])  # behind a border of the pieces that are hashed
    leaked = report(tmp_path / "leaked", {"a": text(2), "b": half}, held_out)
    assert leaked["held_out_found"] == pytest.approx(0.5, abs=0.08)
    assert leaked["sources"] == {"a": 0.0, "b": leaked["held_out_found"]}


def test_text_across_the_border_of_two_pieces_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held_out = text(1, 4000)
    write(tmp_path, "train/a-00000", held_out)
    wanted = np.unique(run_hashes(held_out, WINDOW))
    for piece in (129, 1000, 1 << 15):
        monkeypatch.setattr("lmworks.shards.report._PIECE", piece)
        counts, hits = search(tmp_path / "train/a-00000", VOCABULARY, WINDOW, wanted)
        assert hits.all() and len(hits) > 50 and (counts == np.bincount(held_out, minlength=VOCABULARY)).all()


def test_a_run_is_known_by_all_of_its_tokens() -> None:
    run = text(7, 100 * WINDOW)
    hashes = set(run_hashes(run, WINDOW).tolist())
    for place in (0, 1, WINDOW // 2, WINDOW - 1):
        changed = run.copy()
        changed[place::WINDOW] += 1  # one token of every run
        assert not hashes & set(run_hashes(changed, WINDOW).tolist())
    assert not len(run_hashes(run[: WINDOW - 1], WINDOW))


def test_without_held_out_text_there_is_the_entropy_alone(tmp_path: Path) -> None:
    found = report(tmp_path, {"a": np.repeat(np.arange(4, dtype=np.uint16), 500)}, None)
    assert found["held_out_found"] is None and found["unigram_nats"] == {"a": pytest.approx(math.log(4))}
    assert entropy(np.zeros(3, np.int64)) == 0.0
