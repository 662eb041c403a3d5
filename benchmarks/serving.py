"""Throughput of the built-in server beside llama.cpp's server and vLLM's CPU build: concurrent requests over HTTP.

    python benchmarks/serving.py [--engines DIR] [--shape moe|dense|both] [--concurrent 16] [--rounds 5] [--threads 2]

DIR is that of `sh tests/export/engines.sh DIR`; engines that are not there are omitted. All servers get the same weights (random, in
`--dtype`), the same tokenizer and the same prompts of mixed lengths. Each round asks all servers in turn, in an order that rotates, with
`--concurrent` requests at once. Figures are the generated tokens that the answers report, per second of the round and per second of CPU
time of the server, which a machine shared with others disturbs less. Ratios are median, least and greatest of the ratios of rounds; the
first round is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from train_cpu import SHAPES

from lmworks import tokenizer as tokenizers
from lmworks.export.export import write_huggingface
from lmworks.export.gguf import write_gguf
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.recipe.schema.recipe import Recipe
from lmworks.serve.spin import SPINNING
from lmworks.tokenizer.train import train

CONTEXT, NEW_TOKENS = 512, 96
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_model(shape: str) -> Transformer:
    """Random weights, the same in every process."""
    return initialize(Transformer(SHAPES[shape]), 1).eval()


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of 4,096 entries, trained on modules of the standard library."""
    texts = [inspect.getsource(module) for module in (argparse, asyncio, inspect, json, statistics, subprocess, tempfile, socket)]
    for split in ("train", "validation"):
        (folder / split / "stdlib").mkdir(parents=True)
        columns = {"id": [str(n) for n in range(len(texts))], "text": texts, "origin": ["stdlib"] * len(texts)}
        columns |= {name: ["code"] * len(texts) for name in ("domain", "language")} | {"source": ["stdlib"] * len(texts)}
        pq.write_table(pa.table(columns), folder / split / "stdlib" / "00000.parquet")
    train(Recipe(name="serving", threads=1, tokenizer={"vocab_size": 4096}), folder, folder / "tokenizer")
    return folder / "tokenizer"


def serve(shape: str, tokenizer: Path, port: int, threads: int, dtype: str) -> None:
    """Our server, in a process of its own."""
    from lmworks.serve.engine import Engine
    from lmworks.serve.models import Models, make_engine
    from lmworks.serve.server import ServerOptions, listen
    from lmworks.serve.server import serve as run
    from lmworks.serve.spin import apart

    def load() -> Engine:
        torch.set_num_threads(threads)
        model = make_model(shape)
        model.compute_dtype = DTYPES[dtype]
        return make_engine(model, tokenizer, "model")

    options = ServerOptions(port=port)
    run(Models(apart(load)), listen(options), options)


@contextmanager
def running(command: list[str], port: int, **environment: str) -> Iterator[tuple[str, psutil.Process]]:
    """A server process: its URL and itself, once it answers."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
        try:
            url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
            while True:
                try:
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise SystemExit(f"{command[0]} did not start:\n{log.read().decode(errors='replace')[-3000:]}")
                time.sleep(0.3)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


async def ask_all(url: str, prompts: list[str]) -> int:
    """Ask all prompts at once; the number of generated tokens."""
    async with httpx.AsyncClient(timeout=600) as client:
        body = {"model": "model", "max_tokens": NEW_TOKENS, "temperature": 0.8, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "ignore_eos": True}
        extra = {"cache_prompt": False} if url in LLAMA else {}
        replies = await asyncio.gather(*(
            client.post(f"{url}/v1/completions", json={**body, **extra, "prompt": prompt, "seed": n}) for n, prompt in enumerate(prompts)
        ))  # fmt: skip
    return sum(reply.raise_for_status().json()["usage"]["completion_tokens"] for reply in replies)


def cpu_seconds(process: psutil.Process) -> float:
    """Of a process and those that it started."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


LLAMA: set[str] = set()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def compare(shape: str, folder: Path, tokenizer: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """All servers on one shape: tokens per second of each round, and ratios to each peer."""
    dtype, threads, engines = DTYPES[arguments.dtype], str(arguments.threads), Path(arguments.engines)
    commands: dict[str, tuple[list[str], int]] = {}
    port = free_port()
    mine = [sys.executable, __file__, "--serve", shape, str(tokenizer), str(port), "--threads", threads, "--dtype", arguments.dtype]
    commands["lmworks"] = (mine, port)
    model, words = make_model(shape), tokenizers.load(tokenizer)
    if (server := engines / "build/bin/llama-server").is_file():
        write_gguf(model, words, folder / f"{shape}.gguf", dtype, "model")
        port, rows = free_port(), arguments.concurrent
        commands["llama.cpp"] = ([str(server), "-m", str(folder / f"{shape}.gguf"), "--port", str(port), "-np", str(rows), "-c",
                                  str(rows * CONTEXT), "-t", threads, "-tb", threads, "--no-webui"], port)  # fmt: skip
        LLAMA.add(f"http://127.0.0.1:{port}")
    if (vllm := engines / "vllm/bin/vllm").is_file():
        write_huggingface(model, words, folder / shape, dtype)
        port = free_port()
        kind = {"fp32": "float32", "bf16": "bfloat16"}[arguments.dtype]
        command = [str(vllm), "serve", str(folder / shape), "--served-model-name", "model", "--port", str(port)]
        commands["vllm"] = ([*command, "--max-model-len", str(CONTEXT), "--dtype", kind], port)
    text = inspect.getsource(subprocess)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with ExitStack() as stack:
        extra = {"OMP_NUM_THREADS": threads, "VLLM_CPU_KVCACHE_SPACE": "1"}
        own = {"lmworks": SPINNING}  # as `lmworks serve` sets it
        servers = {
            name: stack.enter_context(running(command, at, **extra, **own.get(name, {}))) for name, (command, at) in commands.items()
        }
        for turn in range(arguments.rounds + 1):
            starts = [997 * (turn * arguments.concurrent + n) % (len(text) - 500) for n in range(arguments.concurrent)]
            prompts = [text[start : start + 60 + 50 * (n % 8)] for n, start in enumerate(starts)]
            names = list(servers)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                url, process = servers[name]
                began, used = time.monotonic(), cpu_seconds(process)
                tokens = asyncio.run(ask_all(url, prompts))
                found[name].append((tokens / (time.monotonic() - began), tokens / (cpu_seconds(process) - used)))
    result: dict[str, object] = {"shape": shape}
    for place, what in enumerate(("second", "cpu_second")):
        rates = {name: [one[place] for one in rows[1:]] for name, rows in found.items()}
        result[f"tokens_per_{what}"] = {name: round(statistics.median(values), 1) for name, values in rates.items()}
        for name in [name for name in rates if name != "lmworks"]:
            ratios = [mine / other for mine, other in zip(rates["lmworks"], rates[name], strict=True)]
            result[f"ratio_to_{name}_per_{what}"] = [round(one, 2) for one in (statistics.median(ratios), min(ratios), max(ratios))]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=".venv-engines")
    parser.add_argument("--shape", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--serve", nargs=3, metavar=("SHAPE", "TOKENIZER", "PORT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        shape, tokenizer, port = arguments.serve
        serve(shape, Path(tokenizer), int(port), arguments.threads, arguments.dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
        for shape in SHAPES if arguments.shape == "both" else [arguments.shape]:
            print(json.dumps(compare(shape, Path(folder), tokenizer, arguments)), flush=True)


if __name__ == "__main__":
    main()
