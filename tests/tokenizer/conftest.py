"""A small tokenizer trained on real text: the standard library's code and docs, and one paragraph in nine languages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from tokenizer_texts import ARTICLE, library, write_source

from lmworks.recipe.schema.recipe import Recipe
from lmworks.tokenizer import Tokenizer, load
from lmworks.tokenizer.train import train


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("corpus")
    code = library("argparse", "ast", "calendar", "copy", "datetime", "difflib", "doctest", "enum", "inspect")
    docs, world = sorted(topics.values()), list(ARTICLE.values()) * 4
    for name, texts, language in (("code", code, "code"), ("docs", docs, "en"), ("world", world, "mixed")):
        write_source(folder, name, texts, language=language)
        write_source(folder, name, texts[-2:], "validation", language)
    return folder


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    phase = {
        "name": "one",
        "tokens": "1M",
        "mixture": {"code": 0.5, "docs": 0.3, "world": 0.2},
        "sequence_length": "1Ki",
        "global_batch_tokens": "8Ki",
    }
    return Recipe.model_validate(
        {"name": "test", "tokenizer": {"vocab_size": 1024, "sample_bytes": "600kB", "num_special_tokens": 66},
         "train": {"phases": [phase]}})


@pytest.fixture(scope="session")
def trained(corpus: Path, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train(recipe, corpus, folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(trained: Path) -> Tokenizer:
    return load(trained)
