"""A run made in seconds: real text, a real tokenizer and shards, a model briefly trained, its checkpoint."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small_models import MODELS, Run, recipe_for, trained

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.io.files import write_json
from lmworks.recipe.changes import as_tree
from lmworks.shards.build import build_shards
from lmworks.tokenizer import load as load_tokenizer
from lmworks.tokenizer.train import train as train_tokenizer

MODULES = ("argparse", "ast", "calendar", "copy", "datetime", "difflib", "enum", "inspect", "json.decoder", "textwrap", "typing", "zipfile")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with corpus, tokenizer and shards."""
    from pydoc_data.topics import topics

    directory = tmp_path_factory.mktemp("data")
    code = [inspect.getsource(import_module(name))[:12_000] for name in MODULES]
    texts = {"code": code, "docs": [topics[name] for name in sorted(topics)][:40]}
    for source, documents in texts.items():
        for split, part in (("train", documents[:-4]), ("validation", documents[-4:])):
            path = directory / "corpus" / split / source / "00000.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                {"id": f"{source}/{n}", "text": text, "source": source, "domain": source, "language": "en", "origin": f"{source}:{n}"}
                for n, text in enumerate(part)
            ]
            pq.write_table(pa.Table.from_pylist(rows), path)
    recipe = recipe_for(MODELS["glm4moe"], directory)
    train_tokenizer(recipe, directory / "corpus", directory / "tokenizer")
    build_shards(recipe, directory / "corpus", directory / "tokenizer", directory / "shards")
    return directory


@pytest.fixture(scope="session")
def make_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """A run of one of `MODELS`, trained once for `steps`."""
    made: dict[tuple[str, int], Run] = {}

    def make(name: str, steps: int = 4) -> Run:
        if (name, steps) not in made:
            directory = tmp_path_factory.mktemp(name) / "run"
            directory.mkdir()
            for part in ("corpus", "tokenizer", "shards"):
                (directory / part).symlink_to(data / part)
            recipe = recipe_for(MODELS[name], directory)
            model = trained(recipe, directory / "shards", steps)
            write_json(directory / "resolved.json", as_tree(recipe))
            with Checkpoints(directory / "checkpoints", recipe.checkpoints, {}) as checkpoints:
                checkpoints.save(steps, {"model": dict(model.state_dict())}, {})
            made[name, steps] = Run(recipe, directory, load_tokenizer(directory / "tokenizer"), model)
        return made[name, steps]

    return make
