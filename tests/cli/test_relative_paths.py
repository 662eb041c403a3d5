"""Where a relative path starts, and a project's folder that is moved as a whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import Lmworks

from lmworks.io.files import read_json
from tiny_run import Tiny

RECIPE = """
name: mine
threads: 1
corpus:
  validation_fraction: 0.2
  max_validation_bytes: 2KB
  dedup: {minhash: null}
  sources:
    - {name: docs, kind: jsonl, path: data/docs.jsonl, domain: docs, license: PSF-2.0}
tokenizer: {vocab_size: 512, sample_bytes: 50kB}
model: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 64}
train:
  phases: [{name: all, tokens: 1Ki, mixture: {docs: 1}, sequence_length: 32 tokens, global_batch_tokens: 256 tokens}]
"""


def test_a_project_is_moved_and_paths_start_at_the_working_directory(
    lmworks: Lmworks, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    (before / "data").mkdir(parents=True)
    lines = (tiny.texts / "docs.jsonl").read_text().splitlines()[:24]
    (before / "data" / "docs.jsonl").write_text("\n".join(json.dumps({"text": json.loads(line)["text"]}) for line in lines))
    (before / "mine.yaml").write_text(RECIPE)

    monkeypatch.chdir(tmp_path)
    error = lmworks("corpus", "prepare", "before/mine.yaml").error
    assert "no files at data/docs.jsonl" in error and f"check the path, which starts at the working directory {tmp_path}" in error
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)

    def made() -> dict[str, tuple[int, object]]:
        stamps = sorted(Path("runs/mine").glob("*/stage.json"))
        return {stamp.parent.name: (stamp.stat().st_mtime_ns, read_json(stamp)["inputs"]) for stamp in stamps}

    monkeypatch.chdir(before)
    assert lmworks("shards", "build", "mine.yaml").code == 0
    first = made()
    assert set(first) == {"corpus", "tokenizer", "shards"}
    before.rename(after)
    monkeypatch.chdir(after)
    assert lmworks("shards", "build", "mine.yaml").code == 0
    assert made() == first, "nothing was made again"
