"""A small real model with random weights, a tokenizer trained on the standard library's documentation, and a server on them."""

from __future__ import annotations

import inspect
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lmworks import tokenizer as tokenizers
from lmworks.checkpoint import Checkpoints
from lmworks.io.files import write_json
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.model import Model, Moe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import Tune
from lmworks.serve.engine import Engine
from lmworks.serve.models import Models
from lmworks.serve.server import ServerOptions
from lmworks.serve.vocabulary import Vocabulary
from lmworks.tokenizer.train import train
from patience import PATIENCE

CONTEXT = 256


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    import argparse
    import collections
    import json
    import logging
    import statistics
    import textwrap

    root = tmp_path_factory.mktemp("tokenizer")
    texts = [inspect.getsource(module) for module in (argparse, collections, json, logging, statistics, textwrap)]
    for split, documents in (("train", texts), ("validation", texts[-1:])):
        (root / split / "stdlib").mkdir(parents=True)
        columns = {
            "id": [f"stdlib/{n}" for n in range(len(documents))], "text": documents, "origin": ["stdlib"] * len(documents),
            **{name: [value] * len(documents) for name, value in {"source": "stdlib", "domain": "code", "language": "code"}.items()},
        }  # fmt: skip
        pq.write_table(pa.table(columns), root / split / "stdlib" / "00000.parquet")
    train(Recipe(name="serving", threads=1, tokenizer={"vocab_size": 512}), root, root / "tokenizer")
    return tokenizers.load(root / "tokenizer")


@pytest.fixture(scope="session")
def vocabulary(tokenizer: tokenizers.Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


@pytest.fixture(scope="session")
def model(vocabulary: Vocabulary) -> Transformer:
    moe = Moe(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1)
    config = Model(
        vocab_size=vocabulary.size, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=128, use_qk_norm=True,
        moe=moe, initializer_range=0.3, max_position_embeddings=f"{CONTEXT} tokens",
    )  # fmt: skip
    return initialize(Transformer(config), seed=5).eval()


@pytest.fixture
def engine(model: Transformer, vocabulary: Vocabulary) -> Iterator[Engine]:
    engine = Engine(model, vocabulary, "tiny", CONTEXT)
    yield engine
    engine.close()


@dataclass
class Served:
    """A running server."""

    url: str
    engine: Engine


Serving = Callable[..., Served]


@contextmanager
def running(models: Models, options: ServerOptions) -> Iterator[Served]:
    import uvicorn

    from lmworks.serve.server import configuration

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = uvicorn.Server(configuration(models, options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", models.first)
        server.should_exit = True
        thread.join()
    assert not models.first.alive  # the server closes its engines


@pytest.fixture(scope="session")
def server(model: Transformer, vocabulary: Vocabulary) -> Iterator[Served]:
    with running(Models(Engine(model, vocabulary, "tiny", CONTEXT)), ServerOptions()) as served:
        yield served


@pytest.fixture
def start(model: Transformer, vocabulary: Vocabulary) -> Iterator[Serving]:
    """Start more servers, with other options or another model."""
    with ExitStack() as stack:

        def begin(
            context: int = CONTEXT, model: Transformer = model, vocabulary: Vocabulary = vocabulary, **options: object
        ) -> Served:
            models = Models(Engine(model, vocabulary, "tiny", context))
            return stack.enter_context(running(models, ServerOptions(**options)))  # type: ignore[arg-type]

        yield begin


@pytest.fixture
def serving() -> Iterator[Callable[[Models, ServerOptions], str]]:
    """Start a server of these models; its URL."""
    with ExitStack() as stack:
        yield lambda models, options: stack.enter_context(running(models, options)).url


@pytest.fixture
def waiting() -> Callable[[Callable[[], bool]], None]:
    """Wait until something holds."""

    def wait(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < end, "it never came to hold"
            time.sleep(0.01)

    return wait


@pytest.fixture(scope="session")
def run_dir(model: Transformer, tokenizer: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as training leaves it, with a base and a tuned model."""
    run = tmp_path_factory.mktemp("runs") / "talker"
    recipe = Recipe(name="talker", model=model.config, tune=Tune())
    write_json(run / "resolved.json", as_tree(recipe))
    shutil.copytree(tokenizer.directory, run / "tokenizer")
    tuned = initialize(Transformer(model.config), seed=6)
    for place, weights in ((run / "checkpoints", model), (run / "tune" / "checkpoints", tuned)):
        with Checkpoints(place, recipe.checkpoints, {}) as checkpoints:
            checkpoints.save(1, {"model": dict(weights.state_dict())}, {}, wait=True)
    return run
