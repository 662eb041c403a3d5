"""A run from text to saves, killed in the middle and typed again, as a rank of a process group (NCCL on a GPU)."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import yaml
from gpu.runner import Row

_POLL = 0.2  # seconds
_TOY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128}  # fmt: skip


def resumed(toy: bool) -> Iterator[Row]:
    """Rows of the check: what each of the two processes took, and whether the steps that both have done have equal losses."""
    length, rows, steps, every = (64, 4, 20, 6) if toy else (1024, 32, 60, 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_text(folder / "text.jsonl", 400 if toy else 6000)
        source = {"name": "words", "kind": "jsonl", "path": str(folder / "text.jsonl"), "domain": "prose", "license": "CC0-1.0"}
        phase = {"name": "a", "tokens": steps * rows * length, "mixture": {"words": 1.0}, "sequence_length": length,
                 "global_batch_tokens": rows * length}  # fmt: skip
        recipe = {
            "name": "card", "run_dir": str(folder / "run"),
            "corpus": {"sources": [source], "steps": [], "decontaminate": None, "dedup": {"exact": False, "minhash": None}},
            "tokenizer": {"vocab_size": 512 if toy else 4096},
            "model": _TOY if toy else {"preset": "dense-125m"},
            "train": {"phases": [phase], "save_every": f"{every} steps"}
            | dict.fromkeys(("validate_every", "sample_every"), f"{steps} steps"),
        }  # fmt: skip
        path = folder / "card.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        yield _until(path, folder, every * 3 // 2 + 1) | {"process": "killed", "steps": steps}
        before = _losses(folder)
        yield _until(path, folder, None) | {"process": "typed again"}
        after = _losses(folder)
    again = sorted(step for step in before if step > every and step in after)
    apart = max((abs(before[step] - after[step]) for step in again), default=float("nan"))
    sound = len(after) >= steps and bool(again) and after[max(after)] < after[min(after)]
    yield {"first_loss": after.get(min(after, default=0)), "last_loss": after.get(max(after, default=0)), "steps_done_twice": len(again),
           "losses_apart": apart, "equal_bits": apart == 0.0, "sound": sound}  # fmt: skip
    if not sound:
        raise AssertionError(f"{len(after)} of {steps} steps have a loss, {len(again)} of them twice")


def _write_text(path: Path, documents: int) -> None:
    """Sentences of a small grammar: text that a model learns something of, without a download."""
    draw = random.Random(0)
    parts = (
        ("The baker", "A sailor", "The old judge", "My sister", "Nobody"), ("finds", "sells", "remembers", "hides", "counts"),
        ("bread", "a map", "three keys", "the letter", "rain"), ("in the harbour", "before noon", "under the bridge", "at home", "again"),
    )  # fmt: skip
    with open(path, "w", encoding="utf-8") as file:
        for number in range(documents):
            lines = [" ".join(map(draw.choice, parts)) + "." for _ in range(60)]
            file.write(json.dumps({"id": str(number), "text": " ".join(lines)}) + "\n")


def _losses(folder: Path) -> dict[int, float]:
    """The last loss that was written of each step."""
    found = {}
    for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "train/loss" in row:
            found[int(row["step"])] = float(row["train/loss"])
    return found


def _until(path: Path, folder: Path, step: int | None) -> Row:
    """Pretrain as the one rank of a world; kill it when its metrics have this step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | rank | {"MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    began = time.monotonic()
    with open(folder / "log.txt", "w+", encoding="utf-8") as log:
        command = [sys.executable, "-m", "lmworks.cli.main", "pretrain", str(path)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            if step is not None and (folder / "run" / "metrics.jsonl").exists() and max(_losses(folder), default=0) >= step:
                process.send_signal(signal.SIGKILL)
                process.wait()
            time.sleep(_POLL)
        log.seek(0)
        said = log.read()
    if process.returncode != (0 if step is None else -signal.SIGKILL):
        raise RuntimeError(f"lmworks pretrain ended with {process.returncode}: {said[-1500:]}")
    return {"seconds": time.monotonic() - began}
