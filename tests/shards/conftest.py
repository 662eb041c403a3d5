"""Real shards of real text: the standard library's code and docs, through a small trained tokenizer."""

from __future__ import annotations

import inspect
import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
from shards_corpus import write_corpus

from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batches import Batches
from lmworks.shards.build import build_shards
from lmworks.shards.manifest import Manifest
from lmworks.tokenizer.train import train

MODULES = ("argparse", "ast", "calendar", "copy", "datetime", "difflib", "enum", "inspect", "json.decoder", "textwrap", "typing", "zipfile")


def small_recipe() -> Recipe:
    phases = [
        {
            "name": "general",
            "tokens": "40Ki",
            "mixture": {"code": 0.5, "docs": 0.3, "words": 0.2},
            "sequence_length": "64 tokens",
            "global_batch_tokens": "1Ki",
            "batch_ramp": {"start_tokens": "256 tokens", "over": "10 steps"},
        },
        {
            "name": "long",
            "tokens": "20Ki",
            "mixture": {"docs": 0.6, "code": 0.4},
            "sequence_length": "256 tokens",
            "global_batch_tokens": "2Ki",
        },
    ]
    return Recipe.model_validate({
        "name": "shards", "seed": 7, "threads": 1, "shards": {"shard_tokens": "9000 tokens"},
        "tokenizer": {"vocab_size": 700, "sample_bytes": "300kB"}, "train": {"phases": phases},
    })


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return small_recipe()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("corpus")
    code = [inspect.getsource(import_module(name))[:12_000] for name in MODULES]
    docs = [topics[name] for name in sorted(topics)]
    words = [f"Note {number}: the word {word!r} — {number * number} naïve 中文." for number, word in enumerate(sorted(dir(json)) * 30)]
    for source, domain, texts in (("code", "code", code), ("docs", "docs", docs[:40]), ("words", "docs", words)):
        write_corpus(folder, "train", source, texts[:-4], domain)
        write_corpus(folder, "validation", source, texts[-4:], domain)
    return folder


@pytest.fixture(scope="session")
def tokenizer_dir(recipe: Recipe, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train(recipe, corpus, folder)
    return folder


@pytest.fixture(scope="session")
def shards_dir(recipe: Recipe, corpus: Path, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    build_shards(recipe, corpus, tokenizer_dir, folder)
    return folder


@pytest.fixture(scope="session")
def manifest(shards_dir: Path) -> Manifest:
    return Manifest.load(shards_dir)


@pytest.fixture
def batches(recipe: Recipe, shards_dir: Path) -> Batches:
    return Batches(recipe, shards_dir)


@pytest.fixture
def copied_shards(shards_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(shards_dir, tmp_path / "shards"))
