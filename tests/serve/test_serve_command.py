"""`lmworks serve`, and opening a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest
import torch

from lmworks.errors import UserError
from lmworks.serve.chat import Conversation
from lmworks.serve.opening import open_run

LMWORKS = [sys.executable, "-m", "lmworks.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}


def test_served_from_the_command_line(run_dir: Path) -> None:
    command = [*LMWORKS, "serve", str(run_dir), "--port", "0", "--api-key", "sesame"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT) as process:
        assert process.stdout
        said = ""
        while "Ctrl-C" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        url = re.search(r"chat page +(http://localhost:\d+)/", said)[1]  # type: ignore[index]
        assert "talker is served" in said
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame")
        reply = client.chat.completions.create(model="talker", messages=[{"role": "user", "content": "Hello"}], max_tokens=5)
        assert reply.usage.completion_tokens in range(1, 6)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in process.stdout.read()


def test_a_taken_port_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [*LMWORKS, "serve", str(tmp_path), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"error: cannot listen on 127.0.0.1:\d+ \(Address already in use\); choose another --host or --port\n", done.stderr)


def test_the_tuned_model_is_taken_where_there_is_one(run_dir: Path, tmp_path: Path) -> None:
    tuned, base = open_run(run_dir), open_run(run_dir, base=True)
    untuned = tmp_path / "untuned"
    shutil.copytree(run_dir, untuned, ignore=shutil.ignore_patterns("tune"))
    only_base = open_run(untuned)
    names = [(engine.name, engine.tuned) for engine in (tuned, base, only_base)]
    assert names == [("talker", True), ("talker-base", False), ("talker", False)]
    weights = [engine.model.embedding.weight for engine in (tuned, base, only_base)]
    assert not weights[0].equal(weights[1])
    assert weights[1].equal(weights[2])
    for engine in (tuned, base, only_base):
        engine.close()


def test_an_exported_model_is_served_too(run_dir: Path, tmp_path: Path) -> None:
    from lmworks.cli.serve_commands import _open
    from lmworks.export.huggingface import write_model

    trained = open_run(run_dir)
    exported = tmp_path / "exported"
    shutil.copytree(run_dir / "tokenizer", exported)
    write_model(trained.model, exported, {}, torch.float32)
    engine = _open(exported, base=False)
    assert (engine.name, engine.context) == ("exported", trained.context)
    question = Conversation(trained, temperature=0, max_tokens=8), Conversation(engine, temperature=0, max_tokens=8)
    first, second = ("".join(delta.text for delta in conversation.ask("Hello")) for conversation in question)
    assert first == second != ""
    for each in (trained, engine):
        each.close()


def test_a_damaged_checkpoint_is_not_served(run_dir: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(run_dir, damaged)
    largest = max((path for path in (damaged / "tune").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)
    with pytest.raises(UserError, match="has no good checkpoint"):
        open_run(damaged)


def test_a_tokenizer_of_another_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(run_dir, mixed)
    path = mixed / "tokenizer" / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": 512, "content": "<|more|>"})
    path.write_text(json.dumps(spec))
    with pytest.raises(UserError, match="has 513 entries, but the model 512: one of them is not of this run"):
        open_run(mixed)
