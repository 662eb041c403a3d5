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
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from starlette.testclient import TestClient

from child_process import child_process
from lmworks.cli import serve_commands
from lmworks.errors import UserError
from lmworks.serve import server
from lmworks.serve.chat import Conversation
from lmworks.serve.engine import Engine
from lmworks.serve.models import LazyModel, Models, load_engine, load_models
from lmworks.serve.protocol import CompletionRequest
from lmworks.serve.requests import Delta
from lmworks.serve.server import ServerOptions
from lmworks.serve.spin import SPINNING
from lmworks.weights.run_models import load_model
from patience import PATIENCE
from started_server import wait_until_served

LMWORKS = [sys.executable, "-m", "lmworks.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(("dtype", "options", "names"), [
    ("auto", [], ["talker", "talker-base"]),
    ("bfloat16", ["--base", "--name", "mine"], ["mine-base", "mine"]),
])  # fmt: skip
def test_served_from_the_command_line(run_dir: Path, dtype: str, options: list[str], names: list[str]) -> None:
    command = [*LMWORKS, "serve", str(run_dir), "--port", "0", "--api-key", "sesame", "--dtype", dtype, *options]
    with child_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT) as process:
        assert process.stdout
        url, said = wait_until_served(process)
        assert f"{names[0]} is served, and {names[1]} from its first request on" in said
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame")
        assert [model.id for model in client.models.list()] == names
        reply = client.chat.completions.create(model=names[0], messages=[{"role": "user", "content": "Hello"}], max_tokens=5)
        assert reply.usage.completion_tokens in range(1, 6)
        assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 0
        assert "Traceback" not in process.stdout.read()
    if not torch.cuda.is_available():
        assert f"precision   {'float32' if dtype == 'auto' else dtype}" in said


def test_a_taken_port_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [*LMWORKS, "serve", str(tmp_path), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", env=ENVIRONMENT, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"error: cannot listen on 127.0.0.1:\d+ \(Address already in use\); choose another --host or --port\n", done.stderr)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_threads_spin_and_the_model_is_loaded_apart(command: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def load(*_: object, **__: object) -> None:
        names.append(threading.current_thread().name)
        raise UserError("seen")

    for name in SPINNING:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for place in ("load_models", "load_engine"):
        monkeypatch.setattr(f"lmworks.serve.models.{place}", load)
    with pytest.raises(UserError, match="seen"):
        serve_commands.serve(str(run_dir), port=0) if command == "serve" else serve_commands.chat(str(run_dir))
    assert names == ["lmworks-load"], "the threads of OpenMP that it leaves keep those of the engine from spinning"
    assert {name: os.environ.get(name) for name in SPINNING} == SPINNING


def test_an_answer_that_is_not_streamed_is_one_event(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bool] = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, request, emit: (sent.append(request.whole), submit(self, request, emit))[1])
    models = load_models(run_dir)
    try:
        with TestClient(server.build_app(models), base_url="http://localhost") as client:
            for stream in (False, True):
                reply = client.post("/v1/completions", json={"prompt": "import", "max_tokens": 3, "stream": stream})
                assert reply.status_code == 200 and (stream or "usage" in reply.text)
    finally:
        models.close()
    assert sent == [True, False]


def test_the_tuned_model_is_taken_where_there_is_one(run_dir: Path, tmp_path: Path) -> None:
    tuned, base = load_engine(run_dir), load_engine(run_dir, base=True)
    untuned = tmp_path / "untuned"
    shutil.copytree(run_dir, untuned, ignore=shutil.ignore_patterns("tune"))
    only_base = load_engine(untuned)
    names = [(engine.name, engine.tuned) for engine in (tuned, base, only_base)]
    assert names == [("talker", True), ("talker-base", False), ("talker", False)]
    chosen = load_engine(f"{run_dir}@base")
    assert (chosen.name, chosen.tuned) == ("talker-base", False), "the base model has one name, however it is asked for"
    chosen.close()
    weights = [engine.model.embedding.weight for engine in (tuned, base, only_base)]
    assert not weights[0].equal(weights[1])
    assert weights[1].equal(weights[2])
    for engine in (tuned, base, only_base):
        engine.close()


def test_an_exported_model_is_served_too(run_dir: Path, tmp_path: Path) -> None:
    from lmworks.export.huggingface import write_model

    trained = load_engine(run_dir)
    exported = tmp_path / "exported"
    shutil.copytree(run_dir / "tokenizer", exported)
    write_model(load_model(run_dir), exported, {}, torch.float32)
    engine = load_engine(exported)
    assert (engine.name, engine.context) == ("exported", trained.context)
    question = Conversation(trained, temperature=0, max_tokens=8), Conversation(engine, temperature=0, max_tokens=8)
    first, second = ("".join(delta.text for delta in conversation.ask("Hello")) for conversation in question)
    assert first == second != ""
    for each in (trained, engine):
        each.close()


@pytest.mark.parametrize("change", [
    {"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"hidden_size": 2**40}, {"intermediate_size": 10**8}, {"n_routed_experts": 10**9},
    {"vocab_size": 10**30},
], ids=str)  # fmt: skip
def test_no_memory_is_taken_for_weights_that_are_not_there(run_dir: Path, tmp_path: Path, change: dict[str, int]) -> None:
    from lmworks.export.huggingface import write_model
    from lmworks.weights.huggingface import read_model

    write_model(load_model(run_dir), tmp_path, {}, torch.float32)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as refused:
        read_model(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_that_is_pruned_meanwhile_is_passed_over(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on prunes old checkpoints and makes new ones while somebody opens its model."""
    from lmworks.checkpoint import listing, manifest
    from lmworks.weights import run_models as loading

    run = tmp_path / "run"
    shutil.copytree(run_dir, run, ignore=shutil.ignore_patterns("tune"))
    place, problem = run / "checkpoints", manifest.problem
    load, looks, loads = loading.load_trained, [], []

    def prune() -> None:
        (old,) = listing.directories(place)
        shutil.copytree(old, place / listing.name_of(listing.step_of(old) + 1))
        shutil.rmtree(old)

    def look(path: Path) -> str | None:
        looks.append(path)
        if len(looks) == 1:  # gone while it is hashed
            prune()
        return problem(path)

    def fill(path: Path, *rest: object, **options: object) -> object:
        loads.append(path)
        if len(loads) == 1:  # gone after it was found good
            prune()
        return load(path, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(manifest, "problem", look)
    monkeypatch.setattr(loading, "load_trained", fill)
    load_engine(run).close()
    assert [path.name for path in loads] == [listing.name_of(step) for step in (2, 3)]


def test_a_checkpoint_that_is_pruned_after_it_was_found_good_is_passed_over(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmworks.checkpoint import listing
    from lmworks.weights.run_models import final_checkpoint

    run = tmp_path / "run"
    shutil.copytree(run_dir, run, ignore=shutil.ignore_patterns("tune"))
    found, pruned = listing.newest_good, []

    def look(directory: Path) -> object:
        path, refused = found(directory)
        if path is not None and not pruned:
            pruned.append(path)
            shutil.copytree(path, path.with_name(listing.name_of(listing.step_of(path) + 1)))
            shutil.rmtree(path)
        return path, refused

    monkeypatch.setattr(listing, "newest_good", look)
    assert listing.step_of(final_checkpoint(run, "base")) == listing.step_of(pruned[0]) + 1
    (listing.directories(run / "checkpoints")[-1] / "meta.json").unlink()
    monkeypatch.setattr(listing, "newest_good", lambda directory: (listing.directories(directory)[-1], []))
    with pytest.raises(UserError, match=r"meta\.json cannot be read"):  # but one that is still there is damaged
        final_checkpoint(run, "base")


def test_adapters_are_not_added_to_weights_that_were_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an active run prunes the base after the adapters were found."""
    from lmworks.weights import adapters, run_models

    added: list[Path] = []
    base = tmp_path / "pruned"
    monkeypatch.setattr(adapters, "adapters_of", lambda path: None if path == base else (None, base))
    monkeypatch.setattr(adapters, "add_adapters", lambda state, path, options: added.append(path))
    model = torch.nn.Linear(1, 1)
    model.config = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="pruned"):
        run_models._filled(model, tmp_path, False)  # type: ignore[arg-type]
    assert not added


def test_a_damaged_checkpoint_is_not_served(run_dir: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(run_dir, damaged)
    largest = max((path for path in (damaged / "tune").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)
    with pytest.raises(UserError, match="has no good checkpoint"):
        load_engine(damaged)


def test_a_tokenizer_of_another_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(run_dir, mixed)
    path = mixed / "tokenizer" / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["added_tokens"].append({**spec["added_tokens"][-1], "id": 512, "content": "<|more|>"})
    path.write_text(json.dumps(spec))
    with pytest.raises(UserError, match=r"has 513 entries, but the model in .* has 512; put the tokenizer there"):
        load_engine(mixed)


def test_a_run_with_a_tuned_model_serves_its_base_model_too(run_dir: Path, serving: Callable[[Models, ServerOptions], str]) -> None:
    models = load_models(run_dir)
    url = serving(models, ServerOptions(max_waiting=3))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["talker", "talker-base"]
    assert client.models.retrieve("talker-base").model_extra["max_model_len"] == models.first.context  # type: ignore[index]
    assert isinstance(models.known["talker-base"], LazyModel), "nobody has asked it anything"
    whole = models.first.max_rows

    def answer(name: str) -> str:
        reply = client.completions.create(model=name, prompt="def ", max_tokens=12, temperature=0)
        assert reply.model == name
        return reply.choices[0].text

    with ThreadPoolExecutor(4) as pool:  # all four ask for a model that has to be opened first
        answers = set(pool.map(answer, ["talker-base"] * 3 + ["talker"]))
    engines = [models.known[name] for name in ("talker", "talker-base")]
    assert all(isinstance(engine, Engine) for engine in engines)
    assert sum(engine.max_rows for engine in engines) == whole, "both together hold no more in flight than one alone"  # type: ignore[union-attr]
    alone = load_engine(run_dir, base=True)
    request = CompletionRequest(prompt="def ", max_tokens=12, temperature=0).request(alone)
    expected = "".join(event.text for event in alone.stream(request) if isinstance(event, Delta))
    alone.close()
    assert expected in answers and len(answers) == 2, "each model has answered with its own weights"

    with pytest.raises(openai.NotFoundError, match="does not exist; this server has `talker` and `talker-base`"):
        answer("gpt-9")
    pages = [httpx.get(f"{url}/", params=asked, timeout=PATIENCE).text for asked in ({}, {"model": "talker-base"}, {"model": "<b>"})]
    assert ["Talk to talker-base</h2>" in page for page in pages] == [False, True, False]
    assert "<b>" not in pages[2] and "&quot;models&quot;: [&quot;talker&quot;, &quot;talker-base&quot;]" in pages[0]
    assert httpx.get(f"{url}/health", timeout=PATIENCE).json() == {"status": "ok", "model": "talker"}


@pytest.mark.parametrize("base", [False, True])
def test_both_models_of_a_run_are_reached_under_the_name_that_is_given(
    run_dir: Path, serving: Callable[[Models, ServerOptions], str], base: bool
) -> None:
    models = load_models(run_dir, base=base, name="mine")
    assert [(name, one.tuned) for name, one in models.known.items()] == [("mine", True), ("mine-base", False)][:: -1 if base else 1]
    client = openai.OpenAI(base_url=f"{serving(models, ServerOptions())}/v1", api_key="none", max_retries=0)
    texts: dict[str, set[str]] = {"mine": set(), "mine-base": set()}
    threads = []
    for name in list(texts) * 2:
        reply = client.completions.create(model=name, prompt="def ", max_tokens=12, temperature=0)
        assert reply.model == name
        texts[name].add(reply.choices[0].text)
        threads.append(sum(thread.name == "lmworks-generate" for thread in threading.enumerate()))
    assert [len(one) for one in texts.values()] == [1, 1] and texts["mine"] != texts["mine-base"]
    assert threads[1] == threads[-1], "a model is loaded once"
    assert [(engine.name, engine.tuned) for engine in models.known.values()] == [(name, name == "mine") for name in models.known]  # type: ignore[union-attr]


def test_a_name_is_that_of_the_only_model(run_dir: Path, tmp_path: Path) -> None:
    untuned = tmp_path / "untuned"
    shutil.copytree(run_dir, untuned, ignore=shutil.ignore_patterns("tune"))
    for where, base in ((untuned, False), (untuned, True), (f"{run_dir}@base", False)):
        models = load_models(where, base=base, name="mine")
        models.close()
        assert list(models.known) == ["mine"]


def test_answers_that_wait_for_one_model_count_for_the_other(run_dir: Path, serving: Callable[[Models, ServerOptions], str]) -> None:
    models = load_models(run_dir, base=True)
    assert list(models.known) == ["talker-base", "talker"]
    url = serving(models, ServerOptions(max_waiting=3))
    models.first.max_rows = 0  # what is asked of it waits
    request = CompletionRequest(prompt=["a"] * 2, max_tokens=1).request(models.first)
    job = models.first.submit(request, lambda event: None)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.RateLimitError, match="2 of at most 3 answers are waiting, and this request asks for 2 more"):
        client.completions.create(model="talker", prompt="a", n=2, max_tokens=1)
    job.cancel()
    assert client.completions.create(model="talker", prompt="a", n=2, max_tokens=1).model == "talker"


def test_a_model_that_cannot_be_opened_is_told_and_stops_nothing(
    run_dir: Path, tmp_path: Path, serving: Callable[[Models, ServerOptions], str]
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(run_dir, damaged)
    largest = max((path for path in (damaged / "checkpoints").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    url = serving(load_models(damaged), ServerOptions())
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="has no good checkpoint"):
        client.completions.create(model="talker-base", prompt="a", max_tokens=1)
    assert client.completions.create(model="talker", prompt="a", max_tokens=1).model == "talker"


def test_the_key_of_the_command_line_is_that_of_the_server(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServerOptions] = []
    monkeypatch.setattr("lmworks.serve.models.load_engine", lambda *_, **__: engine)
    monkeypatch.setattr(server, "serve", lambda models, listener, options: (listener.close(), served.append(options)))
    serve_commands.serve(str(tmp_path), port=0, api_key="sesame")
    assert [one.api_key for one in served] == ["sesame"]
