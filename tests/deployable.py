"""Small models as they are deployed: a folder in Hugging Face's format, a GGUF file, a server in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from lmworks.export.export import write_huggingface
from lmworks.export.gguf import write_gguf
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.model import Model
from lmworks.serve.models import Models, make_engine
from lmworks.serve.server import ServerOptions
from lmworks.tokenizer import load
from lmworks.weights.huggingface import read_model
from tiny_run import Tiny

GLM: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
    "use_qk_norm": True, "attention_bias": True, "rope": {"partial_rotary_factor": 0.5}, "initializer_range": 0.1,
    "moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 2.5},
    "max_position_embeddings": "512 tokens",
}  # fmt: skip
QWEN3: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
    "use_qk_norm": True, "initializer_range": 0.1, "max_position_embeddings": "512 tokens",
}  # fmt: skip


def export(tiny: Tiny, folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32, gguf: bool = False) -> Path:
    """Write a model of random weights, and return its folder in Hugging Face's format. The output matrix is large, so that the model is
    as sure of its tokens as a trained one."""
    tokenizer = load(tiny.run_dir / "tokenizer")
    model = initialize(Transformer(Model.model_validate(config | {"vocab_size": tokenizer.vocab_size})), seed=3).eval()
    with torch.no_grad():
        model.head.weight.mul_(5)
    directory = folder / "huggingface"
    directory.mkdir(parents=True)
    write_huggingface(model, tokenizer, directory, dtype)
    if gguf:
        (folder / "gguf").mkdir()
        write_gguf(model, tokenizer, folder / "gguf" / "model.gguf", dtype, "tiny")
    return directory


@contextmanager
def serving(directory: Path, name: str = "huggingface", noise: float = 0.0, **options: Any) -> Iterator[str]:
    """The URL of our server of this model; `noise` is added to its weights, relative to their size."""
    import uvicorn

    from lmworks.serve.server import configuration

    model = read_model(directory)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * float(weight.std() if weight.numel() > 1 else 0) * torch.randn(weight.shape, generator=generator)
    models = Models(make_engine(model, directory, name))
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = uvicorn.Server(configuration(models, ServerOptions(**options)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
