"""A run that starts from somebody's model names its files and copies none: what happens to them afterwards, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command import Lmworks
from test_start_tuning import _base, write_recipe

from lmworks.checkpoint import listing, manifest
from lmworks.export.gguf import write_gguf
from lmworks.io.files import read_json
from lmworks.tokenizer import load
from lmworks.train import stage
from lmworks.weights.huggingface import read_model
from lmworks.weights.run_models import load_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]}
        for a in range(8) for b in range(8)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("chats") / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_base_model_is_named_and_not_copied(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    base, run_dir = _base(tmp_path / "base", "qwen"), tmp_path / "run"
    recipe = write_recipe(tmp_path, base, chats)
    done = lmworks("pretrain", recipe)
    assert done.code == 0, done.err
    step = run_dir / "checkpoints" / "step-00000000"
    assert not list(step.glob("data-*")) and _size(step) < 20_000 < (base / "model.safetensors").stat().st_size
    about = listing.reference_of(step)
    assert about is not None and about["path"] == str(base)
    assert about["blake3"]["model.safetensors"] == manifest.hash_file(base / "model.safetensors")
    for words in (["diff", run_dir, 0, 0], ["reset-optimizer", run_dir]):
        done = lmworks("ckpt", *words)
        assert done.code == 2 and f"{step} has no tensors of its own: its weights are those of start_from, {base}" in done.error, done.err
    given, ours = read_model(base).state_dict(), load_model(run_dir).state_dict()
    assert all(torch.equal(given[name], ours[name]) for name in given)

    weights = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    done = lmworks("tune", recipe)
    changed = manifest.hash_file(base / "model.safetensors")
    assert done.code == 2 and changed in done.error and about["blake3"]["model.safetensors"] in done.error
    assert str(base / "model.safetensors") in done.error and "\n" not in done.error.strip()
    (base / "model.safetensors").unlink()
    done = lmworks("chat", run_dir)
    assert done.code == 2 and f"{base / 'model.safetensors'}, a file of the base model of {run_dir}, does not exist" in done.error

    (base / "model.safetensors").write_bytes(weights)
    shutil.move(base, tmp_path / "elsewhere")
    done = lmworks("chat", run_dir)
    assert done.code == 2 and f"put it (or a link to it) at {run_dir / 'base'}" in done.error, done.error
    (run_dir / "base").symlink_to(tmp_path / "elsewhere")
    ours = load_model(run_dir).state_dict()
    assert all(torch.equal(given[name], ours[name]) for name in given)


def test_a_run_with_a_copied_base_model_goes_on(
    lmworks: Lmworks, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """As runs were made before: the weights of step 0 are in its own files."""
    base, run_dir = _base(tmp_path / "base", "qwen"), tmp_path / "run"
    recipe = write_recipe(tmp_path, base, chats)
    with monkeypatch.context() as before:
        before.setattr(stage, "_named", lambda recipe, about: False)
        assert lmworks("pretrain", recipe).code == 0
    step = run_dir / "checkpoints" / "step-00000000"
    assert list(step.glob("data-*")) and listing.reference_of(step) is None
    given, ours = read_model(base).state_dict(), load_model(run_dir).state_dict()
    assert all(torch.equal(given[name], ours[name]) for name in given)
    done = lmworks("tune", recipe)
    assert done.code == 0, done.err


def test_adapters_belong_to_the_files_that_the_run_names(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    base, run_dir = _base(tmp_path / "base", "qwen"), tmp_path / "run"
    recipe = write_recipe(tmp_path, base, chats)
    done = lmworks("tune", recipe, "--set", "tune.lora={rank: 2}")
    assert done.code == 0, done.err
    merged, step = load_model(run_dir).state_dict(), listing.directories(run_dir / "tune" / "checkpoints")[-1]
    assert listing.read_meta(step)["meta"]["lora"]["hash"] == listing.content(run_dir / "checkpoints") != ""
    given = read_model(base).state_dict()
    assert any(not torch.equal(given[name], merged[name]) for name in given)
    assert torch.equal(given["embedding.weight"], merged["embedding.weight"])
    assert _size(run_dir / "tune" / "checkpoints") < (base / "model.safetensors").stat().st_size


def test_a_gguf_file_is_tuned_and_exported_with_its_tokenizer(lmworks: Lmworks, chats: Path, tmp_path: Path) -> None:
    import transformers

    original, run_dir = _base(tmp_path / "original", "qwen"), tmp_path / "run"
    model, tokenizer = read_model(original), load(original)
    write_gguf(model, tokenizer, tmp_path / "base.gguf", torch.float32, "base")
    recipe = write_recipe(tmp_path, tmp_path / "base.gguf", chats)
    done = lmworks("run", recipe)
    assert done.code == 0, done.err
    assert "of prose and 8 random ones, in transformers" in " ".join(done.err.split()), done.err
    step = run_dir / "checkpoints" / "step-00000000"
    about = listing.reference_of(step)
    assert about is not None and about["blake3"] == {"base.gguf": manifest.hash_file(tmp_path / "base.gguf")}
    loaded = load_model(run_dir, "base").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())
    peer = transformers.AutoTokenizer.from_pretrained(run_dir / "export" / "huggingface")
    text = "It isn't 12345, is it?\n\n  def f():\treturn 7"
    assert peer(text)["input_ids"] == tokenizer.encode(text)
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    prompt = peer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    assert prompt == tokenizer.encode_chat(question, None, True)[0]
    stops = read_json(run_dir / "export" / "huggingface" / "generation_config.json")["eos_token_id"]
    assert set(stops) >= set(tokenizer.stop_ids)
    assert lmworks("run", recipe).code == 0


def test_chat_with_a_gguf_file(lmworks: Lmworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io
    import sys

    original = _base(tmp_path / "original", "qwen")
    write_gguf(read_model(original), load(original), tmp_path / "base.gguf", torch.float32, "base")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is 1 + 1?\n"), encoding="utf-8"))
    done = lmworks("chat", tmp_path / "base.gguf", "--max-tokens", 4, "--temperature", 0)
    assert done.code == 0, done.err
